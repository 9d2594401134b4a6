"""What a step never changes, what a device never holds, and the trees it works on."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import assert_same, jit_step, manual_step, mesh, problem, values

import jzero

SHAPES = {"w": (8, 16), "odd": (5, 3), "scalar": (), "empty": (0, 3), "layers": (4, 7), "bias": (6,)}
SPLIT = {"w": P(None, "tensor"), "bias": P("tensor")}


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding, x.weak_type), tree)


def adam(m, **options):
    return jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=m, replica_axis="replica", **options)


def split_problem(*, explicit=False):
    return problem(mesh(explicit=explicit, data=4, tensor=2), SHAPES, SPLIT)


CASES = [(False, "jit", "bfloat16"), (True, "jit", "float32"), (False, "shard_map", "float32"),
         (True, "shard_map", "bfloat16")]  # fmt: skip


@pytest.mark.parametrize(("explicit", "context", "dtype"), CASES)
def test_types_and_shardings_are_kept_and_nothing_is_compiled_twice(explicit, context, dtype):
    pr = split_problem(explicit=explicit)
    tx = adam(pr.mesh)
    params = pr.place(pr.start, dtype)
    state, specs = tx.init(params), tx.state_specs(params)
    step = jit_step(pr, tx) if context == "jit" else manual_step(pr, tx, state_specs=specs)
    before, structure = described((params, state)), jax.tree.structure(state)
    for _ in range(3):
        by_update, by_step, state = jax.block_until_ready(step(params, state))
        assert described((by_update, state)) == described((by_step, state)) == before
        assert jax.tree.structure(state) == structure
        params = by_update
    assert step.jitted._cache_size() == 1


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_init_from_shapes_describes_what_init_makes(explicit):
    pr = split_problem(explicit=explicit)
    tx = adam(pr.mesh)
    abstract = tx.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), pr.params))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    assert described(abstract) == described(tx.init(pr.params))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_state_restored_to_the_abstract_shardings_does_not_compile_again(explicit):
    pr = split_problem(explicit=explicit)
    tx = adam(pr.mesh)
    step, state = jit_step(pr, tx), tx.init(pr.params)
    restored = jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x), like.sharding), state, tx.init(state_like(pr))
    )
    for start in (state, restored):
        jax.block_until_ready(step(pr.params, start))
    assert step.jitted._cache_size() == 1


def state_like(pr):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), pr.params)


def test_state_specs_fit_the_state():
    pr = split_problem()
    tx = adam(pr.mesh)
    state, specs = tx.init(pr.params), tx.state_specs(pr.params)
    is_spec = lambda x: isinstance(x, P)
    placed = jax.tree.map(lambda s, x: NamedSharding(pr.mesh, s).is_equivalent_to(x.sharding, x.ndim) or x.size == 0,
                          specs, state, is_leaf=is_spec)  # fmt: skip
    assert all(jax.tree.leaves(placed))
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(state)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_every_device_holds_an_eighth():
    shapes = {"w": (64, 32), "odd": (5, 3), "scalar": ()}
    pr = problem(mesh(data=8), shapes)
    tx = adam(pr.mesh)
    state = tx.init(pr.place(pr.start, "bfloat16"))
    per_device = collections.Counter()
    for x in jax.tree.leaves((state.master, state.inner[0].mu, state.inner[0].nu)):
        for shard in x.addressable_shards:
            per_device[shard.device] += shard.data.nbytes
    padded = 64 * 32 + 16 + 8
    assert set(per_device.values()) == {(2 + 4 + 4) * padded // 8}
    assert len(per_device) == 8
    assert [x.shape for x in jax.tree.leaves(state) if x.ndim == 0] == [()]  # Adam's count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_never_holds_a_full_copy_of_the_state(dtype):
    """Compiled for sharded parameters: a device's results and temporaries are an eighth of the state."""
    m = mesh(data=8)
    size = 2**20
    params = {"w": jax.ShapeDtypeStruct((size,), dtype, sharding=NamedSharding(m, P())),
              "odd": jax.ShapeDtypeStruct((size + 1,), dtype, sharding=NamedSharding(m, P()))}  # fmt: skip
    memory = jax.jit(adam(m, param_specs=P()).init).lower(params).compile().memory_analysis()
    kept = 4 + 4 if dtype == "float32" else 2 + 4 + 4
    shards = 2 * kept * size // 8
    assert memory.output_size_in_bytes == pytest.approx(shards, rel=0.01)
    assert memory.temp_size_in_bytes < shards


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_init_inside_jit(explicit):
    """Auto axes do not show in types there, so the specs must be told."""
    pr = split_problem(explicit=explicit)
    tx = adam(pr.mesh, master="fp32", param_specs=None if explicit else pr.specs)
    with jax.set_mesh(pr.mesh):
        inside = jax.jit(tx.init)(pr.params)
    outside = adam(pr.mesh, master="fp32").init(pr.params)
    assert described(inside) == described(outside)
    assert_same(inside, outside)


