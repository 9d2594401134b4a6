"""Predicted = found: what the step communicates, in the program handed to XLA and in the one compiled for 8 H100s."""

import collections
import dataclasses
import math

import jax
import pytest
from oracles import hlo, predicted, stablehlo
from programs import config, program

from jzero import make_mesh
from jzero.plan import targets
from jzero.train.step import build_program

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers": 4}
LAYOUTS = [
    config(8),
    config(8, "gather_on_forward"),
    config(8, "gather_twice"),
    config(8, precision="bf16"),
    config(8, "gather_twice", precision="bf16"),
    config(8, optim={"name": "fused_adam"}),
    config(8, "gather_on_forward", replica_parallel_size=2),
    config(4, "replicated", 4),
    config(4, "gather_on_forward", 4),
    config(4, "gather_twice", 4),
    config(4, "replicated", 4, grad_accumulation="sharded"),
    config(4, "gather_on_forward", 4, grad_accumulation="sharded"),
    config(4, "gather_twice", 4, grad_accumulation="sharded"),
    config(4, "gather_twice", 2, activations_checkpoint_granularity="full"),
    config(8, **TENSOR),
    config(8, "gather_twice", **TENSOR, sequence_parallel=True),
    config(8, "gather_on_forward", 2, precision="bf16", **TENSOR, sequence_parallel=True),
    config(8, "gather_twice", 2, **TENSOR, sequence_parallel=True, activations_checkpoint_granularity="full"),
    config(8, "gather_on_forward", 2, **TENSOR, activations_checkpoint_granularity="selective"),
    config(8, "gather_on_forward", **TENSOR, sequence_parallel=True, replica_parallel_size=2),
    config(8, "replicated", 2, **TENSOR, sequence_parallel=True, grad_accumulation="sharded"),
    config(8, **TENSOR, sequence_parallel=True, optim={"name": "fused_adam"}),
    config(4, "replicated", 2, **PIPELINE),
    config(8, "gather_on_forward", 2, **PIPELINE, **TENSOR, sequence_parallel=True),
    config(8, "replicated", 2, **PIPELINE, **TENSOR, activations_checkpoint_granularity="full"),
    config(4, "gather_twice", 4, **PIPELINE, virtual_pipeline_model_parallel_size=2, precision="bf16"),
    config(8, "gather_on_forward", 4, **PIPELINE, replica_parallel_size=2, grad_accumulation="sharded"),
    config(8, "gather_on_forward", fp8=True),
    config(8, "gather_twice", 2, **PIPELINE, **TENSOR, sequence_parallel=True, fp8=True),
    config(8, "gather_on_forward", 2, **TENSOR, sequence_parallel=True, fp8=True, fp8_recipe="current"),
    config(8, "replicated", 2, **TENSOR, fp8=True, fp8_recipe="current", activations_checkpoint_granularity="full"),
]


def name(conf):
    model = conf.model
    accumulation = f"{conf.num_micro_batches} {model.grad_accumulation}"
    tensor = f"tensor{model.tensor_model_parallel_size}{'-sequence' * model.sequence_parallel}"
    pipeline = f"pipeline{model.pipeline_model_parallel_size}x{model.virtual_pipeline_model_parallel_size or 1}"
    return (
        f"{model.optim.name}-{conf.policy}-{accumulation}-replica{model.replica_parallel_size}-{tensor}-{pipeline}"
        f"-{model.activations_checkpoint_granularity}-{conf.trainer.precision}{f'-{model.fp8_recipe}' * model.fp8}"
    )


def lowered(prog):
    return prog.step.lower(prog.abstract, prog.abstract_batch())


@pytest.mark.parametrize("conf", LAYOUTS, ids=name)
def test_the_lowered_step_has_exactly_the_predicted_collectives(conf):
    prog = program(conf)
    found = stablehlo.collectives(lowered(prog), prog.mesh)
    expected = predicted.step_collectives(prog)
    assert {c: n for c, n in found.items() if c.axes} == expected
    if conf.zero and conf.model.replica_parallel_size == 1:
        scalars = {c: n for c, n in expected.items() if "data" in c.axes}
        assert predicted.totals(scalars)["all-reduce"] <= 64 * 1024


@pytest.mark.parametrize("policy", ["replicated", "gather_on_forward", "gather_twice"])
def test_four_micro_batches_reduce_their_gradients_once(policy):
    one, four = program(config(4, policy, 1)), program(config(4, policy, 4))
    scatters = lambda prog: {
        c: n for c, n in stablehlo.collectives(lowered(prog), prog.mesh).items() if c.kind == "reduce-scatter"
    }
    assert scatters(one) == scatters(four)


def test_the_prediction_can_be_wrong():
    prog = program(config(8))
    other = program(config(8, "gather_twice"))
    assert stablehlo.collectives(lowered(prog), prog.mesh) != predicted.step_collectives(other)


gpu = pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'")


