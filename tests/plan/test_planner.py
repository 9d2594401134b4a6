"""Whole plans, compiled for described GPUs, against predictions that know nothing of compiled modules."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from oracles import hlo, predicted
from test_unrolled import agree

from jzero import JzeroError, distributed_fused_adam, make_mesh
from jzero.plan import TARGETS, Report, available, devices, plan, planner, report, targets
from jzero.plan.hlo import parse, walk
from jzero.train.config import Config, Model, Optim, Trainer
from jzero.train.step import build_program

pytestmark = [
    pytest.mark.skipif(not available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
    pytest.mark.gpu_compiler,
]
H100 = "h100-sxm-80gb"
LAYOUTS = {
    "replicated": {"optim": Optim(policy="replicated")},
    "gather_twice, 4 micro-batches": {"optim": Optim(policy="gather_twice"), "global_batch_size": 32},
    "gather_on_forward, 2 replicas": {"optim": Optim(policy="gather_on_forward"), "replica_parallel_size": 2},
}


def configuration(**changes) -> Config:
    model = {
        "num_layers": 3, "hidden_size": 64, "num_attention_heads": 2, "encoder_seq_length": 32, "vocab_size": 120,
        "micro_batch_size": 1, "global_batch_size": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    } | changes  # fmt: skip
    return Config(trainer=Trainer(devices=8), model=Model(**model))


@pytest.fixture(
    scope="module",
    params=[*list(LAYOUTS)[:2], pytest.param(list(LAYOUTS)[2], marks=pytest.mark.slow)],
)
def planned(request) -> tuple[Config, Report]:
    conf = configuration(**LAYOUTS[request.param])
    return conf, plan(conf, H100)


def program_of(conf: Config):
    """The program that was planned."""
    model = dataclasses.replace(conf.model, attention_implementation="xla")
    mesh = make_mesh(**conf.mesh_shape, devices=devices(H100, conf.num_devices))
    return build_program(dataclasses.replace(conf, model=model), mesh)


def test_bytes_per_kind_are_those_an_independent_reader_finds(planned):
    _, found = planned
    sums = collections.Counter()
    for use in found.collectives:
        sums[use.kind] += use.bytes
    assert dict(sums) == dict(hlo.collective_bytes(found.text))


def test_bytes_per_kind_and_axis_are_those_of_the_design(planned):
    conf, found = planned
    expected = collections.Counter()
    for item, times in predicted.step_collectives(program_of(conf)).items():
        expected[item.kind, "+".join(item.axes)] += times * item.bytes
    assert {key: use.bytes for key, use in found.totals().items()} == dict(expected)


def test_arguments_cost_what_the_formula_says(planned):
    conf, found = planned
    program = program_of(conf)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(program.model.abstract))
    data = conf.data_parallel_size
    masters = {x.dtype for x in jax.tree.leaves(program.abstract.opt.master)}
    state = 12 if masters == {jnp.dtype(jnp.float32)} else 10  # two moments in float32, and a master or its remainder
    whole, sharded = (2, state) if conf.policy == "replicated" else (0, 2 + state)
    total = count * (whole + sharded / data)
    assert found.memory.parameters + found.memory.optimizer == pytest.approx(total, rel=0.01)
    rows = conf.model.global_batch_size // conf.num_devices
    assert found.memory.batch == rows * conf.model.encoder_seq_length * 3 * 4
    assert found.memory.peak == sum(
        getattr(found.memory, name) for name in ("parameters", "optimizer", "batch", "other", "outputs", "temporaries")
    )


def test_the_largest_temporaries_add_up_to_what_the_compiler_needs(planned):
    """Live ranges against XLA's own packing, on which XLA's numbers do not depend."""
    _, found = planned
    from jzero.plan.memory import Buffers

    total = sum(buffer.bytes for buffer in Buffers(found.module).fullest())
    assert total == pytest.approx(found.memory.temporaries, rel=0.15)
    assert all("(" in t.name for t in found.memory.largest[:3])  # the program's own: "... (layers.py:61)"


def test_times_add_up(planned):
    _, found = planned
    assert found.step_ms == pytest.approx(found.compute_ms + found.copies_ms + found.exposed_ms)
    assert found.exposed_ms == pytest.approx(sum(use.exposed_ms for use in found.collectives))
    conf, _ = planned
    tokens = conf.model.global_batch_size * conf.model.encoder_seq_length
    assert found.tokens_per_second == pytest.approx(tokens / (found.step_ms / 1e3))
    width, layers, length = 64, 3, 32
    block = 12 * width**2 + 13 * width
    flops = tokens * (6 * (layers * block + 128 * width) + 12 * layers * length * width)
    assert found.mfu == pytest.approx(flops / 8 / (found.step_ms / 1e3) / 989.4e12)


def test_a_machine_that_unrolls_the_loops_waits_as_long(planned):
    _, found = planned
    agree(found.text, TARGETS[H100], found.mesh)


@pytest.mark.slow
def test_the_trainer_compiles_what_was_planned():
    """The same schedule, and so the same options of the compiler."""
    conf = configuration(num_layers=1, attention_implementation="xla")
    found, program = plan(conf, H100), program_of(conf)
    text = program.step.lower(program.abstract, program.abstract_batch()).compile().as_text()
    schedule = lambda module: [(i.opcode, i.shape, c.name, n) for i, c, n in walk(module, module.entry)]
    assert schedule(parse(text)) == schedule(found.module)


def test_json_has_the_documented_keys_and_only_json_values(planned):
    import json

    _, found = planned
    read = json.loads(json.dumps(found.json()))
    assert set(read) >= {"memory", "collectives", "step_ms", "exposed_ms", "mfu", "compile_seconds"}
    assert set(read["memory"]) >= {"parameters", "optimizer", "temporaries", "peak", "limit", "fits"}
    assert all(
        set(use) >= {"kind", "axis", "count", "bytes", "estimated_ms", "hidden"} and 0 <= use["hidden"] <= 1
        for use in read["collectives"]
    )


def test_the_table_names_what_matters(planned):
    conf, found = planned
    text = str(found)
    for word in (conf.policy, "NVIDIA H100", "reduce-scatter", "exposed communication", "temporaries", "fits"):
        assert word in text
    assert found.json()["pipeline_idle"] == 0
    assert "a stage waits" not in text


def test_a_pipeline_says_how_long_its_stages_wait():
    """(S - 1) / (V M + S - 1): 2 stages of 2 chunks and 2 micro-batches."""
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    found = plan(configuration(num_layers=4, **stages), H100)
    assert found.json()["pipeline_idle"] == 1 / 5
    assert re.search(r"a stage waits for others +20\.0\n", re.sub(r" +\n", "\n", str(found)))


@pytest.mark.skipif(targets.cudnn_available(), reason="cuDNN is here")
def test_without_cudnn_the_plan_says_that_the_run_would_use_another_attention(planned):
    _, found = planned
    assert [n for n in found.notes if "cuDNN is not installed" in n and "jzero[plan-cudnn]" in n]
    assert "__cudnn" not in found.text


@pytest.mark.slow
@pytest.mark.skipif(not targets.cudnn_available(), reason="needs cuDNN: pip install -e '.[plan-cudnn]'")
def test_with_cudnn_the_plan_compiles_the_runs_own_attention():
    found = plan(configuration(num_layers=1), H100)
    assert found.notes == []
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= set(re.findall(r"__cudnn\$\w+", found.text))


def lowers_to_cudnn(conf: Config) -> bool:
    """Whether the run's own step calls cuDNN; JAX does not even trace that where the library is missing."""
    program = build_program(conf, make_mesh(**conf.mesh_shape, devices=devices(H100, conf.num_devices)))
    try:
        return "__cudnn" in program.step.lower(program.abstract, program.abstract_batch()).as_text()
    except RuntimeError as error:
        return "cuDNN not found" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_channels": 256},
        {"kv_channels": 20},
        {"attention_dropout": 0.1},
        {"attention_implementation": "xla"},
        {"attention_implementation": "cudnn"},
    ],
)
def test_the_note_is_there_where_the_run_would_use_cudnn(changes, monkeypatch):
    conf = configuration(num_layers=1, **changes)
    uses = lowers_to_cudnn(conf)
    monkeypatch.setattr(targets, "cudnn_available", lambda: False)
    compiled, notes = planner._attention(conf, None)
    assert bool(notes) == uses
    assert not lowers_to_cudnn(compiled)


