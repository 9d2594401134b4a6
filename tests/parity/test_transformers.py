"""The same numbers as Hugging Face's own models: logits, losses, gradients, twenty steps of training, the way back."""

import dataclasses
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
from jzero.train.config import gpt_config, load_config
from jzero.train.step import build_program
from jzero.train.weights import initial_values

pytestmark = pytest.mark.filterwarnings("default::Warning")
V, T, BATCH = 61, 16, 8
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": T}
LLAMA = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 56, "max_position_embeddings": T,
}  # fmt: skip
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "gpt2_untied": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {**GPT2, "tie_word_embeddings": False}),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA),
    "llama_biased": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12, "rope_theta": 500.0,
         "tie_word_embeddings": True},
    ),
}  # fmt: skip
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
            center = 1.0 if "norm" in name and "weight" in name or ".ln_" in name and "weight" in name else 0.0
            weight.copy_(center + 0.1 * torch.randn(weight.shape, generator=draws))
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)
    return model, folder


@pytest.fixture(params=LAYOUTS)
def ours(request, theirs, tmp_path):
    """The program that `jzero convert`'s configuration gives, and its first state, for a layout."""
    assert main(["convert", str(theirs[1]), str(tmp_path / "model.yaml")]) == 0
    changes = dict(LAYOUTS[request.param])
    devices = changes.pop("devices", 1)
    config = load_config(
        tmp_path / "model.yaml",
        [
            f"trainer.devices={devices}", "trainer.precision=32", "trainer.gradient_clip_val=1.0",
            "model.make_vocab_size_divisible_by=64", f"model.global_batch_size={BATCH}", "model.micro_batch_size=2",
            "model.hidden_dropout=0", "model.attention_dropout=0", "model.optim.lr=1e-3",
            "model.optim.weight_decay=0.1", "model.optim.betas=[.9,.95]",
            "model.optim.sched={name: WarmupPolicy, warmup_steps: 0}",
            *(f"model.{key}={value}" for key, value in changes.items()),
        ],
    )  # fmt: skip
    mesh = make_mesh(**config.mesh_shape, devices=jax.devices()[:devices])
    program = build_program(config, mesh)
    return program, program.start(initial_values(config, program, V, print))


def batch(number):
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, V, (BATCH, T + 1), dtype=np.int32)
    tokens[:, 1::2] = tokens[:, ::2][:, : tokens[:, 1::2].shape[1]]  # something to learn: every other one comes again
    mask = (rng.random((BATCH, T)) > 0.2).astype(np.float32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def their_loss(model, data):
    logits = model(torch.tensor(data["tokens"], dtype=torch.long)).logits
    labels, mask = torch.tensor(data["labels"], dtype=torch.long), torch.tensor(data["loss_mask"])
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def test_the_same_logits_and_loss(theirs, ours):
    (model, _), (program, state), data = theirs, ours, batch(0)
    with torch.no_grad():
        logits = model(torch.tensor(data["tokens"], dtype=torch.long)).logits.numpy()
        loss = float(their_loss(model, data))
    found = np.asarray(program.logits(state.params, data["tokens"]))
    np.testing.assert_allclose(found[..., :V], logits, rtol=0, atol=1e-4)
    total, count = program.evaluate(state.params, program.place(data))
    assert abs(float(total / count) - loss) < 1e-5


def test_the_same_gradients(theirs, ours, tmp_path):
    """Of every parameter, by its name there: what Adam's first moment holds after a step from zero."""
    (model, _), (program, state), data = theirs, ours, batch(0)
    model.zero_grad()
    their_loss(model, data).backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    state, metrics = program.step(state, program.place(data))
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    params, inner = to_optax(program.layout.tx, state.opt, state.params)
    scale = (1 - program.config.model.optim.betas[0]) * min(1.0, 1.0 / (float(norm) + 1e-6))
    moments = next(x.mu for x in jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(x, "mu"))
    gradients = jax.tree.map(lambda m: jax.numpy.asarray(m) / scale, moments)
    hf.save(tmp_path / "gradients", gpt_config(program.config), gradients)
    found = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert set(found) == set(expected)
    assert len(found) >= 5
    for name, gradient in expected.items():
        # a key's bias shifts all scores of a query alike: its true gradient is 0
        floor = 1e-3 * float(norm) if "k_proj.bias" in name else np.abs(gradient).max()
        assert np.abs(found[name] - gradient).max() <= 1e-4 * floor, name


def test_twenty_steps_give_the_same_losses(theirs, ours):
    """Against torch.optim.AdamW, which decays matrices alone; clipped, in float32."""
    (original, folder), (program, state) = theirs, ours
    model = type(original).from_pretrained(folder, attn_implementation="eager").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config._attn_implementation = "eager"
    for name in ("attention_dropout",):
        for module in model.modules():
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    expected, found = [], []
    for number in range(20):
        loss = their_loss(model, batch(number))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        expected.append(float(loss))
        state, metrics = jax.block_until_ready(program.step(state, program.place(batch(number))))
        found.append(float(metrics["loss"]))
    assert expected[-1] < expected[0] - 0.2
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_there_and_back(theirs, ours, tmp_path):
    """jzero -> safetensors in several files -> transformers: the same logits, and nothing missing or left over."""
    (model, folder), (program, state) = theirs, ours
    config = gpt_config(program.config)
    hf.save(tmp_path / "saved", config, state.params, max_bytes=20_000)
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again, told = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True, attn_implementation="eager")
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.tensor(batch(0)["tokens"], dtype=torch.long)
    with torch.no_grad():
        np.testing.assert_array_equal(again(tokens).logits.numpy(), model(tokens).logits.numpy())
    back = dataclasses.replace(hf.read_config(tmp_path / "saved"), ffn_hidden_size=None)
    assert back == dataclasses.replace(hf.read_config(folder), ffn_hidden_size=None)
