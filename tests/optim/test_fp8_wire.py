"""What FP8 parameters send, as XLA is told and as it is scheduled for 8 H100s: bytes, one reduction, in which order."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import batch_axes
from optim.test_fp8_parameters import FP8, RECIPES, SHAPES, setup
from oracles import traffic
from oracles.stablehlo import Collective, collectives

import jzero
from jzero.fp8 import CurrentScaling, DelayedScaling, Quantised
from jzero.plan import hlo, targets
from jzero.train.xla_options import compiler_options

# --- as XLA is told ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(
    ("layout", "axes"), [("data 8", ("data",)), ("data 2, replica 2, tensor 2", ("data", "tensor"))]
)
def test_one_byte_per_element_and_one_reduction_of_all_amaxes(layout, axes, recipe):
    pr, tx, _, params = setup(layout, fp8_recipe=RECIPES[recipe])
    sizes, batch = pr.mesh.shape, batch_axes(pr.mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, params), tx.state_specs(params)
    grads = {k: P(batch, *pr.specs[k]) for k in SHAPES}
    own = lambda params, state, grads: tx.step(jax.tree.map(lambda g: g[0], grads), state, params)
    mapped = jax.shard_map(own, mesh=pr.mesh, in_specs=(*specs, grads), out_specs=specs)
    ranks = sizes["replica"] * sizes["data"]
    place = lambda k, x: jax.ShapeDtypeStruct((ranks, *x.shape), jnp.float32, sharding=NamedSharding(pr.mesh, grads[k]))
    lowered = jax.jit(mapped).lower(params, tx.init(params), {k: place(k, x) for k, x in pr.start.items()})
    found = {c: n for c, n in collectives(lowered, pr.mesh).items() if c.axes and c.kind != "reduce-scatter"}
    size = lambda k: math.prod(SHAPES[k]) // (sizes["tensor"] if pr.specs[k] != P() else 1)
    padded = lambda k: -(-size(k) // sizes["data"]) * sizes["data"]
    expected = {Collective("all-gather", ("data",), "ui8", padded(k)): 1 for k in FP8}
    expected[Collective("all-gather", ("data",), "bf16", 2 * 8)] = 1
    expected[Collective("all-gather", ("data",), "f32", 4 * 8)] = 1
    expected[Collective("all-reduce", axes, "f32", 4 * (1 + 1 + 4))] = 1  # w, odd, four layers
    gradients = {c for c in found if c.axes == ("replica",)}
    assert {c: n for c, n in found.items() if c not in gradients} == expected


# --- as it is scheduled -----------------------------------------------------------------------------------------------

described = [
    pytest.mark.gpu_compiler,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]
LAYERS, WIDE = 4, {"up": (1024, 4096), "down": (4096, 1024), "qkv": (1024, 3072)}
COUNT = LAYERS * sum(math.prod(shape) for shape in WIDE.values()) // 8
OPTIONS = {
    "fp32": {"master": "fp32"},
    "scaled": {"master": "scaled_fp16", "state_dtype": "scaled_fp16"},
    "current": {"master": "fp32", "fp8_recipe": CurrentScaling()},
}


@functools.cache
def compiled(mode):
    """A step on each rank's own gradients, with the trainer's options of XLA."""
    mesh = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8))
    options = {"fp8_recipe": DelayedScaling(amax_history_len=4), **OPTIONS[mode]}
    tx = jzero.distributed_fused_adam(1e-3, mesh=mesh, stacked=lambda path: 1, **options)
    place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    fp8 = lambda shape: Quantised(place((LAYERS, *shape), jnp.float8_e4m3fn, P()), place((LAYERS,), jnp.float32, P()))
    params = {k: fp8(shape) for k, shape in WIDE.items()}
    grads = {k: place((8, LAYERS, *shape), "float32", P("data")) for k, shape in WIDE.items()}
    specs = jax.tree.map(lambda x: P(), params), tx.state_specs(params)
    own = lambda params, state, grads: tx.step(jax.tree.map(lambda g: g[0], grads), state, params)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)
    # each leaf in a call of its own
    chosen = compiler_options(mesh, gathered=1, scattered=1)
    lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(params, tx.init(params), grads)
    return hlo.parse(lowered.compile(compiler_options=chosen).as_text())


def entry(module, *opcodes):
    """Positions and instructions of the entry computation, in the order in which they run."""
    return [(n, i) for n, i in enumerate(module.entry.instructions) if i.opcode in opcodes]


def casts(module):
    """The kernels that write FP8 shards."""
    shards = {f"f8e4m3fn[{LAYERS},{','.join(map(str, s))}]" for s in ((128, 4096), (512, 1024), (128, 3072))}
    return [(n, i) for n, i in entry(module, "fusion") if shards & {str(a) for a in i.arrays}]


@pytest.mark.parametrize("mode", OPTIONS)
class TestSchedule:
    pytestmark = described

    def test_every_gather_is_of_bytes(self, mode):
        gathers = [i for _, i in entry(compiled(mode), "all-gather", "all-gather-start")]
        assert len(gathers) == len(WIDE)
        assert {a.dtype for i in gathers for a in i.arrays} <= {"u8", "f8e4m3fn"}
        sizes = sorted(max(a.size for a in i.arrays) for i in gathers)
        assert sizes == sorted(LAYERS * math.prod(shape) for shape in WIDE.values())

    def test_no_weight_exists_in_sixteen_bits(self, mode):
        module = compiled(mode)
        arrays = [a for _, i in enumerate(module.entry.instructions) for a in i.arrays]
        assert not [a for a in arrays if a.dtype in ("bf16", "f16") and a.size > COUNT]

    def test_there_is_one_reduction_of_amaxes(self, mode):
        [(_, reduction)] = entry(compiled(mode), "all-reduce", "all-reduce-start")
        assert reduction.arrays[0].size == LAYERS * len(WIDE)

    def test_the_cast_rounds(self, mode):
        module = compiled(mode)
        kernels = casts(module)
        assert len(kernels) == len(WIDE)
        for _, kernel in kernels:
            opcodes = {i.opcode for c in module.called(kernel) for i in c.instructions}
            assert {"reduce-precision", "clamp"} <= opcodes or {"reduce-precision", "minimum", "maximum"} <= opcodes

    def test_gathers_do_not_wait_for_the_last_update(self, mode):
        module = compiled(mode)
        last = max(n for n, _ in casts(module))
        first = min(n for n, _ in entry(module, "all-gather-start"))
        assert first < last
        reduction = entry(module, "all-reduce", "all-reduce-start")[0][0]
        assert (reduction < first) == (mode == "current")


LEAST = {  # bytes per element of a shard: state and gradient read, state and value written
    "fp32": 12 + 4 + 12 + 1,
    "scaled": (6 + 4) + (6 + 4) + 6 + 1,  # once more for the scales
    "current": 12 + 4 + 12 + (4 + 1),  # masters once more for the cast
}


@pytest.mark.parametrize("mode", LEAST)
@pytest.mark.parametrize("_", [pytest.param(None, marks=described)])
def test_the_update_reads_and_writes_the_least_possible(mode, _):
    found = traffic.phase_bytes(compiled(mode), "zero_update") / COUNT
    assert LEAST[mode] <= found * 1.001
    assert found <= 1.05 * LEAST[mode]
