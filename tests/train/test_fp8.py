"""FP8 products in the step: every layout sees the amaxes of one device, and what spoils a step spoils no scale."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import BATCH, batch, config, program, train, whole

from jzero.errors import JzeroError
from jzero.fp8 import DelayedScaling, recipes
from jzero.train.checkpoint import Checkpoints, load_part
from jzero.train.layout import BLOCKS

VOCABULARY, STEPS = 64, 4
MODEL = {"num_layers": 2, "num_query_groups": None, "fp8": True}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}


def fp8(devices, policy="replicated", micro_batches=1, recipe="delayed", **changes):
    history = {"fp8_amax_history_len": 4} if recipe == "delayed" else {}
    return config(devices, policy, micro_batches, **{**MODEL, **history, "fp8_recipe": recipe, **changes})


@functools.cache
def prog_of(name):
    return program({**LAYOUTS, **MORE_LAYOUTS}[name], VOCABULARY)


@functools.cache
def one_device(layers=2, steps=STEPS):
    """Rows of loss and norm, and the scales' state."""
    prog = prog_of("one device") if layers == 2 else program(fp8(1, num_layers=layers), VOCABULARY)
    state, rows = train(prog, steps)
    return rows, jax.tree.map(np.asarray, state.fp8)


def observed(prog, state, data=None):
    return jax.tree.map(np.asarray, prog.observe(state, prog.place(data or batch(0))))


GRID = "data 2, tensor 2, pipeline 2"
LAYOUTS = {
    "one device": fp8(1),
    "data 8": fp8(8),
    GRID: fp8(8, "gather_on_forward", 2, **SEQUENCE, **PIPELINE),
    "4 micro-batches": fp8(2, "gather_on_forward", 4),
}
MORE_LAYOUTS = {
    "tensor 2, selective": fp8(4, "gather_twice", 2, **TENSOR, activations_checkpoint_granularity="selective"),
    "full checkpointing": fp8(2, "gather_twice", 2, activations_checkpoint_granularity="full"),
    "one layer": fp8(2, "gather_twice", 1, num_layers=1),
    "interleaved": fp8(
        8, "gather_twice", 4, **SEQUENCE, **PIPELINE, num_layers=4, virtual_pipeline_model_parallel_size=2
    ),
    "interleaved, into shards": fp8(
        8, "gather_on_forward", 4, **TENSOR, **PIPELINE, num_layers=4, virtual_pipeline_model_parallel_size=2,
        grad_accumulation="sharded",
    ),
    "replica 2, into shards": fp8(4, "replicated", 4, replica_parallel_size=2, grad_accumulation="sharded"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*list(LAYOUTS)[1:], *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)]
)
def test_every_layout_sees_the_amaxes_of_one_device(name):
    """The first step's are the same numbers, by whatever parts of a tensor they were found; then rounding differs."""
    prog = prog_of(name)
    rows, scales = one_device(prog.config.model.num_layers)
    state, found = train(prog, STEPS)
    np.testing.assert_allclose(found[:, 0], rows[:, 0], rtol=1e-3)
    first, expected = np.asarray(state.fp8.amax_history)[0], scales.amax_history[0]
    np.testing.assert_array_equal(first[..., 1], expected[..., 1])  # of the initial weights
    np.testing.assert_allclose(first[0, 0, 0], expected[0, 0, 0], rtol=1e-5)  # no FP8 product before it
    np.testing.assert_allclose(first[..., 0], expected[..., 0], rtol=0.03)
    np.testing.assert_allclose(first[..., 2], expected[..., 2], rtol=0.1)
    np.testing.assert_allclose(state.fp8.scale, scales.scale, rtol=0.15)
    assert int(state.fp8.count) == STEPS


