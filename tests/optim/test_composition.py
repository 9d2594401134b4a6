"""`zero` among optax's wrappers and in other people's training loops, under jit with Auto and Explicit axes and in
shard_map: the same parameters as the same composition without `zero`, on one device.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optim.contexts import assert_close, assert_same, jit_step, manual_step, mesh, problem, run, values
from optim.test_parity import on_one_device

import jzero

SHAPES = {"w": (8, 16), "odd": (5, 3), "gain": (7,), "frozen": (4, 2), "scalar": ()}
SPLIT = {"w": P(None, "tensor"), "frozen": P("tensor")}
STEPS = 4


def groups(params):
    return {k: {"gain": "slow", "scalar": "slow", "frozen": "frozen"}.get(k, "fast") for k in params}


def by_group(wrap):
    """Own learning rate and decay per group; `wrap` is applied to each optimizer."""
    return optax.multi_transform(
        {"fast": wrap(optax.adamw(1e-2, weight_decay=0.1)), "slow": wrap(optax.adamw(1e-3, b1=0.8, weight_decay=0.0)),
         "frozen": optax.set_to_zero()}, groups)  # fmt: skip


def injected(wrap):
    return optax.inject_hyperparams(lambda learning_rate, weight_decay: wrap(
        optax.adamw(learning_rate, b1=0.8, weight_decay=weight_decay)))(
            learning_rate=lambda t: 1e-2 / (t + 1), weight_decay=0.1)  # fmt: skip


plain = lambda tx: tx
ramp = optax.linear_schedule(1e-3, 1e-1, STEPS)
COMPOSITIONS = {  # from what zero is put around to the transformation; with `plain`, the reference
    "groups around": by_group,
    "groups inside": lambda wrap: wrap(by_group(plain)),
    "injected around": injected,
    "injected inside": lambda wrap: wrap(injected(plain)),
    "accumulating around": lambda wrap: optax.MultiSteps(wrap(optax.adamw(1e-2)), 2).gradient_transformation(),
    "accumulating inside": lambda wrap: wrap(optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation()),
    "if finite around": lambda wrap: optax.apply_if_finite(wrap(optax.adamw(1e-2)), 3),
    "masked around": lambda wrap: optax.chain(optax.masked(wrap(optax.adamw(1e-2)), groups_of("fast")),
                                              optax.masked(optax.set_to_zero(), groups_of("slow", "frozen"))),
    "schedules": lambda wrap: wrap(optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(ramp))),
    "chain": lambda wrap: optax.chain(optax.clip(0.5), wrap(optax.lion(ramp)), optax.scale(0.5)),
    "conditionally": lambda wrap: wrap(optax.conditionally_transform(optax.sgd(1.0), lambda step: step % 2 == 0)),
    "schedule free": lambda wrap: wrap(optax.contrib.schedule_free_adamw(1e-2)),
}  # fmt: skip


def groups_of(*names):
    return lambda params: {k: group in names for k, group in groups(params).items()}


@functools.cache
def reference(name):
    return on_one_device(COMPOSITIONS[name](plain), problem(mesh(data=8), SHAPES), STEPS)


def zero_around(m, **options):
    return lambda tx: jzero.zero(tx, mesh=m, replica_axis="replica", **options)


# With Explicit axes shard_map closes over no traced number, so "injected around" is for Auto ones.
EXPLICIT = ["groups around", "groups inside", "injected inside", "accumulating around", "if finite around"]
SLOW = ["accumulating inside", "masked around", "schedules", "chain", "conditionally", "schedule free"]
CASES = [
    *((name, False) for name in COMPOSITIONS),
    *((name, True) for name in EXPLICIT),
    *(pytest.param(name, True, marks=pytest.mark.slow) for name in SLOW),
]


@pytest.mark.parametrize(("name", "explicit"), CASES)
def test_under_jit(name, explicit):
    pr = problem(mesh(explicit=explicit, data=4, tensor=2), SHAPES, SPLIT)
    tx = COMPOSITIONS[name](zero_around(pr.mesh))
    with jax.set_mesh(pr.mesh):
        state = tx.init(pr.params)
    found, _, after = run(jit_step(pr, tx), pr.params, state, STEPS)
    assert_close(found, reference(name))
    assert {k: x.sharding for k, x in found.items()} == {k: x.sharding for k, x in pr.params.items()}
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_hyperparameters_injected_around_zero_are_refused_on_explicit_axes():
    pr = problem(mesh(explicit=True, data=8), {"w": (8, 16)})
    tx = injected(zero_around(pr.mesh))
    advice = r"put optax\.inject_hyperparams inside of zero, not"
    with jax.set_mesh(pr.mesh), pytest.raises(NotImplementedError, match=advice):
        jax.eval_shape(tx.update, pr.params, tx.init(pr.params), pr.params)


INSIDE = ["groups inside", "injected inside", "accumulating inside", "schedules", "conditionally", "schedule free"]


@pytest.mark.parametrize("name", INSIDE)
def test_inside_shard_map(name):
    pr = problem(mesh(data=4, tensor=2), SHAPES, SPLIT)
    tx = COMPOSITIONS[name](zero_around(pr.mesh))
    found, _, _ = run(manual_step(pr, tx, state_specs=tx.state_specs(pr.params)), pr.params, tx.init(pr.params), STEPS)
    assert_close(found, reference(name))


@pytest.mark.parametrize("name", ["groups around", "groups inside"])
def test_frozen_leaves_hold_no_state(name):
    pr = problem(mesh(data=8), SHAPES)
    state = COMPOSITIONS[name](zero_around(pr.mesh)).init(pr.place(pr.start, "bfloat16"))
    inner = [jax.tree_util.keystr(path) for path, x in jax.tree_util.tree_leaves_with_path(state) if x.ndim]
    moments = [path for path in inner if "mu" in path or "nu" in path]
    assert len(moments) == 2 * 4
    assert not any("frozen'" in path.split("nu")[-1] for path in moments)


def test_hyperparameters_can_be_set_between_compiled_steps():
    pr = problem(mesh(data=8), SHAPES)
    tx = optax.inject_hyperparams(lambda learning_rate: zero_around(pr.mesh)(optax.sgd(learning_rate)))(0.5)
    state, params = tx.init(pr.params), pr.params
    update = jax.jit(tx.update)
    for rate in (0.5, 0.25):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(pr.place(pr.scales), state, params)
        assert_close(jax.block_until_ready(updates), {k: -rate * g for k, g in pr.scales.items()})


def test_adam_itself_takes_injected_hyperparameters():
    pr = problem(mesh(data=8), SHAPES)
    make = lambda learning_rate, b1: jzero.distributed_fused_adam(learning_rate, b1, weight_decay=0.1, mesh=pr.mesh)
    tx = optax.inject_hyperparams(make)(learning_rate=ramp, b1=0.8)
    found, _, _ = run(jit_step(pr, tx), pr.params, tx.init(pr.params), STEPS)
    assert_close(found, on_one_device(optax.adamw(ramp, b1=0.8, weight_decay=0.1), pr, STEPS))


# --- loops of other people -------------------------------------------------------------------------------------------


def test_linen_train_state():
    """Flax's own loop, with nothing changed but `tx`."""
    model = linen.Dense(3)
    x = jax.random.normal(jax.random.key(0), (16, 5))
    variables = model.init(jax.random.key(1), x)

    def train(tx):
        state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

        @jax.jit
        def step(state):
            loss = lambda params: jnp.mean(jnp.square(state.apply_fn({"params": params}, x) - 1.0))
            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        for _ in range(STEPS):
            state = jax.block_until_ready(step(state))
        return state

    ours = train(jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=mesh(data=8)))
    assert_close(ours.params, train(optax.adamw(1e-2, weight_decay=0.1)).params)
    assert int(ours.step) == STEPS
    assert len(ours.opt_state.inner[0].mu["kernel"].sharding.device_set) == 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """Parameters in a dataclass, with its own optimizer state beside them."""

    weight: Any
    layers: list