def test_init_takes_arrays_of_the_host_and_of_one_device():
    pr = problem(mesh(data=8), SHAPES)
    tx = adam(pr.mesh, master="fp32")
    expected = tx.init(pr.params)
    for params in (pr.start, jax.tree.map(jnp.asarray, pr.start)):
        assert_same(tx.init(params), expected)
        assert described(tx.init(params)) == described(expected)


def test_the_step_needs_no_full_size_temporary():
    """`step` gathers into its result; `update` holds the updates too."""
    m = mesh(data=8)
    size = 2**20
    params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32, sharding=NamedSharding(m, P()))}
    tx = adam(m)
    memory = jax.jit(tx.step, donate_argnums=(1, 2)).lower(params, tx.init(params), params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * size // 2
    assert memory.alias_size_in_bytes >= 2 * 4 * size // 8  # the donated state is written in place


@pytest.mark.parametrize("form", ["update", "step"])
def test_on_one_device_a_step_writes_in_place(form):
    """No collective, no copy, no temporary: results in the order of the donated arguments."""
    m = mesh(data=1)
    params = {
        "w": jax.ShapeDtypeStruct((3, 2**18), jnp.float32),
        "odd": jax.ShapeDtypeStruct((2**18 + 1,), jnp.float32),
    }
    tx = adam(m)

    def step(params, state, grads):
        if form == "step":
            return tx.step(grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**12
    assert not [kind for kind in ("all-gather", "all-reduce", "reduce-scatter", " copy(") if kind in compiled.as_text()]


# --- trees -----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    weight: Any
    layers: list


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.int32(0))
        self.second = nnx.Linear(8, 3, rngs=rngs)


def trees():
    x = values({"a": (8, 4), "b": (3,), "c": (5,)})
    linen_model = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(3)])
    return {
        "nested dict": {"block": {"w": x["a"], "b": x["b"]}, "head": x["c"]},
        "tuple and list": (x["a"], [x["b"], (x["c"],)]),
        "dataclass": Model(x["a"], [x["b"], x["c"]]),
        "linen": linen_model.init(jax.random.key(0), jnp.ones((1, 4)))["params"],
        "nnx": nnx.state(Net(nnx.Rngs(0)), nnx.Param),
        "single array": x["a"],
        "with None": {"w": x["a"], "absent": None},
        "empty": {},
    }


@pytest.mark.parametrize("name", trees())
def test_trees(name):
    params = jax.tree.map(jnp.asarray, trees()[name])
    tx = jzero.zero(optax.sgd(0.1, momentum=0.9), mesh=mesh(data=8), master="fp32")
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    found, _ = jax.jit(tx.step)(params, state, params)
    expected = jax.tree.map(lambda x: np.asarray(x) - np.float32(0.1) * np.asarray(x), params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)
    jax.tree.map(close, found, expected)
    jax.tree.map(close, optax.apply_updates(params, updates), expected)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert len(tx.partition_report(params)) == len(jax.tree.leaves(params))