def test_the_largest_micro_batch_counts():
    """Not the last, and no sum: of inputs and weights, what each of the four sees alone."""
    alone, prog = prog_of("one device"), prog_of("4 micro-batches")
    data, parts = batch(0), []
    for rows in np.arange(BATCH).reshape(2, 4, -1).transpose(1, 0, 2):  # of a micro-batch on both ranks
        repeated = {name: np.tile(x[rows.ravel()], (4, 1)) for name, x in data.items()}
        parts.append(observed(alone, alone.init(), repeated)["amax"][..., :2])
    assert len({float(part[0, 0, 0]) for part in parts}) == 4
    state, _ = prog.step(prog.init(), prog.place(data))
    np.testing.assert_allclose(np.asarray(state.fp8.amax_history)[0, ..., :2], np.max(parts, 0), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [GRID, "full checkpointing"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_recipes_without_a_state(recipe, layout):
    """Blocks lie along what is contracted: where ranks hold parts of it, they are the same blocks."""
    conf, wide = prog_of(layout).config, {"hidden_size": 128, "kv_channels": 32} if recipe == "mxfp8" else {}
    undelayed = {"fp8_recipe": recipe, "fp8_amax_history_len": 1024, **wide}
    prog = program(dataclasses.replace(conf, model=dataclasses.replace(conf.model, **undelayed)), VOCABULARY)
    alone = program(fp8(1, recipe=recipe, **wide), VOCABULARY)
    _, rows = train(alone, 2)
    state, found = train(prog, 2)
    assert state.fp8 == ()
    np.testing.assert_allclose(found[:, 0], rows[:, 0], rtol=1e-3)
    np.testing.assert_allclose(found[:, 1], rows[:, 1], rtol=0.02)


def test_current_scales_are_those_of_the_whole_tensor():
    """Each operand's scale under tensor parallelism, not that of a part of it."""
    alone, prog = (
        program(conf, VOCABULARY) for conf in (fp8(1, recipe="current"), fp8(2, recipe="current", **SEQUENCE))
    )
    expected, seen = observed(alone, alone.init()), observed(prog, prog.init())
    np.testing.assert_array_equal(seen["scale"][..., 1], expected["scale"][..., 1])
    np.testing.assert_allclose(seen["scale"][..., 0], expected["scale"][..., 0], rtol=0.03)
    np.testing.assert_allclose(seen["amax"], expected["amax"], rtol=0.1)
    np.testing.assert_allclose(seen["flushed"], expected["flushed"], atol=0.01)
    assert seen["saturated"].max() == 0
    named = prog.layout.scaling.named(seen)
    assert len(named) == 4 * 2 * 4 * 3
    assert named["fp8/amax/layer 1/down/gradient"] == seen["amax"][1, 3, 2]


def test_the_first_state_is_that_of_the_initial_weights():
    prog = program(fp8(8, "gather_twice"), VOCABULARY)
    state = prog.init()
    weights = whole(prog, state.params)[BLOCKS]
    for i, path in enumerate([("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")]):
        weight = np.asarray(weights[path[0]][path[1]]["weight"]).reshape(2, -1)
        np.testing.assert_allclose(state.fp8.scale[:, i, 1], 448 / np.abs(weight).max(1), rtol=1e-6)
    abstract = jax.tree.map(lambda x: (x.shape, x.dtype), prog.abstract.fp8)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state.fp8) == abstract
    alone = prog_of("one device")
    seen = observed(alone, alone.init())
    assert seen["saturated"].max() < 0.01
    assert seen["flushed"][:, 1:, 2].max() == 0, "the first gradients would be lost"
    # position 0 attends to itself alone: the gradients of its query and key are rounding noise, a 24th of all
    assert seen["flushed"][:, 0, 2].max() < 1 / 24


def test_scales_are_those_of_the_recipe():
    changed = fp8(1, fp8_margin=1, fp8_interval=2, fp8_amax_compute_algo="most_recent", fp8_power_of_two_scales=True)
    expected = DelayedScaling(
        margin=1, interval=2, amax_history_len=4, amax_compute_algo="most_recent", power_of_two=True
    )
    assert program(changed, VOCABULARY).layout.scaling.recipe == expected
    prog = prog_of("one device")
    assert prog.layout.scaling.recipe == DelayedScaling(amax_history_len=4)
    state = prog.init()
    follows = jax.tree.map(jnp.array, state.fp8)
    for number in range(3):
        state, _ = prog.step(state, prog.place(batch(number)))
        follows = recipes.update(prog.layout.scaling.recipe, follows, state.fp8.amax_history[number])
        np.testing.assert_allclose(state.fp8.scale, follows.scale, rtol=1e-6)


def test_a_layer_fed_a_million_times_its_usual_input_recovers():
    prog = prog_of("one device")
    usual, _ = train(prog, 2)
    usual = jax.tree.map(np.asarray, usual)

    def fed(fp8, factor):
        """The usual parameters, but for layer 1's first norm, and the step that comes next."""
        state = jax.tree.map(jnp.asarray, usual._replace(fp8=fp8))
        norm = state.params[BLOCKS]["attention_norm"]
        norm["gain"] = norm["gain"].at[1].multiply(factor)
        return state

    seen = observed(prog, fed(usual.fp8, 1e6))["saturated"]
    assert seen[1, 0, 0] > 0.9
    assert seen[0, :, 0].max() < 0.01
    _, healthy = train(prog, 1, fed(usual.fp8, 1.0))
    state, rows = train(prog, 1, fed(usual.fp8, 1e6))
    assert np.isfinite(rows).all()
    assert state.fp8.scale[1, 0, 0] < 1e-5 * usual.fp8.scale[1, 0, 0]
    for _ in range(4):  # the history's length
        state, rows = train(prog, 1, fed(state.fp8, 1.0))
        assert np.isfinite(rows).all()
    np.testing.assert_allclose(state.fp8.scale[1, 0, 0], usual.fp8.scale[1, 0, 0], rtol=0.2)
    state, rows = train(prog, 1, fed(state.fp8, 1.0))
    np.testing.assert_allclose(rows[0, 0], healthy[0, 0], rtol=1e-3)
    assert observed(prog, fed(state.fp8, 1.0))["saturated"].max() < 0.01


def test_a_step_that_is_not_finite_changes_nothing_but_its_number():
    conf = fp8(2, "gather_on_forward", num_layers=1)
    trainer = dataclasses.replace(conf.trainer, skip_nonfinite=True)
    prog = program(dataclasses.replace(conf, trainer=trainer), VOCABULARY)
    state, _ = train(prog, 2)
    bias = state.params["final_norm"]["bias"]
    spoilt = {**state.params, "final_norm": {**state.params["final_norm"], "bias": bias * jnp.nan}}
    state = state._replace(params=spoilt)
    before = jax.tree.map(np.array, state)
    after, rows = train(prog, 1, state)
    assert np.isnan(rows).all()
    jax.tree.map(np.testing.assert_array_equal, after.fp8, before.fp8)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert (int(after.opt.guard.skipped), int(after.step), int(after.fp8.count)) == (1, 3, 2)


def test_a_restored_run_goes_on_bit_for_bit_and_on_another_mesh_to_a_thousandth(tmp_path):
    prog, other = prog_of(GRID), prog_of("one device")
    half, _ = train(prog, 2)
    checkpoints = Checkpoints(tmp_path, async_save=False)
    checkpoints.save(2, half, {})
    half_scales = np.array(half.fp8.scale)
    end, rows = train(prog, 3, half)
    restored, _ = checkpoints.restore(prog.abstract)
    again, same = train(prog, 3, restored)
    np.testing.assert_array_equal(rows, same)
    jax.tree.map(np.testing.assert_array_equal, end, again)
    checkpoints.close()
    abstract = {"params": other.abstract.params, "fp8": other.abstract.fp8}
    part = load_part(tmp_path, abstract, "2", plan=other.layout.plan)
    moved = other.init()._replace(**part, step=jnp.int32(2))
    np.testing.assert_array_equal(moved.fp8.scale, half_scales)
    np.testing.assert_allclose(train(other, 1, moved)[1][0, 0], rows[0, 0], rtol=1e-3)


def test_evaluation_and_logits_use_the_scales():
    alone, prog = prog_of("one device"), prog_of(GRID)
    state, other = alone.init(), prog.init()
    data, tokens = batch(0), batch(0)["tokens"][:3]
    scores = alone.logits(state.params, tokens, state.fp8)
    for a, b in zip(
        prog.evaluate(other.params, prog.place(data), other.fp8),
        alone.evaluate(state.params, alone.place(data), state.fp8),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3)
    np.testing.assert_allclose(prog.logits(other.params, tokens, other.fp8), scores, atol=0.02)
    coarse = state.fp8._replace(scale=state.fp8.scale * 1e6)  # saturates everything
    assert np.abs(np.asarray(alone.logits(state.params, tokens, coarse)) - scores).max() > 0.05
    with pytest.raises(JzeroError, match=r"delayed scaling needs its scales, found none; hand in `state\.fp8`"):
        alone.logits(state.params, tokens)


def test_without_fp8_there_is_nothing_of_it():
    prog = program(config(1, **{**MODEL, "fp8": False}), VOCABULARY)
    assert prog.abstract.fp8 == ()
    assert "f8E" not in prog.step.lower(prog.abstract, prog.abstract_batch()).as_text()
    with pytest.raises(JzeroError, match=r"there are no FP8 products; set model\.fp8=true"):
        prog.observe(prog.init(), prog.place(batch(0)))


def test_all_twelve_products_of_a_layer_are_in_eight_bits():
    """In the program handed to XLA: 4 weights × 3, of the loop over the layers and of the last layer."""
    prog = program(fp8(1, precision="bf16"), VOCABULARY)
    text = prog.step.lower(prog.abstract, prog.abstract_batch()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    eight = [line for line in products if re.search(r"tensor<[\dx]+xf8E", line)]
    assert len(eight) == 2 * 12
    assert sum("f8E5M2" in line for line in eight) == 2 * 8