def for_h100(conf):
    """The same program for described GPUs; attention as XLA compiles it, since cuDNN need not be there."""
    conf = dataclasses.replace(conf, model=dataclasses.replace(conf.model, attention_implementation="xla"))
    mesh = make_mesh(**conf.mesh_shape, devices=targets.devices("h100-sxm-80gb", conf.num_devices))
    return build_program(conf, mesh, 61)


@gpu
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "conf", [LAYOUTS[4], *(pytest.param(LAYOUTS[i], marks=pytest.mark.slow) for i in (0, 1, 2, 8, 12))], ids=name
)
def test_the_module_compiled_for_h100_moves_the_predicted_bytes(conf):
    prog = for_h100(conf)
    found = hlo.collective_bytes(lowered(prog).compile().as_text())
    expected = predicted.totals(predicted.step_collectives(prog))
    assert dict(found) == dict(expected)
    assert found["all-reduce"] <= 64 * 1024


@gpu
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "conf",
    [
        config(8, "gather_twice", precision="bf16", **TENSOR, sequence_parallel=True),
        pytest.param(config(8, "gather_on_forward", **TENSOR), marks=pytest.mark.slow),
        pytest.param(
            config(8, "gather_on_forward", 2, **TENSOR, sequence_parallel=True, replica_parallel_size=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=name,
)
def test_a_layer_on_h100s_has_megatrons_collectives_and_no_weight_crosses_the_tensor_axis(conf):
    """The prediction's bytes per axis: 2 + 2 (+ 2) per layer and direction, and weights split by tensor over data."""
    prog = for_h100(conf)
    found = bytes_by_axes(prog)
    expected = predicted.by_axes(predicted.step_collectives(prog))
    assert found == expected - predicted.found_again(prog)


def bytes_by_axes(prog):
    """Bytes by kind and axes in the compiled step, which has no all-to-all."""
    text = lowered(prog).compile().as_text()
    assert "all-to-all" not in text
    found = collections.Counter()
    for (kind, groups), size in hlo.collective_bytes_by_groups(text).items():
        found[kind, stablehlo.axes_of(groups, prog.mesh)] += size
    return found


WIDE = {"hidden_size": 256, "position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}


@gpu
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "conf",
    [
        config(8, "gather_on_forward", 2, **PIPELINE, **TENSOR, **WIDE, sequence_parallel=True, precision="bf16"),
        pytest.param(
            config(8, "replicated", 4, **INTERLEAVED, **TENSOR, **WIDE, precision="bf16"), marks=pytest.mark.slow
        ),
    ],
    ids=name,
)
def test_a_pipeline_on_h100s_moves_each_stages_weights_alone(conf):
    """Over data blocks / (tensor × pipeline) + (embedding + head) / tensor; over tensor and pipeline activations."""
    prog, m = for_h100(conf), conf.model
    found, expected = bytes_by_axes(prog), predicted.by_axes(predicted.step_collectives(prog))
    split = m.tensor_model_parallel_size
    sizes = {path: math.prod(x.shape) for path, x in predicted.leaves(prog.model.abstract)}
    blocks = sum(n for path, n in sizes.items() if path[0] == "blocks")
    tables = sizes["embedding", "token"] + sizes["head", "weight"]
    moved = blocks / (split * m.pipeline_model_parallel_size) + tables / split
    for kind, width in (("all-gather", 2), ("reduce-scatter", 4)):  # norms and some biases, which tensor does not split
        assert width * moved <= found[kind, ("data",)] < 1.02 * width * moved
    # the embedding's sum over tensor stands once more in its backward pass, which does not read it
    ticks, _ = predicted.pipeline_shape(conf)
    activation = m.micro_batch_size * m.encoder_seq_length * m.hidden_size * 2
    expected["reduce-scatter" if m.sequence_parallel else "all-reduce", ("tensor",)] -= ticks * activation
    summed = [sum(n for (kind, _), n in each.items() if kind == "all-reduce") for each in (found, expected)]
    assert 0.97 * summed[1] < summed[0] <= summed[1]  # of a sum over one axis and then another XLA may make one
    rest = [{key: n for key, n in each.items() if key[0] != "all-reduce"} for each in (found, expected)]
    assert rest[0] == rest[1]


@gpu
@pytest.mark.gpu_compiler
def test_collectives_of_the_layers_stay_in_the_loops():
    prog = for_h100(config(8, "gather_on_forward"))
    text = lowered(prog).compile().as_text()
    in_loop = [body for body in hlo.loop_bodies(text) if any("all-gather" in line for line in body)]
    assert in_loop, "no loop gathers weights"
    assert any("reduce-scatter" in line for body in hlo.loop_bodies(text) for line in body)


def test_described_gpus_need_a_known_name():
    with pytest.raises(ValueError, match="target 'h200x': expected one of h100-sxm-80gb"):
        targets.devices("h200x", 8)
    with pytest.raises(ValueError, match="devices 9: expected a positive multiple of the 2 hosts"):
        targets.devices("h100-sxm-80gb", 9, hosts=2)
    assert len(jax.devices()) == 8
