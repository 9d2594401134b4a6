"""FP8 parameters in the trainer: every policy, layout and checkpoint; against FP8 products of bfloat16 parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.stablehlo import collectives
from programs import batch, program, train
from test_fp8 import PIPELINE, SEQUENCE, STEPS, TENSOR, VOCABULARY, fp8

from jzero.fp8 import E4M3, Quantised, dequantise
from jzero.fp8.parameters import is_quantised
from jzero.train.checkpoint import Checkpoints
from jzero.train.config_check import validate
from jzero.train.placement import placements

NARROW = {"fp8_params": True, "precision": "bf16"}
WEIGHTS = [("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")]


def narrow(*args, **changes):
    return fp8(*args, **{**NARROW, **changes})


def weights(params):
    return [params["blocks"][a][b]["weight"] for a, b in WEIGHTS]


@functools.cache
def run(devices=1, policy="replicated", micro_batches=1, **changes):
    return train(program(narrow(devices, policy, micro_batches, **changes), VOCABULARY), STEPS)


@functools.cache
def wide(recipe):
    """Losses and norms of FP8 products whose weights are bfloat16."""
    return train(program(fp8(1, recipe=recipe, precision="bf16"), VOCABULARY), STEPS)[1]


def assert_close(found, expected, rtol):
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=rtol)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=20 * rtol)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
def test_losses_are_those_of_sixteen_bit_parameters(recipe):
    state, rows = run(recipe=recipe)
    assert_close(rows, wide(recipe), 1e-3)
    for w in weights(state.params):
        assert (w.value.dtype, w.scale.shape) == (E4M3, (2,))
    assert sum(is_quantised(x) for x in jax.tree.leaves(state.params, is_leaf=is_quantised)) == len(WEIGHTS)


LAYOUTS = {
    "data 2, tensor 2, pipeline 2": (8, "gather_on_forward", 2, {**SEQUENCE, **PIPELINE}),
}
MORE_LAYOUTS = {
    "gather twice, 2 micro-batches": (4, "gather_twice", 2, {}),
    "data 8": (8, "replicated", 1, {}),
    "gather on forward, 2 micro-batches": (4, "gather_on_forward", 2, {}),
    "tensor 2, full checkpointing": (4, "gather_twice", 2, {**SEQUENCE, "activations_checkpoint_granularity": "full"}),
    "into shards": (4, "gather_on_forward", 2, {"grad_accumulation": "sharded"}),
    "whole sequence, replicated": (4, "replicated", 2, {**TENSOR, "activations_checkpoint_granularity": "selective"}),
    "replica 2": (4, "replicated", 2, {"replica_parallel_size": 2}),
    "current, tensor 2": (4, "gather_on_forward", 1, {**SEQUENCE, "recipe": "current"}),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_every_layout_trains_alike(name):
    devices, policy, micro_batches, changes = {**LAYOUTS, **MORE_LAYOUTS}[name]
    state, rows = run(devices, policy, micro_batches, **changes)
    assert_close(rows, run(recipe=changes.get("recipe", "delayed"))[1], 1e-3)
    for w in weights(state.params):
        assert w.value.dtype == E4M3


def test_policies_keep_the_same_bytes():
    """What is gathered layer by layer is what would have been gathered after the update."""
    kept = {policy: run(2, policy) for policy in ("replicated", "gather_on_forward")}
    (first, one), (second, other) = kept.values()
    np.testing.assert_array_equal(one, other)
    for a, b in zip(weights(first.params), weights(second.params), strict=True):
        np.testing.assert_array_equal(np.asarray(a.value).view(np.uint8), np.asarray(b.value).view(np.uint8))
        np.testing.assert_array_equal(a.scale, b.scale)
        assert b.value.addressable_shards[0].data.nbytes == a.value.addressable_shards[0].data.nbytes // 2


def test_a_device_keeps_a_byte_per_weight_and_no_copy():
    """Beside embeddings, norms and biases: one byte each, and the master and moments of a shard."""
    prog = program(narrow(8, "replicated"), VOCABULARY)
    sizes = [(x.dtype.itemsize, x.size) for w in weights(prog.abstract.params) for x in [w.value]]
    assert {width for width, _ in sizes} == {1}
    count = sum(size for _, size in sizes)
    masters = weights(prog.abstract.opt.master)
    assert [m.dtype for m in masters] == [jnp.float32] * len(WEIGHTS)
    held = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in masters)
    assert held == 4 * count / 8
    wide_ones = [x for x in jax.tree.leaves(prog.abstract) if x.dtype == jnp.bfloat16 and x.ndim > 2]
    assert all(x.size < max(size for _, size in sizes) / 2 for x in wide_ones)


@pytest.mark.parametrize("policy", ["replicated", "gather_on_forward", "gather_twice"])
def test_weights_are_gathered_as_bytes(policy):
    """One byte per element, layer by layer or all layers at once; the amaxes of weights take one more all-reduce."""
    prog, data = program(narrow(8, policy), VOCABULARY), batch(0)
    counted = collectives(prog.step.lower(prog.abstract, prog.place(data)), prog.mesh)
    found = {c: n for c, n in counted.items() if c.axes}
    size = sum(w.value.size for w in weights(prog.abstract.params))
    last = size // prog.config.model.num_layers  # gathered once: its backward pass follows at once
    expected = {"replicated": size, "gather_on_forward": size, "gather_twice": 2 * size - last}[policy]
    assert sum(c.bytes * n for c, n in found.items() if (c.kind, c.dtype) == ("all-gather", "ui8")) == expected
    assert all(c.bytes * n < size for c, n in found.items() if c.kind == "all-gather" and c.dtype != "ui8")


def test_a_restored_run_goes_on_bit_for_bit_and_on_another_mesh_to_a_thousandth(tmp_path):
    conf = narrow(2, "gather_on_forward")
    prog = program(conf, VOCABULARY)
    state, _ = train(prog, 2)
    checkpoints = Checkpoints(tmp_path, async_save=False)
    checkpoints.save(2, state, {"model": {}})
    unbroken, rows = train(prog, 2, state)
    restored = checkpoints.restore(prog.abstract)[0]
    again, found = train(prog, 2, restored)
    np.testing.assert_array_equal(found, rows)
    bits = lambda x: np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 and x.ndim else np.asarray(x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), again, unbroken)
    other = program(narrow(8, "gather_twice", 2, **SEQUENCE, **PIPELINE), VOCABULARY)
    moved = Checkpoints(tmp_path, read_only=True, plan=other.layout.plan).restore(other.abstract)[0]
    assert_close(train(other, 2, moved)[1], rows, 1e-3)


@pytest.mark.slow
def test_evaluation_and_logits():
    prog, alone = program(narrow(4, "gather_on_forward"), VOCABULARY), program(narrow(1), VOCABULARY)
    state, one = prog.init(), alone.init()
    data = batch(1)
    sums = [p.evaluate(s.params, p.place(data), s.fp8) for p, s in ((prog, state), (alone, one))]
    np.testing.assert_allclose(*sums, rtol=1e-3)
    tokens = jnp.asarray(data["tokens"][:2])
    found = [np.asarray(p.logits(s.params, tokens, s.fp8)) for p, s in ((prog, state), (alone, one))]
    np.testing.assert_allclose(*found, rtol=2e-2, atol=2e-2)


def test_a_run_starts_from_weights():
    """From float32 shards, as those of Hugging Face: masters keep every bit, the bytes are those of `init`."""
    prog = program(narrow(2, "gather_on_forward"), VOCABULARY)
    state = prog.init()
    masters = prog.layout.tx.core.storage
    assert masters.master == "auto"
    values = jax.tree.map(
        lambda p, m: m if isinstance(p, Quantised) else p.astype(jnp.float32),
        state.params,
        prog.layout.plan.unflatten(prog.layout.plan.flatten(state.opt.master, "masters")),
        is_leaf=is_quantised,
    )
    started = prog.start(values)
    assert jax.tree.structure(started) == jax.tree.structure(state)
    for a, b in zip(weights(started.params), weights(state.params), strict=True):
        np.testing.assert_array_equal(dequantise(a, jnp.float32), dequantise(b, jnp.float32))
        assert a.value.sharding == b.value.sharding


def test_where_parameters_live():
    """Bytes of a device: a byte per weight and a scale per layer; state as the optimizer's report says."""
    prog = program(narrow(8, "gather_on_forward"), VOCABULARY)
    rows = {row.path: row for row in placements(prog)}
    for a, b in WEIGHTS:
        row = rows[f"blocks/{a}/{b}/weight"]
        count = int(np.prod(row.shape))
        history = 4 * 2 * (1 + prog.config.model.fp8_amax_history_len)
        assert (row.dtype, row.bytes, row.state_bytes) == (
            "float8_e4m3fn",
            count // 8 + 4 * 2,
            12 * count // 8 + history,
        )
    held = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(prog.abstract.params)
    )
    assert sum(row.bytes for row in rows.values()) == held


