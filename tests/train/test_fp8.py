"""FP8 products in the training step: every layout sees the amaxes of one device, and what spoils a step spoils no scale."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import batch, config, program, train, whole

from jzero.errors import JzeroError
from jzero.fp8 import CurrentScaling, DelayedScaling, recipes
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
def one_device(recipe="delayed", layers=2):
    """Rows of loss and norm, the scales' state, and what was observed before the first step."""
    prog = program(fp8(1, recipe=recipe, num_layers=layers), VOCABULARY)
    seen = observed(prog, prog.init())
    state, rows = train(prog, STEPS)
    return rows, jax.tree.map(np.asarray, state.fp8), seen


def observed(prog, state, number=0):
    return jax.tree.map(np.asarray, prog.observe(state, prog.place(batch(number))))


LAYOUTS = {
    "data 8": fp8(8),
    "data 2, tensor 2, pipeline 2": fp8(8, "gather_on_forward", 2, **SEQUENCE, **PIPELINE),
    "4 micro-batches": fp8(2, "gather_on_forward", 4),
    "tensor 2, whole sequence, selective": fp8(4, "gather_twice", 2, **TENSOR, activations_checkpoint_granularity="selective"),
    "full checkpointing": fp8(2, "gather_twice", 2, activations_checkpoint_granularity="full"),
}  # fmt: skip
MORE_LAYOUTS = {
    "one layer": fp8(2, "gather_twice", 1, num_layers=1),
    "interleaved": fp8(8, "gather_twice", 4, **SEQUENCE, **PIPELINE, num_layers=4, virtual_pipeline_model_parallel_size=2),
    "interleaved, into shards": fp8(
        8, "gather_on_forward", 4, **TENSOR, **PIPELINE, num_layers=4, virtual_pipeline_model_parallel_size=2,
        grad_accumulation="sharded",
    ),
    "replica 2, into shards": fp8(4, "replicated", 4, replica_parallel_size=2, grad_accumulation="sharded"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_LAYOUTS)])
def test_every_layout_sees_the_amaxes_of_one_device(name):
    """The first step's are the same numbers, by whatever parts of a tensor they were found; then rounding differs."""
    conf = {**LAYOUTS, **MORE_LAYOUTS}[name]
    rows, scales, _ = one_device(layers=conf.model.num_layers)
    state, found = train(program(conf, VOCABULARY), STEPS)
    np.testing.assert_allclose(found[:, 0], rows[:, 0], rtol=1e-3)
    first, expected = np.asarray(state.fp8.amax_history)[0], scales.amax_history[0]
    np.testing.assert_array_equal(first[..., 1], expected[..., 1])  # of the initial weights
    np.testing.assert_allclose(first[..., 0], expected[..., 0], rtol=0.03)
    np.testing.assert_allclose(first[..., 2], expected[..., 2], rtol=0.1)
    np.testing.assert_allclose(state.fp8.scale, scales.scale, rtol=0.15)
    assert int(state.fp8.count) == STEPS


