"""A state goes from plain optax to `zero` and back, between precisions, meshes and orders; the next steps match."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import assert_close, assert_same, jit_step, mesh, problem, run, values

import jzero
from jzero.optim.convert import _sources

SHAPES = {"w": (8, 16), "odd": (5, 3), "layers": (4, 7), "bias": (6,), "scalar": (), "empty": (0, 3)}
SPLIT = {"w": P(None, "tensor"), "bias": P("tensor")}
ADAM = optax.adamw(1e-2, weight_decay=0.1)
COMMON = {"replica_axis": "replica", "stacked": lambda path: int("layers" in path)}


def zero(m, **options):
    return jzero.zero(ADAM, mesh=m, **COMMON, **options)


def after(steps, pr, tx, params=None):
    """Parameters and state after some steps."""
    params = pr.params if params is None else params
    found, _, state = run(jit_step(pr, tx), params, tx.init(params), steps)
    return found, state


@functools.cache
def after_plain(steps):
    """The same by optax alone, on one device."""
    params, state = values(SHAPES), ADAM.init(values(SHAPES))
    return train_plain(problem(mesh(data=8), SHAPES), params, state, steps)


def test_to_the_state_of_plain_adamw():
    pr = problem(mesh(data=4, tensor=2), SHAPES, SPLIT)
    tx = zero(pr.mesh)
    params, state = jzero.to_optax(tx, *reversed(after(3, pr, tx)))
    expected, adam = after_plain(3)
    assert jax.tree.structure(state) == jax.tree.structure(adam)
    assert jax.tree.map(np.shape, (params, state)) == jax.tree.map(np.shape, (expected, adam))
    assert all(isinstance(x, np.ndarray) and x.dtype != np.float64 for x in jax.tree.leaves((params, state)))
    assert_close(params, expected)
    for name in ("mu", "nu"):
        assert_close(getattr(state[0], name), getattr(adam[0], name), atol=1e-6)
    assert int(state[0].count) == 3
    assert_close(train_plain(pr, params, state, 3)[0], after_plain(6)[0])


UPDATE = jax.jit(ADAM.update)


def train_plain(pr, params, state, steps):
    for _ in range(steps):
        grads = {k: np.asarray(g, np.float32) for k, g in pr.gradients(params).items()}
        updates, state = UPDATE(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("form", ["tree", "names"])
def test_from_the_state_of_plain_adamw(form):
    """Also as a checkpoint gives it: nested dicts with the same names, parameters in another order."""
    params, state = after_plain(3)
    pr = problem(mesh(data=4, tensor=2), SHAPES, SPLIT)
    tx = zero(pr.mesh)
    if form == "names":
        state = {"0": dict(reversed(state[0]._asdict().items()))}
        params = dict(reversed(params.items()))
    ours, shards = jzero.from_optax(tx, state, params, like=pr.params)
    assert_same(ours, params)
    fresh = tx.init(pr.params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), shards) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), fresh)  # fmt: skip
    assert {k: x.sharding for k, x in ours.items()} == {k: x.sharding for k, x in pr.params.items()}
    found, _, _ = run(jit_step(pr, tx), ours, shards, 3)
    assert_close(found, after_plain(6)[0])


def test_there_and_back_is_exact():
    pr = problem(mesh(data=8), SHAPES)
    tx = zero(pr.mesh)
    params, state = after(3, pr, tx, pr.place(pr.start, "bfloat16"))
    whole, adam = jzero.to_optax(tx, state, params)
    again, back = jzero.from_optax(tx, adam, whole, like=params)
    assert_same((again, back), (params, state))


# --- from one mesh to another -----------------------------------------------------------------------------------------

MESHES = {"8": {"data": 8}, "6": {"data": 6}, "1": {"data": 1}, "4x2": {"data": 4, "replica": 2}, "3": {"data": 3},
          "2x2x2": {"data": 2, "tensor": 2, "replica": 2}}  # fmt: skip


@pytest.mark.parametrize("route", ["8 6 1 8", "4x2 3 2x2x2 8"])
def test_from_mesh_to_mesh(route):
    """After each move two steps; the parameters follow those that never moved."""
    steps, before = 0, None
    for name in route.split():
        m, shapes = mesh(**MESHES[name]), {k: SHAPES[k] for k in ("w", "odd", "bias")}
        pr = problem(m, shapes, SPLIT if "tensor" in MESHES[name] else {})
        tx = zero(m, master="fp32")
        params, state = jzero.convert(*before, tx, pr.params) if before else (pr.params, tx.init(pr.params))
        params, _, state = run(stepper(pr, tx), params, state, 2)
        steps, before = steps + 2, (tx, state, params)
        assert_close(params, {k: after_plain(steps)[0][k] for k in shapes})


def stepper(pr, tx):
    """A step with gradients of NumPy: a batch of 16 rows does not split over 6 ranks."""
    step = jax.jit(tx.step)

    def run_once(params, state):
        grads = pr.place(pr.gradients({k: np.asarray(p, np.float64) for k, p in params.items()}))
        params, state = step(grads, state, params)
        return params, params, state

    return run_once


def test_a_device_holds_no_more_than_its_shards_and_one_whole_array():
    """Measured on the live arrays while a state of 16 leaves is converted."""
    shapes = {f"w{i}": (64, 65) for i in range(16)}
    pr = problem(mesh(data=8), shapes)
    tx = zero(pr.mesh)
    params, state = pr.params, tx.init(pr.params)
    size, most = 64 * 65 * 4, 0
    held = lambda: sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.live_arrays())
    before = held()
    values_, inner = _sources(tx, state, params)
    for _, fetch in [*values_, *inner]:
        fetch()
        most = max(most, held() - before)
    assert most <= 3 * 16 * size / 8 * 1.02 + size


# --- from one precision to another ------------------------------------------------------------------------------------

PRECISIONS = {
    "float32": ("float32", {}),
    "master": ("bfloat16", {"master": "fp32"}),
    "remainder": ("bfloat16", {"master": "remainder"}),
    "scaled": ("bfloat16", {"master": "scaled_fp16", "state_dtype": "scaled_fp16"}),
    "low": ("bfloat16", {"master": "none", "state_dtype": "bf16"}),
    "eight bits": ("bfloat16", {"master": "remainder", "state_dtype": {"mu": "scaled_fp8", "nu": "scaled_fp16"}}),
    "float16": ("float16", {"master": "fp32"}),
}
EXACT = {"float32", "master", "remainder", "float16"}


QUICK = [("float32", "remainder"), ("remainder", "float32"), ("low", "remainder"), ("master", "scaled")]
TARGETS = ["float32", "remainder", "scaled", "low", "eight bits"]
REST = [pytest.param(a, b, marks=pytest.mark.slow) for a in PRECISIONS for b in TARGETS if (a, b) not in QUICK]


@pytest.mark.parametrize(("source", "target"), QUICK + REST)
def test_from_precision_to_precision(source, target):
    """Exact wherever nothing is lost; otherwise refused, and with `lossy` within the precision of the target."""
    pr = problem(mesh(data=8), {k: SHAPES[k] for k in ("w", "odd", "layers")})
    (dtype, options), (dtype2, options2) = PRECISIONS[source], PRECISIONS[target]
    old, new = zero(pr.mesh, **options), zero(pr.mesh, **options2)
    params = pr.place(pr.start, dtype)
    state = old.init(params)
    grads = pr.place(pr.scales)
    params, state = jax.block_until_ready(jax.jit(old.step)(grads, state, params))
    like = pr.place(pr.start, dtype2)
    whole, adam = jzero.to_optax(old, state, params)
    if target not in EXACT and source != target:
        with pytest.raises(ValueError, match=r"cannot hold it exactly, but rounds it by up to .*lossy=True"):
            jzero.convert(old, state, params, new, like)
    made, after = jzero.convert(old, state, params, new, like, lossy=target not in EXACT)
    assert {p.dtype for p in made.values()} == {jnp.dtype(dtype2)}
    found, inner = jzero.to_optax(new, after, made)
    if target in EXACT:
        assert_same((found, inner), (whole, adam))
        straight = jax.jit(new.step)(grads, after, made)[0]
        expected = optax.apply_updates(whole, jax.jit(ADAM.update)(pr.scales, adam, whole)[0])
        rtol = 1.3e-6 if dtype2 == "float32" else 2.0**-8
        assert_close(straight, expected, rtol=rtol)
    else:
        bound = {"scaled": 2.0**-10, "low": 2.0**-8, "eight bits": 0.07}[target]
        for a, b in zip(jax.tree.leaves((found, inner)), jax.tree.leaves((whole, adam)), strict=True):
            assert np.abs(a - b).max(initial=0) <= bound * np.abs(b).max(initial=0)


def test_count_of_skipped_steps_and_loss_scale_go_on():
    scale = jzero.DynamicLossScale(64.0, hysteresis=1)
    pr, other = problem(mesh(data=8), SHAPES), problem(mesh(data=4), SHAPES)
    old, new = zero(pr.mesh, loss_scale=scale), zero(other.mesh, loss_scale=scale)
    bad = pr.place({k: g * np.nan for k, g in pr.scales.items()})
    params, state = jax.jit(old.step)(bad, old.init(pr.params), pr.params)
    _, after = jzero.convert(old, state, params, new, other.params)
    assert (int(after.guard.skipped), float(after.guard.loss_scale.scale)) == (1, 32.0)


def test_another_transformation_and_a_list():
    """Momentum, whose state has other names; parameters in a list."""
    momentum = optax.sgd(0.1, momentum=0.9)
    params = [np.float32([1.0, 2.0, 3.0]), {"x": np.ones((8, 2), np.float32)}]
    tx = jzero.zero(momentum, mesh=mesh(data=8))
    whole, state = jzero.to_optax(tx, tx.init(params), jax.tree.map(jnp.asarray, params))
    assert_same(whole, params)
    assert jax.tree.structure(state) == jax.tree.structure(momentum.init(params))


# --- what is refused --------------------------------------------------------------------------------------------------


def placed():
    pr = problem(mesh(data=8), {"w": (8, 2), "b": (3,)})
    return pr, ADAM.init(pr.start), dict(pr.start)


def test_a_missing_array_is_named():
    pr, state, params = placed()
    del params["b"]
    with pytest.raises(ValueError, match=r"^b: expected such an array in what is converted, found \['w'\]"):
        jzero.from_optax(zero(pr.mesh), state, params, like=pr.params)
    with pytest.raises(ValueError, match=r"^0/mu/b: expected such an array in what is converted, found \['0/count'"):
        jzero.from_optax(zero(pr.mesh), ADAM.init({"w": pr.start["w"]}), pr.start, like=pr.params)


def test_another_shape_is_named():
    pr, state, params = placed()
    params["b"] = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"^b: expected shape \(3,\), found \(4,\)"):
        jzero.from_optax(zero(pr.mesh), state, params, like=pr.params)


def test_what_has_no_place_is_named():
    pr, state, params = placed()
    params["more"] = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"^parameter more: it has no place in the new state, which has 'b'; pass"):
        jzero.from_optax(zero(pr.mesh), state, params, like=pr.params)
    sgd = jzero.zero(optax.sgd(0.1), mesh=pr.mesh)
    with pytest.raises(ValueError, match=r"^state 0/count: it has no place in the new state, which has 'none'; pass"):
        jzero.from_optax(sgd, state, pr.start, like=pr.params)
    jzero.from_optax(sgd, state, pr.start, like=pr.params, lossy=True)


def test_rounding_is_named():
    pr, state, params = placed()
    place = lambda p: jax.ShapeDtypeStruct(p.shape, "bfloat16", sharding=NamedSharding(pr.mesh, P()))
    like = jax.tree.map(place, params)
    with pytest.raises(ValueError, match=r"^parameter b: the new state cannot hold it exactly, but rounds it by up"):
        jzero.from_optax(zero(pr.mesh, master="none"), state, params, like=like)
