"""First and last layers outside of FP8: they compute what a run without it does, and nothing of them is recorded."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import batch, batch_for, config, program, train
from test_fp8 import MODEL, PIPELINE, SEQUENCE, TENSOR, VOCABULARY, fp8
from test_fp8_params import narrow

from jzero.fp8 import CurrentScaling
from jzero.models import GPT, GPTConfig
from jzero.models.gpt import describe
from jzero.models.parameters import abstract
from jzero.train.config_check import validate

LAYERS = 4
WIDE = {"first_last_layers_bf16": True}
BERT = {"type": "bert", "bert_binary_head": True}


def wide(*args, **changes):
    return fp8(*args, **{"num_layers": LAYERS, **WIDE, **changes})


@functools.cache
def one_device(model="gpt"):
    return train(program(wide(1, **(BERT if model == "bert" else {})), VOCABULARY), 3)


PLAIN = {
    "2 micro-batches": (2, "gather_on_forward", 2, {}),
    "data 2, tensor 2, pipeline 2": (8, "gather_on_forward", 2, {**SEQUENCE, **PIPELINE}),
}


def test_all_layers_so_marked_are_a_model_without_fp8():
    """The same program, operation by operation: two layers, one at either end."""
    sizes = {"vocab_size": VOCABULARY, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    plain = GPTConfig(**sizes, param_dtype=jnp.bfloat16)
    marked = GPTConfig(**sizes, **WIDE, fp8=CurrentScaling(), param_dtype=jnp.bfloat16)
    loss = lambda config, params: GPT(config, params=params)(batch(0)["tokens"]).sum()
    gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
    text = lambda config: gradient.lower(config, abstract(describe(config))).as_text()
    assert text(marked) == text(plain)
    assert text(dataclasses.replace(marked, num_layers_at_end_in_bf16=0)) != text(plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_all_layers_so_marked_are_a_run_without_fp8(name):
    devices, policy, micro_batches, changes = PLAIN[name]
    changes = {**MODEL, "precision": "bf16", **changes}
    marked = program(config(devices, policy, micro_batches, **{**changes, **WIDE}), VOCABULARY)
    plain = program(config(devices, policy, micro_batches, **{**changes, "fp8": False}), VOCABULARY)
    np.testing.assert_array_equal(train(marked, 2)[1], train(plain, 2)[1])


@pytest.mark.parametrize(("start", "end", "pieces"), [(1, 1, 1), (0, 1, 1), (1, 0, 2), (2, 1, 1), (0, 0, 2)])
def test_products_of_the_other_layers_alone_are_in_eight_bits(start, end, pieces):
    """In the program handed to XLA; a piece is the loop over them, or the last layer, which stands outside."""
    ends = {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
    prog = program(wide(1, precision="bf16", **ends), VOCABULARY)
    text = prog.step.lower(prog.abstract, prog.abstract_batch()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum(re.search(r"tensor<[\dx]+xf8E", line) is not None for line in products) == pieces * 12


LAYOUTS = {
    "data 2, tensor 2, pipeline 2": (8, "gather_on_forward", 2, {**SEQUENCE, **PIPELINE}),
    "interleaved, selective": (
        8, "gather_twice", 4,
        {**TENSOR, **PIPELINE, "virtual_pipeline_model_parallel_size": 2,
         "activations_checkpoint_granularity": "selective"},
    ),
    "interleaved, full, into shards": (
        4, "replicated", 4,
        {**PIPELINE, "virtual_pipeline_model_parallel_size": 2, "activations_checkpoint_granularity": "full",
         "grad_accumulation": "sharded"},
    ),
    "gather twice, selective": (2, "gather_twice", 4, {"activations_checkpoint_granularity": "selective"}),
    "gather on forward": (4, "gather_on_forward", 4, {}),
    "bert, pipeline 2": (4, "gather_on_forward", 2, {**PIPELINE, **BERT}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_device(name):
    devices, policy, micro_batches, changes = LAYOUTS[name]
    state, rows = one_device(changes.get("type", "gpt"))
    prog = program(wide(devices, policy, micro_batches, **changes), VOCABULARY)
    initial = np.array(prog.init().fp8.scale)
    found, losses = train(prog, 3)
    np.testing.assert_allclose(losses[:, 0], rows[:, 0], rtol=1e-3)
    np.testing.assert_allclose(found.fp8.scale, np.asarray(state.fp8.scale), rtol=0.15)
    ends = [0, LAYERS - 1]
    np.testing.assert_array_equal(np.asarray(found.fp8.scale)[ends], initial[ends])
    history = np.asarray(found.fp8.amax_history)[:3]
    assert not history[:, ends].any()
    assert history[:, 1:-1].all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_recipes_without_a_state(recipe):
    sizes = {"hidden_size": 128, "kv_channels": 32} if recipe == "mxfp8" else {}
    _, rows = train(program(wide(1, recipe=recipe, **sizes), VOCABULARY), 2)
    grid = program(wide(8, "gather_on_forward", 2, recipe=recipe, **SEQUENCE, **PIPELINE, **sizes), VOCABULARY)
    np.testing.assert_allclose(train(grid, 2)[1][:, 0], rows[:, 0], rtol=1e-3)


@pytest.mark.slow
def test_evaluation_logits_and_what_is_observed():
    alone, grid = (
        program(conf, VOCABULARY) for conf in (wide(1), wide(8, "gather_on_forward", 2, **SEQUENCE, **PIPELINE))
    )
    state, other = alone.init(), grid.init()
    sums = [p.evaluate(s.params, p.place(batch(0)), s.fp8) for p, s in ((alone, state), (grid, other))]
    np.testing.assert_allclose(*sums, rtol=1e-3)
    tokens = batch(0)["tokens"][:3]
    scores = alone.logits(state.params, tokens, state.fp8)
    np.testing.assert_allclose(grid.logits(other.params, tokens, other.fp8), scores, atol=0.02)
    named = grid.layout.scaling.named(grid.observe(other, grid.place(batch_for(grid, 0))))
    assert {name.split("/")[2] for name in named} == {"layer 1", "layer 2"}
    assert all(value > 0 for name, value in named.items() if "/amax/" in name)


REFUSED = [
    (fp8(1, vocab_size=VOCABULARY, fp8=False, **WIDE), "first_last_layers_bf16: without model.fp8 no layer is in FP8"),
    (narrow(1, vocab_size=VOCABULARY, **WIDE), "model.fp8_params keeps the weights of all layers in FP8, as one array"),
    (fp8(1, vocab_size=VOCABULARY, num_layers_at_end_in_bf16=2), "num_layers_at_end_in_bf16: has no meaning while"),
    (
        wide(1, vocab_size=VOCABULARY, num_layers_at_start_in_bf16=5),
        "num_layers_at_start_in_bf16: expected 0 to num_layers 4, found 5",
    ),
]


@pytest.mark.parametrize(("conf", "match"), REFUSED)
def test_settings_that_do_not_go_together(conf, match):
    with pytest.raises(ValueError, match=match):
        validate(conf, 1)