@pytest.mark.parametrize("layout", ["data 2, tensor 2, pipeline 2", "full checkpointing"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_recipes_without_a_state(recipe, layout):
    conf, width = LAYOUTS[layout], {"hidden_size": 128, "kv_channels": 32} if recipe == "mxfp8" else {}
    undelayed = {"fp8_recipe": recipe, "fp8_amax_history_len": 1024, **width}
    prog = program(dataclasses.replace(conf, model=dataclasses.replace(conf.model, **undelayed)), VOCABULARY)
    alone = program(fp8(1, recipe=recipe, **width), VOCABULARY)
    _, rows = train(alone, 2)
    state, found = train(prog, 2)
    assert state.fp8 == ()
    np.testing.assert_allclose(found, rows, rtol=5e-3)
    np.testing.assert_allclose(found[:, 0], rows[:, 0], rtol=1e-3)


def test_current_scales_are_those_of_the_whole_tensor():
    """Each operand's scale under tensor parallelism, not that of a part of it; gradients differ by rounding alone."""
    conf = fp8(2, recipe="current", **SEQUENCE)
    prog = program(conf, VOCABULARY)
    seen, expected = observed(prog, prog.init()), one_device("current")[2]
    np.testing.assert_allclose(seen["scale"][..., :2], expected["scale"][..., :2], rtol=0.03)
    np.testing.assert_allclose(seen["amax"], expected["amax"], rtol=0.1)
    assert seen["saturated"].max() == 0


def test_the_first_state_is_that_of_the_initial_weights():
    prog = program(fp8(8, "gather_twice"), VOCABULARY)
    state = prog.init()
    weights = whole(prog, state.params)[BLOCKS]
    for i, path in enumerate([("attention", "qkv"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")]):
        weight = np.asarray(weights[path[0]][path[1]]["weight"]).reshape(2, -1)
        np.testing.assert_allclose(state.fp8.scale[:, i, 1], 448 / np.abs(weight).max(1), rtol=1e-6)
    abstract = jax.tree.map(lambda x: (x.shape, x.dtype), prog.abstract.fp8)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state.fp8) == abstract
    seen = observed(prog, state)
    assert seen["saturated"].max() < 0.01
    assert seen["flushed"][..., 2].max() < 0.01, "the first gradients would be lost"


def test_the_largest_micro_batch_counts():
    """Scales of one step are those of an update with the largest of what each micro-batch sees alone."""
    prog = program(fp8(1, "gather_on_forward", 4), VOCABULARY)
    quarter = program(fp8(1, "gather_on_forward", 1, global_batch_size=4, micro_batch_size=4), VOCABULARY)
    state, parts = prog.init(), []
    for i in range(4):
        rows = {name: x[4 * i : 4 * i + 4] for name, x in batch(0, masked=False).items()}
        parts.append(np.asarray(quarter.observe(state, quarter.place(rows))["amax"]))
    expected = np.max(parts, 0) * np.float32([1, 1, 0.25])  # of gradients: of the mean over four times as many tokens
    assert len({float(part[0, 1, 0]) for part in parts}) == 4
    after, _ = prog.step(state, prog.place(batch(0, masked=False)))
    np.testing.assert_allclose(np.asarray(after.fp8.amax_history)[0], expected, rtol=0.05)
    np.testing.assert_allclose(np.asarray(after.fp8.amax_history)[0, ..., :2], expected[..., :2], rtol=1e-3)


def test_scales_are_those_of_the_recipe():
    prog = program(fp8(1, fp8_margin=1, fp8_interval=2, fp8_amax_compute_algo="most_recent"), VOCABULARY)
    recipe = DelayedScaling(margin=1, interval=2, amax_history_len=4, amax_compute_algo="most_recent")
    assert prog.layout.scaling.recipe == recipe
    state = prog.init()
    expected = jax.tree.map(np.asarray, state.fp8)
    for number in range(3):
        state, _ = prog.step(state, prog.place(batch(number)))
        amax = np.asarray(state.fp8.amax_history)[number]
        expected = recipes.update(recipe, expected, jnp.asarray(amax))
        np.testing.assert_array_equal(state.fp8.scale, expected.scale)


def still(conf):
    """The same run with a learning rate that changes next to nothing."""
    sched = dataclasses.replace(conf.model.optim.sched, min_lr=0.0)
    optim = dataclasses.replace(conf.model.optim, lr=1e-12, weight_decay=0.0, sched=sched)
    return dataclasses.replace(conf, model=dataclasses.replace(conf.model, optim=optim))


def test_a_layer_fed_a_million_times_its_usual_input_recovers():
    prog = program(still(fp8(1)), VOCABULARY)
    usual, _ = train(prog, 2)
    expected = np.asarray(usual.fp8.scale)
    gain = usual.params[BLOCKS]["attention_norm"]["gain"]

    def fed(state, factor):
        norm = {**state.params[BLOCKS]["attention_norm"], "gain": gain.at[1].multiply(factor)}
        blocks = {**state.params[BLOCKS], "attention_norm": norm}
        return state._replace(params={**jax.tree.map(jnp.copy, state.params), BLOCKS: jax.tree.map(jnp.copy, blocks)})

    spiked = fed(usual, 1e6)
    assert observed(prog, spiked)["saturated"][1, 0, 0] > 0.9
    assert observed(prog, spiked)["saturated"][0, 0, 0] < 0.01
    state, rows = train(prog, 1, spiked)
    assert np.isfinite(rows).all()
    assert state.fp8.scale[1, 0, 0] < 1e-5 * expected[1, 0, 0]
    state, rows = train(prog, 4, fed(state, 1.0))
    assert np.isfinite(rows).all()
    np.testing.assert_allclose(state.fp8.scale, expected, rtol=0.3)
    assert observed(prog, state)["saturated"].max() < 0.01


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing_but_its_number(devices):
    conf = fp8(devices, "gather_on_forward")
    prog = program(
        dataclasses.replace(conf, trainer=dataclasses.replace(conf.trainer, skip_nonfinite=True)), VOCABULARY
    )
    state, _ = train(prog, 2)
    spoil = lambda state, x: state._replace(
        params={**state.params, "final_norm": {**state.params["final_norm"], "bias": x}}
    )
    bias = state.params["final_norm"]["bias"]
    before = jax.tree.map(np.array, spoil(state, jnp.full_like(bias, jnp.nan)))
    after, rows = train(prog, 1, spoil(state, jax.device_put(jnp.full_like(bias, jnp.nan), bias.sharding)))
    assert np.isnan(rows).all()
    jax.tree.map(np.testing.assert_array_equal, after.fp8, before.fp8)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert int(after.opt.guard.skipped) == 1
    assert int(after.step) == 3


def test_a_restored_run_goes_on_bit_for_bit_and_on_another_mesh_to_a_thousandth(tmp_path):
    prog = program(fp8(8, "gather_on_forward", 2, **SEQUENCE, **PIPELINE), VOCABULARY)
    half, _ = train(prog, 2)
    checkpoints = Checkpoints(tmp_path, async_save=False)
    checkpoints.save(2, half, {})
    end, rows = train(prog, 3, half)
    restored, _ = checkpoints.restore(prog.abstract)
    again, same = train(prog, 3, restored)
    np.testing.assert_array_equal(rows, same)
    jax.tree.map(np.testing.assert_array_equal, end, again)
    checkpoints.close()
    other = program(fp8(1), VOCABULARY)
    abstract = {"params": other.abstract.params, "fp8": other.abstract.fp8}
    part = load_part(tmp_path, abstract, "2", plan=other.layout.plan)
    moved = other.init()._replace(**part, step=jnp.int32(2))
    np.testing.assert_allclose(train(other, 1, moved)[1][0, 0], rows[0, 0], rtol=1e-3)


def test_evaluation_and_logits_use_the_scales():
    alone, prog = program(fp8(1), VOCABULARY), program(LAYOUTS["data 2, tensor 2, pipeline 2"], VOCABULARY)
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
    with pytest.raises(JzeroError, match="there are no FP8 products; set model.fp8=true"):
        prog.observe(prog.init(), prog.place(batch(0)))


def test_all_twelve_products_of_a_layer_are_in_eight_bits():
    """In the program handed to XLA: 4 weights × 3, of the loop over the layers and of the last layer."""
    prog = program(fp8(1, precision="bf16"), VOCABULARY)
    text = prog.step.lower(prog.abstract, prog.abstract_batch()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    eight = [line for line in products if re.search(r"tensor<[\dx]+xf8E", line)]
    assert len(eight) == 2 * 12
    assert sum("f8E5M2" in line for line in eight) == 2 * 8


def test_metrics_have_a_name_per_tensor():
    prog = program(fp8(1, recipe="current"), VOCABULARY)
    assert isinstance(prog.layout.scaling.recipe, CurrentScaling)
    named = prog.layout.scaling.named(one_device("current")[2])
    assert len(named) == 4 * 2 * 4 * 3
    assert named["fp8/amax/layer 1/down/gradient"] == one_device("current")[2]["amax"][1, 3, 2]