def test_an_nnx_model_is_trained_through_its_optimizer():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jzero.distributed_fused_adam(1e-2, mesh=mesh(data=8)), wrt=nnx.Param)
    reference = Net(nnx.Rngs(0))
    plain = nnx.Optimizer(reference, optax.adamw(1e-2, weight_decay=0.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss = lambda m: jnp.mean(jnp.square(m.second(jax.nn.gelu(m.first(x))) - 1.0))
        optimizer.update(model, nnx.grad(loss)(model))

    x = jax.random.normal(jax.random.key(1), (16, 4))
    for _ in range(3):
        step(model, optimizer, x)
        step(reference, plain, x)
        jax.block_until_ready(nnx.state(model))
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1.3e-6, atol=1e-5)
    jax.tree.map(close, nnx.state(model, nnx.Param), nnx.state(reference, nnx.Param))
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (4, 8)]
    assert [x.sharding.spec for x in moments] == [P(None, "data")] * 2


# --- leaves that optax leaves out, outside and inside of zero --------------------------------------------------------


def groups(params):
    return {k: "fast" if k == "w" else "slow" if k == "b" else "frozen" for k in params}


def expected_groups(params, steps):
    rate = {"fast": 0.5, "slow": 0.1, "frozen": 0.0}
    return {
        k: np.asarray(x) - np.float32(steps * rate[group])
        for (k, x), group in zip(params.items(), groups(params).values(), strict=True)
    }


def group_trees():
    params = {k: jnp.asarray(x) for k, x in values({"w": (8, 4), "b": (3,), "frozen": (5,)}).items()}
    return params, jax.tree.map(jnp.ones_like, params)


def train_groups(tx, steps=2):
    params, grads = group_trees()
    state, start = tx.init(params), params
    update = jax.jit(tx.update)
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = jax.block_until_ready(optax.apply_updates(params, updates))
    for k, x in expected_groups(start, steps).items():
        np.testing.assert_allclose(np.asarray(params[k]), x, rtol=1e-6)
    return state


def test_groups_around_zero():
    """One zero per group: each sees MaskedNodes for the other groups' leaves, and no state is made for frozen ones."""
    m = mesh(data=8)
    of = lambda lr: jzero.zero(optax.sgd(lr, momentum=0.0), mesh=m, master="fp32")
    state = train_groups(
        optax.multi_transform({"fast": of(0.5), "slow": of(0.1), "frozen": optax.set_to_zero()}, groups)
    )
    assert sorted(x.size for x in jax.tree.leaves(state) if x.ndim) == [8, 8, 32, 32]


def test_groups_inside_of_zero():
    """One zero around all groups: the inner state is sharded, masked places included."""
    inner = optax.multi_transform(
        {"fast": optax.sgd(0.5, momentum=0.0), "slow": optax.sgd(0.1, momentum=0.0), "frozen": optax.set_to_zero()},
        groups,
    )
    tx = jzero.zero(inner, mesh=mesh(data=8))
    state = train_groups(tx)
    assert all(x.sharding.spec == P("data") for x in jax.tree.leaves(state) if x.ndim)
    sizes = {row.path: row.state_bytes for row in tx.partition_report(group_trees()[0])}
    assert sizes == {"['w']": 16, "['b']": 4, "['frozen']": 0}


@pytest.mark.parametrize("around", [True, False])
def test_masked(around):
    keep = {"w": True, "b": True, "frozen": False}
    m, params = mesh(data=8), group_trees()[0]
    trace = optax.trace(0.9)
    tx = optax.masked(jzero.zero(trace, mesh=m), keep) if around else jzero.zero(optax.masked(trace, keep), mesh=m)
    state = tx.init(params)
    updates, after = jax.jit(tx.update)(params, state, params)
    assert_same(updates, params)
    assert sorted(x.size for x in jax.tree.leaves(after)) == [8, 32]


def test_hyperparameters_injected_into_the_inner_transformation():
    params, grads = group_trees()
    tx = jzero.zero(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), mesh=mesh(data=8))
    state = tx.init(params)
    found, state = jax.jit(tx.step)(grads, state, params)
    np.testing.assert_allclose(np.asarray(found["b"]), np.asarray(params["b"]) - 0.5, rtol=1e-6)
    assert math.isclose(float(state.inner.hyperparams["learning_rate"]), 0.5)