def of(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params) ** 2, dtype=jnp.float32)


def gradient_step(params, batch):
    return params - (0.1 * jax.grad(loss)(params, batch)).astype(params.dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles_a_step(target):
    mesh = Mesh(np.array(devices(target, 4)), ("data",))
    args = of(mesh, (512, 512)), of(mesh, (1024, 512), "data")
    found = report(gradient_step, *args, target=target, donate_argnums=0)
    assert found.target == TARGETS[target].name
    assert found.memory.parameters == 512 * 512 * 2
    assert found.memory.batch == 1024 * 512 * 2 // 4
    [use] = found.collectives
    assert (use.kind, use.axis, use.count) == ("all-reduce", "data", 1)
    assert found.memory.limit == int(0.9 * TARGETS[target].memory)


def test_shardings_over_other_devices_and_jitted_functions_are_taken():
    cpus = Mesh(np.array(jax.devices()), ("data",))
    abstract = jax.sharding.AbstractMesh((8,), ("data",))
    found = []
    for mesh in (cpus, abstract):
        args = of(mesh, (512, 512)), of(mesh, (1024, 512), "data")
        found.append(report(jax.jit(gradient_step), *args, target=H100, devices=8).json())
    for one in found:
        del one["compile_seconds"]
    assert found[0] == found[1]


def test_a_step_with_an_optimizer_of_ones_own_is_read():
    mesh = make_mesh(data=8, devices=devices(H100, 8))
    tx = distributed_fused_adam(1e-3, mesh=mesh)
    params = of(mesh, (1024, 512))
    opt = tx.init(params)
    opt_bytes = sum(x.dtype.itemsize * x.size for x in jax.tree.leaves(opt)) / 8

    def step(params, opt, batch):
        updates, opt = tx.update(jax.grad(loss)(params, batch), opt, params)
        return params + updates.astype(params.dtype), opt

    found = report(step, params, opt, of(mesh, (4096, 1024), "data"), target=H100, tokens=4096, donate_argnums=(0, 1))
    count = 1024 * 512
    assert (found.memory.parameters, found.memory.batch) == (2 * count, 4096 * 1024 * 2 // 8)
    assert found.memory.optimizer == pytest.approx(opt_bytes, rel=0.01)
    assert found.tokens_per_second == pytest.approx(4096 / found.step_ms * 1e3)
    assert "all-gather" in {use.kind for use in found.collectives}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_plain_optax_step_is_read(kind):
    """Data parallel under `jit`, jitted by the user: the compiler reduces the gradients, nothing is sharded."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,), devices=devices(H100, 8))
    tx = optax.adamw(1e-3)
    params = {"w": of(mesh, (1024, 512), dtype=jnp.float32), "b": of(mesh, (512,), dtype=jnp.float32)}

    def mean_square(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(mean_square)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(tx.init, params)
    found = report(step, params, opt_state, of(mesh, (4096, 1024), "data", dtype=jnp.float32), target=H100)
    count = 1024 * 512 + 512
    assert found.memory.parameters == 4 * count
    assert found.memory.outputs < 100  # XLA's table of the results
    assert found.memory.optimizer == 2 * 4 * count + 4  # moments, and an int32 count
    assert found.memory.batch == 4 * 4096 * 1024 // 8
    assert {(use.kind, use.axis) for use in found.collectives} == {("all-reduce", "data")}
    assert sum(use.bytes for use in found.collectives) == 4 * count
    assert found.model_flops == 2 * 2 * (4096 // 8) * 1024 * 512  # no gradient of the batch


def test_results_that_replace_nothing_are_advised_to():
    mesh = Mesh(np.array(devices(H100, 1)), ("data",))
    args = of(mesh, (2048, 2048)), of(mesh, (64, 2048))
    found = report(gradient_step, *args, target=H100)
    assert found.memory.outputs == 2048 * 2048 * 2
    assert any("donate_argnums" in advice.text for advice in found.advice)
    assert not report(gradient_step, *args, target=H100, donate_argnums=0).advice


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: report(gradient_step, 1.0, 2.0, target=H100, devices=8), "nothing says how 8 devices share"),
        (lambda m: report(gradient_step, of(m, (8, 8)), 2.0, target=H100, devices=4), "devices 4, but .* mesh of 8"),
        (lambda m: report(gradient_step, of(m, (8, 8)), 2.0, target="h100"), "target 'h100': expected one of h100"),
        (lambda m: report(jax.jit(loss), of(m, (8, 8)), 2.0, target=H100, donate_argnums=0), "already jitted"),
        (
            lambda m: report(
                lambda params, batch: gradient_step(jax.device_put(params, NamedSharding(m, PartitionSpec())), batch),
                of(m, (8, 8)), of(m, (8, 8), "data"), target=H100,
            ),
            r"holds a mesh of other devices; build it from jzero.plan.devices\('h100-sxm-80gb', 8\)",
        ),
        (lambda m: plan(configuration(global_batch_size=9), H100), "global_batch_size: 9 is not divisible"),
        (lambda m: plan(configuration(), H100, devices=9, hosts=2), "devices 9: expected a multiple of the 2 hosts"),
        (lambda m: plan(configuration(tensor_model_parallel_size=4), H100), "heads: .* multiple of .*_size 4, found 2"),
    ],
    ids=["no shardings", "another number", "target", "jitted", "mesh", "batch", "hosts", "tensor"],
)  # fmt: skip
def test_mistakes(call, message):
    cpus = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(JzeroError, match=message) as error:
        call(cpus)
    assert "\n" not in str(error.value)
