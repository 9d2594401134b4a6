"""What the GPU compiler makes of the step: bytes on the wire, and rounding that must not be optimised away."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.plan import targets

pytestmark = [
    pytest.mark.gpu_compiler,
    pytest.mark.skipif(not targets.available(), reason="needs the GPU compiler: pip install -e '.[plan]'"),
]


def compiled(form, ranks, dtype="bfloat16", local=False):
    mesh = jzero.make_mesh(data=ranks, devices=targets.devices("h100-sxm-80gb", ranks))
    tx = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=mesh, master="fp32")
    place = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    params = {"w": place((4096,), dtype, P())}
    step = getattr(tx, form)
    if not local:
        return jax.jit(step).lower({"w": place((4096,), "float32", P())}, tx.init(params), params).compile().as_text()
    specs = tx.state_specs(params)
    own = lambda g, s, p: step({"w": g[0]}, s, p)
    mapped = jax.shard_map(own, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs))
    grads = place((ranks, 4096), "float32", P("data"))
    return jax.jit(mapped).lower(grads, tx.init(params), params).compile().as_text()


def lines(text, kind):
    return [line for line in text.splitlines() if f" {kind}(" in line or f" {kind}-start(" in line]


@pytest.mark.parametrize("form", ["update", "step"])
def test_bfloat16_parameters_cross_the_wire_in_two_bytes(form):
    text = compiled(form, 8, local=True)
    assert len(lines(text, "reduce-scatter")) == len(lines(text, "all-gather")) == 1
    assert "bf16[4096]" in lines(text, "all-gather")[0]
    assert not lines(text, "all-reduce")


@pytest.mark.parametrize("ranks", [1, 8])
def test_updates_are_differences_of_rounded_parameters(ranks):
    """Without the rounding, `apply_updates` would round `old + (new - old)`, not the new master."""
    assert "reduce-precision" in compiled("update", ranks)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("clip", [False, True])
def test_plain_jit_scatters_instead_of_all_reducing(axis_type, clip):
    """The gradients of a batch split over data, in a plain jitted step."""
    mesh = jzero.make_mesh(data=8, devices=targets.devices("h100-sxm-80gb", 8), axis_type=axis_type)
    zero = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=mesh)
    clipped = optax.chain(jzero.scatter_gradients(mesh), jzero.clip_by_global_norm(1.0), zero)
    tx = clipped if clip else zero
    place = lambda shape, *spec: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec)))
    params = {"in": place((256, 512), None, None), "out": place((512, 256), None, None)}

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.square(jax.nn.relu(x @ p["in"]) @ p["out"])))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        text = jax.jit(step).lower(params, tx.init(params), place((64, 256), "data", None)).compile().as_text()
    assert lines(text, "reduce-scatter")
    assert lines(text, "all-gather")
    assert all("= f32[] all-reduce" in line for line in lines(text, "all-reduce"))
    assert len(lines(text, "all-reduce")) == clip
