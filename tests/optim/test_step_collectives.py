"""What one step of `zero` with local gradients sends: kind, axes, dtype, bytes and count, as XLA is told."""

import collections
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import mesh, problem
from oracles.stablehlo import Collective, collectives

import jzero

SHAPES = {"w": (8, 16), "odd": (5, 3), "scalar": (), "layers": (4, 7), "empty": (0, 2)}
STACKED = {"stacked": lambda path: int("layers" in path)}
WIDTH = {"f32": 4, "bf16": 2}
NAMES = {"float32": "f32", "bfloat16": "bf16"}


def found(pr, dtype, form, **options):
    """Collectives of one step on every rank's own gradients, which come as [data, ...] arrays."""
    batch = ("replica", "data")
    tx = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=pr.mesh, replica_axis="replica", **STACKED, **options)
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(pr.mesh, spec))
    params = {k: place(x.shape, pr.specs[k]) for k, x in pr.start.items()}
    ranks = pr.mesh.shape["replica"] * pr.mesh.shape["data"]
    stacked = {k: P(batch, *spec) for k, spec in pr.specs.items()}
    grads = {k: place((ranks, *x.shape), stacked[k]) for k, x in pr.start.items()}
    specs = tx.state_specs(params)

    def step(grads, state, params):
        return getattr(tx, form)(jax.tree.map(lambda g: g[0], grads), state, params)

    in_specs = (stacked, specs, pr.specs)
    mapped = jax.shard_map(step, mesh=pr.mesh, in_specs=in_specs, out_specs=(pr.specs, specs))
    counted = collectives(jax.jit(mapped).lower(grads, tx.init(params), params), pr.mesh)
    return {c: n for c, n in counted.items() if c.axes}  # an all-reduce over an axis of one rank moves nothing


def expected(pr, grad="f32", param="f32", *, scalars=()):
    """One reduce-scatter and one all-gather per leaf, an all-reduce of each shard over replicas, and norms."""
    data, replicas = pr.mesh.shape["data"], pr.mesh.shape["replica"]
    out = collections.Counter()
    for k, x in pr.start.items():
        parts = math.prod(pr.mesh.shape[n] for n in pr.specs[k] if n)
        layers = x.shape[0] // parts if k == "layers" else 1
        size = layers * math.ceil(x.size // parts / layers / data) * data
        if not size:
            continue
        out[Collective("reduce-scatter", ("data",), grad, size * WIDTH[grad])] += 1
        out[Collective("all-gather", ("data",), param, size * WIDTH[param])] += 1
        if replicas > 1:
            out[Collective("all-reduce", ("replica",), grad, size // data * WIDTH[grad])] += 1
    for axes in scalars:
        out[Collective("all-reduce", axes, "f32", 4)] += 1
    return dict(out)


@pytest.mark.parametrize("form", ["update", "step"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_reduce_scatter_and_one_all_gather_per_leaf(form, dtype):
    pr = problem(mesh(data=8), SHAPES)
    assert found(pr, dtype, form) == expected(pr, param=NAMES[dtype])


def test_dtypes_on_the_wire():
    pr = problem(mesh(data=8), SHAPES)
    options = {"grad_sync_dtype": jnp.bfloat16, "param_sync_dtype": jnp.bfloat16}
    assert found(pr, "float32", "step", **options) == expected(pr, "bf16", "bf16")


def test_replicas_add_one_all_reduce_of_the_shard():
    pr = problem(mesh(data=4, replica=2), SHAPES)
    assert found(pr, "float32", "step") == expected(pr)


@pytest.mark.parametrize(
    ("sizes", "specs", "scalars"),
    [
        ({"data": 8}, {}, [("data",)]),
        ({"data": 4, "replica": 2}, {}, [("data",)]),
        ({"data": 2, "tensor": 2, "pipeline": 2}, {"w": P(None, "tensor"), "layers": P("pipeline")},
         [("data",), ("data", "tensor"), ("pipeline", "data")]),
    ],
)  # fmt: skip
def test_clipping_adds_one_scalar_all_reduce_per_group_of_axes(sizes, specs, scalars):
    pr = problem(mesh(**sizes), SHAPES, specs)
    assert found(pr, "float32", "step", clip_norm=1.0) == expected(pr, scalars=scalars)


def test_without_sharding_there_is_one_all_reduce_per_leaf():
    pr = problem(mesh(data=8), {"w": (8, 16), "odd": (5, 3)})
    counted = found_without_zero(pr)
    assert counted == {Collective("all-reduce", ("data",), "f32", 4 * n): 1 for n in (128, 15)}


def found_without_zero(pr):
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, axis=None, replica_axis=("replica", "data"))
    step = lambda g, s, p: tx.step(jax.tree.map(lambda x: x[0], g), s, p)
    specs = tx.state_specs(pr.params)
    mapped = jax.shard_map(step, mesh=pr.mesh, in_specs=(P(("replica", "data")), specs, P()), out_specs=(P(), specs))
    grads = {k: jnp.zeros((8, *x.shape)) for k, x in pr.start.items()}
    return dict(collectives(jax.jit(mapped).lower(grads, tx.init(pr.params), pr.params), pr.mesh))


def test_plain_jit_reduces_no_more_than_the_gradient_once():
    """XLA's CPU compiler reduces whole gradients, but no second time, and gathers each parameter once."""
    pr = problem(mesh(data=8), {"w": (64, 32)})
    tx = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=pr.mesh)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.square(x @ p["w"])))(params)
        return tx.step(grads, state, params)

    x = jax.device_put(jnp.ones((16, 64)), NamedSharding(pr.mesh, P("data")))
    text = jax.jit(step).lower(pr.params, tx.init(pr.params), x).compile().as_text()
    count = lambda kind: sum(f" {kind}(" in line or f" {kind}-start(" in line for line in text.splitlines())
    assert count("all-gather") == 1
    assert count("all-reduce") + count("reduce-scatter") == 1