def test_a_dataclass_in_groups():
    x = {k: jnp.asarray(v) for k, v in values({"a": (8, 4), "b": (3,), "c": (5,)}).items()}
    params = Model(x["a"], [x["b"], x["c"]])
    labels = Model("fast", ["slow", "none"])
    of = {"fast": optax.sgd(0.5), "slow": optax.sgd(0.1), "none": optax.set_to_zero()}
    tx = jzero.zero(optax.multi_transform(of, labels), mesh=mesh(data=8), master="fp32")
    found, _ = jax.jit(tx.step)(params, tx.init(params), params)
    expected = Model(0.5 * x["a"], [0.9 * x["b"], x["c"]])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_donated_steps_keep_shardings():
    """The plain loop of the README with everything donated."""
    pr = problem(mesh(data=4, tensor=2), SHAPES, SPLIT)
    tx = optax.chain(jzero.clip_by_global_norm(1.0), zero_around(pr.mesh)(optax.adamw(1e-2)))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = pr.params, tx.init(pr.params)
    before = jax.tree.map(lambda x: x.sharding, (params, state))
    for _ in range(2):
        params, state = jax.block_until_ready(step(params, state, pr.place(pr.scales)))
        assert jax.tree.map(lambda x: x.sharding, (params, state)) == before
    assert step._cache_size() == 1
    assert all(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(params))
    assert_same(params["frozen"], params["frozen"])
