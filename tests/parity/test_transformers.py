"""The same numbers as Hugging Face's own models: logits, losses, gradients, twenty steps of training, the way back."""

import json
import warnings

import jax
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what they say of one another
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

import safetensors.numpy

from jzero import make_mesh, to_optax
from jzero.cli import main
from jzero.models import hf
from jzero.train.config import load_config, model_config
from jzero.train.metrics import means
from jzero.train.step import build_program
from jzero.train.weights import initial_values

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default::Warning")]
V, T, BATCH = 61, 16, 8
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": T}
LLAMA = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": T,
}  # fmt: skip
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rope_theta": 500.0, "tie_word_embeddings": True}
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "gpt2_untied": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {**GPT2, "tie_word_embeddings": False}),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA),
    "llama_biased": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {**LLAMA, **BIASED}),
    "bert": (transformers.BertForPreTraining, transformers.BertConfig, BERT),
}
LAYOUTS = {
    "one": {},
    "data2_tensor2": {"devices": 4, "tensor_model_parallel_size": 2, "sequence_parallel": "true"},
}


@pytest.fixture(scope="module", params=MODELS)
def theirs(request, tmp_path_factory):
    """A model of transformers' with random weights, norms and biases too, and the folder it was saved to."""
    kind, config, values = MODELS[request.param]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
    model = kind(config(**values, **ends, attn_implementation="eager"))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_gain = name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name)
            weight.copy_(is_gain + 0.1 * torch.randn(weight.shape, generator=draws))
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)  # eval: no dropout, in training either
    return model, folder


@pytest.fixture(scope="module", params=LAYOUTS)
def program(request, theirs, tmp_path_factory):
    """What `jzero convert`'s configuration gives, for a layout."""
    if request.param == "one" and ("untied" in theirs[1].name or "biased" in theirs[1].name):
        pytest.skip("the larger layout shows as much")
    file, changes = tmp_path_factory.mktemp("config") / "model.yaml", dict(LAYOUTS[request.param])
    assert main(["convert", str(theirs[1]), str(file)]) == 0
    devices = changes.pop("devices", 1)
    keys = [
        f"trainer.devices={devices}", "trainer.precision=32", "trainer.gradient_clip_val=1.0",
        "model.make_vocab_size_divisible_by=64", f"model.global_batch_size={BATCH}", "model.micro_batch_size=2",
        "model.hidden_dropout=0", "model.attention_dropout=0", "model.optim.lr=2e-3", "model.optim.weight_decay=0.1",
        "model.optim.betas=[.9,.95]", "model.optim.sched={name: WarmupPolicy, warmup_steps: 0}",
        *(f"model.{key}={value}" for key, value in changes.items()),
    ]  # fmt: skip
    config = load_config(file, keys)
    return build_program(config, make_mesh(**config.mesh_shape, devices=jax.devices()[:devices]))


def start(program):
    return program.start(initial_values(program.config, program, V, print))


def batch(number, model):
    rng = np.random.default_rng(number)
    tokens = rng.integers(1, V, (BATCH, T + 1), dtype=np.int32)  # 0 is BERT's padding, whose row torch never updates
    tokens[:, 1::2] = tokens[:, ::2][:, : tokens[:, 1::2].shape[1]]  # something to learn: every other one comes again
    mask = (rng.random((BATCH, T)) > 0.2).astype(np.float32)
    data = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
    if not isinstance(model, transformers.BertForPreTraining):
        return data
    text = np.arange(T) < rng.integers(T // 2, T + 1, (BATCH, 1))  # the rest is padding
    data |= {"segments": text.astype(np.int32), "token_types": (np.arange(T) > 5).astype(np.int32) * text}
    return data | {"loss_mask": mask * text, "is_random": rng.integers(0, 2, BATCH, dtype=np.int32)}


def call(model, data):
    """Their output for a batch."""
    names = {"tokens": "input_ids", "segments": "attention_mask", "token_types": "token_type_ids"}
    inputs = {names[k]: torch.tensor(x, dtype=torch.long) for k, x in data.items() if k in names}
    return model(**inputs)


def their_loss(model, data):
    out, mask = call(model, data), torch.tensor(data["loss_mask"])
    entropy = torch.nn.functional.cross_entropy
    if isinstance(model, transformers.BertForPreTraining):
        follows = entropy(out.seq_relationship_logits, torch.tensor(data["is_random"], dtype=torch.long))
        logits = out.prediction_logits
    else:
        follows, logits = 0.0, out.logits
    losses = entropy(logits.flatten(0, 1), torch.tensor(data["labels"], dtype=torch.long).flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum() + follows


def their_logits(model, data):
    with torch.no_grad():
        out = call(model, data)
        return (out.prediction_logits if hasattr(out, "prediction_logits") else out.logits).numpy()


def test_the_same_logits_and_loss(theirs, program):
    model, state = theirs[0], start(program)
    data = batch(0, model)
    inputs = {name: x for name, x in data.items() if name in ("tokens", "segments", "token_types")}
    found = np.asarray(program.logits(state.params, inputs))[..., :V]
    text = data.get("segments", np.ones((BATCH, T))) == 1
    np.testing.assert_allclose(found[text], their_logits(model, data)[text], rtol=0, atol=1e-4)
    loss = means([program.measure(state.params, program.place(data))])["val_loss"]
    assert abs(loss - their_loss(model, data).item()) < 1e-5


def test_the_same_gradients(theirs, program, tmp_path):
    """Of every parameter, by its name there: what Adam's first moment holds after a step from zero."""
    model, data = theirs[0], batch(0, theirs[0])
    model.zero_grad()
    their_loss(model, data).backward()
    norm = float(torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())))
    state, metrics = program.step(start(program), program.place(data))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    _, inner = to_optax(program.layout.tx, state.opt, state.params)
    [moments] = [x.mu for x in jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu")]
    share = (1 - program.config.model.optim.betas[0]) * min(1.0, 1.0 / (norm + 1e-6))
    hf.save(tmp_path / "gradients", model_config(program.config), jax.tree.map(lambda m: m / share, moments))
    found = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        no_effect = "k_proj.bias" in name or "key.bias" in name  # it moves all scores of a query alike
        largest = norm if no_effect else np.abs(gradient).max()
        assert np.abs(found[name] - gradient).max() <= 1e-4 * largest, name


def test_twenty_steps_give_the_same_losses(theirs, program):
    """Against torch.optim.AdamW, which decays matrices alone; clipped, in float32."""
    original, folder = theirs
    model, state = type(original).from_pretrained(folder, attn_implementation="eager").eval(), start(program)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8)
    expected, found = [], []
    for number in range(20):
        data = batch(number, model)
        loss = their_loss(model, data)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        expected.append(loss.item())
        state, metrics = jax.block_until_ready(program.step(state, program.place(data)))
        found.append(float(metrics["loss"]))
    assert expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_there_and_back(theirs, program, tmp_path):
    """jzero -> safetensors in several files -> transformers: the same logits, and nothing missing or left over."""
    (model, folder), saved = theirs, tmp_path / "saved"
    hf.save(saved, model_config(program.config), start(program).params, max_bytes=20_000)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again, told = type(model).from_pretrained(saved, output_loading_info=True, attn_implementation="eager")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    data = batch(0, model)
    np.testing.assert_array_equal(their_logits(again, data), their_logits(model, data))
    before, after = hf.read_config(folder), hf.read_config(saved)
    changed = {name for name, value in vars(before).items() if getattr(after, name) != value}
    assert changed <= {"ffn_hidden_size", "hidden_dropout", "attention_dropout"}  # null, and what this run set
    assert before.ffn_width == after.ffn_width