REFUSED = [
    ({"fp8": False}, "model.fp8_params: FP8 parameters are multiplied in FP8, found model.fp8 false"),
    ({"recipe": "mxfp8"}, "model.fp8_params: FP8 parameters have a scale per layer, found model.fp8_recipe mxfp8"),
    ({"optim": {"master": "none"}}, "model.optim.master: none would leave FP8 parameters without the values"),
    ({"optim": {"master": "remainder"}}, "model.optim.master: remainder would leave FP8 parameters without"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_settings_that_do_not_go_together(changes, match):
    with pytest.raises(ValueError, match=match):
        validate(narrow(2, **{"vocab_size": VOCABULARY, **changes}))


def test_observed_weights_are_the_parameters():
    """A product says nothing of a weight that comes in FP8: amax and scale are those of the parameter."""
    prog = program(narrow(4, "gather_on_forward", **TENSOR), VOCABULARY)
    state = prog.init()
    seen = prog.observe(state, prog.place(batch(0)))
    for i, w in enumerate(weights(state.params)):
        value = np.abs(np.asarray(w.value, np.float32)).reshape(2, -1).max(1)
        np.testing.assert_array_equal(seen["scale"][:, i, 1], w.scale)
        np.testing.assert_allclose(seen["amax"][:, i, 1], value / np.asarray(w.scale), rtol=1e-6)
