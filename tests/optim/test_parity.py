"""The same parameters as independent references after ten steps: NumPy in float64, and optax on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.contexts import BATCH, assert_close, assert_same, jit_step, loss, mesh, problem, run, values
from oracles import adam

import jzero

SHAPES = {"dense": (8, 16), "odd": (5, 3), "gain": (7,), "scalar": (), "empty": (0, 3)}
STEPS = 10
ramp = lambda t: 1e-2 * (t + 1) / STEPS
matrices = lambda name, shape: len(shape) >= 2


def seen_shapes(params):
    """A mask as a function: decays matrices, by the shapes it sees."""
    return jax.tree.map(lambda p: len(p.shape) >= 2, params)


COMMON = {"weight_decay": 0.1}
CASES: dict[str, tuple[dict, dict]] = {
    "adamw": (COMMON, {}),
    "apex's test settings": ({"weight_decay": 0.1, "b1": 0.1, "b2": 0.2, "eps": 0.25}, {}),
    "no decay": ({}, {}),
    "l2": ({"weight_decay": 0.1, "adam_w_mode": False}, {}),
    "no bias correction": ({"weight_decay": 0.1, "bias_correction": False}, {}),
    "l2, no bias correction": ({"weight_decay": 0.1, "bias_correction": False, "adam_w_mode": False}, {}),
    "schedule": ({"weight_decay": 0.1, "learning_rate": ramp}, {}),
    "mask as tree": ({"weight_decay": 0.1, "mask": {k: len(s) >= 2 for k, s in SHAPES.items()}}, {"decay": matrices}),
    "mask as function": ({"weight_decay": 0.1, "mask": seen_shapes}, {"decay": matrices}),
    "l2 with a mask": ({"weight_decay": 0.1, "adam_w_mode": False, "mask": seen_shapes}, {"decay": matrices}),
}


def reference(pr, options, extra, steps=STEPS):
    names = {"learning_rate": 1e-2} | options
    rule = adam.adam(
        names["learning_rate"], b1=names.get("b1", 0.9), b2=names.get("b2", 0.999), eps=names.get("eps", 1e-8),
        weight_decay=names.get("weight_decay", 0.0), l2=not names.get("adam_w_mode", True),
        bias_correction=names.get("bias_correction", True), **extra,
    )  # fmt: skip
    return adam.train(rule, pr.start, pr.gradients, steps)


def on_one_device(tx, pr, steps=STEPS):
    """The same problem with a plain optax transformation."""

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss)(params, pr.scales, jnp.asarray(BATCH))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, pr.start)
    state = tx.init(params)
    for _ in range(steps):
        params, state = jax.block_until_ready(step(params, state))
    return params


@pytest.mark.parametrize("case", CASES)
def test_adam_matches_numpy(case):
    options, extra = CASES[case]
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(**{"learning_rate": 1e-2} | options, mesh=pr.mesh)
    by_update, by_step, state = run(jit_step(pr, tx), pr.params, tx.init(pr.params), STEPS)
    expected = reference(pr, options, extra)
    assert_close(by_update, expected)
    assert_close(by_step, expected)
    assert {int(x) for x in jax.tree.leaves(state.inner) if x.dtype == jnp.int32} == {STEPS}


def test_a_mask_function_sees_the_shapes_that_the_caller_gave():
    seen = []
    tx = jzero.distributed_fused_adam(1e-2, mask=lambda p: seen.append(p) or seen_shapes(p), mesh=mesh(data=8))
    params = problem(mesh(data=8), SHAPES).params
    tx.init(params)
    assert {k: x.shape for k, x in seen[0].items()} == SHAPES  # "odd" is stored as [1, 16]


def test_adam_matches_optax_on_one_device():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, b2=0.95, weight_decay=0.1, mesh=pr.mesh)
    found, _, _ = run(jit_step(pr, tx), pr.params, tx.init(pr.params), STEPS)
    assert_close(found, on_one_device(optax.adamw(1e-2, b2=0.95, weight_decay=0.1), pr))


@pytest.mark.parametrize("wrong", [{"b2": 0.99}, {"weight_decay": 0.0}, {"adam_w_mode": False}, {"eps": 1e-3}])
def test_a_wrong_setting_is_told_apart(wrong):
    pr = problem(mesh(data=8), SHAPES)
    with pytest.raises(AssertionError):
        assert_close(reference(pr, COMMON | wrong, {}), reference(pr, COMMON, {}))


INNER = {
    "sgd": (optax.sgd(0.1), adam.sgd(0.1)),
    "momentum": (optax.sgd(0.1, momentum=0.9), adam.sgd(0.1, momentum=0.9)),
    "lion": (optax.lion(1e-2), adam.lion(1e-2)),
}


@pytest.mark.parametrize(("name", "master"), [("sgd", "none"), ("momentum", "fp32"), ("lion", "auto")])
def test_any_elementwise_transformation(name, master):
    inner, rule = INNER[name]
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.zero(inner, mesh=pr.mesh, master=master)
    by_update, by_step, _ = run(jit_step(pr, tx), pr.params, tx.init(pr.params), STEPS)
    expected = adam.train(rule, pr.start, pr.gradients, STEPS)
    assert_close(by_update, expected)
    assert_close(by_step, expected)


def test_clip_norm_is_apexs():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, clip_norm=1.5)
    found, _, _ = run(jit_step(pr, tx), pr.params, tx.init(pr.params), 3)
    clipped = lambda params: adam.clip(pr.gradients(params), 1.5)
    assert adam.norm(pr.gradients(pr.start)) > 1.5
    assert_close(found, adam.train(adam.sgd(0.1), pr.start, clipped, 3))


# --- parameters of less than 32 bits ---------------------------------------------------------------------------------


def rounded(x, dtype):
    return np.asarray(x, np.float32).astype(dtype).astype(np.float64)


def at_rounded(pr, dtype):
    """Gradients as a model sees them whose parameters are the rounded masters."""
    return lambda masters: pr.gradients({k: rounded(x, dtype) for k, x in masters.items()})


def exact_steps(tx, pr, dtype, steps=STEPS):
    """Steps whose gradients come from NumPy in float32, at the rounded parameters. Checks both forms in every step."""
    params = pr.place(pr.start, dtype)
    state = tx.init(params)
    forms = jax.jit(lambda g, s, p: (tx.update(g, s, p)[0], *tx.step(g, s, p)))
    for _ in range(steps):
        grads = pr.place(pr.gradients({k: np.asarray(p, np.float64) for k, p in params.items()}))
        updates, by_step, state = jax.block_until_ready(forms(grads, state, params))
        for k, p in params.items():  # the sum needs no rounding: the gathered value itself is what comes out
            total = np.asarray(p, np.float32) + np.asarray(updates[k])
            np.testing.assert_array_equal(total, total.astype(dtype).astype(np.float32))
        params = optax.apply_updates(params, updates)
        assert_same(params, by_step)
    return params, state


def whole(array, like):
    """The array that padded shards came from."""
    return np.asarray(array).reshape(-1)[: like.size].reshape(like.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_parameters_follow_a_float32_master(dtype):
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=pr.mesh, master="fp32")
    params, state = exact_steps(tx, pr, dtype)
    start = {k: rounded(x, dtype) for k, x in pr.start.items()}
    expected = adam.train(adam.adam(1e-2, weight_decay=0.1), start, at_rounded(pr, dtype), STEPS)
    masters = {k: whole(state.master[k], x) for k, x in expected.items()}
    assert_close(masters, expected)
    for k, master in masters.items():
        assert state.master[k].dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(params[k]), np.asarray(master).astype(dtype), err_msg=k)


def test_bfloat16_training_within_apexs_tolerance():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=pr.mesh)
    start = {k: rounded(x, "bfloat16") for k, x in pr.start.items()}
    expected = adam.train(adam.adam(1e-2, weight_decay=0.1), start, at_rounded(pr, "bfloat16"), STEPS)
    params = pr.place(pr.start, "bfloat16")
    found, _, _ = run(jit_step(pr, tx), params, tx.init(params), STEPS)
    assert {p.dtype for p in found.values()} == {jnp.dtype("bfloat16")}
    assert_close(found, expected, rtol=5e-2)


def test_float16_keeps_numbers_below_the_smallest_normal_one():
    m = mesh(data=8)
    params = {"w": jnp.linspace(-1e-4, 1e-4, 64).astype(jnp.float16)}
    tx = jzero.zero(optax.sgd(1.0), mesh=m)
    found, _ = jax.jit(tx.step)({"w": jnp.full(64, 1e-6)}, tx.init(params), params)
    expected = (np.asarray(params["w"], np.float32) - np.float32(1e-6)).astype(np.float16)
    np.testing.assert_array_equal(np.asarray(found["w"]), expected)
    assert (np.abs(expected) < 6e-5).any()


def test_without_a_master_bfloat16_parameters_are_their_own():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.zero(optax.sgd(0.1), mesh=pr.mesh, master="none")
    params, state = exact_steps(tx, pr, "bfloat16", steps=3)
    assert not jax.tree.leaves(state.master)
    expected = {k: rounded(x, "bfloat16") for k, x in pr.start.items()}
    for _ in range(3):
        expected = {
            k: rounded(p - 0.1 * g, "bfloat16")
            for (k, g), p in zip(pr.gradients(expected).items(), expected.values(), strict=True)
        }
    assert_close(params, expected, rtol=2.0**-7, atol=0)


# --- dtypes on the wire ----------------------------------------------------------------------------------------------


def test_param_sync_dtype_rounds_what_is_gathered_and_keeps_a_master():
    pr = problem(mesh(data=8), SHAPES)
    tx = jzero.distributed_fused_adam(1e-2, weight_decay=0.1, mesh=pr.mesh, param_sync_dtype=jnp.bfloat16)
    step = jit_step(pr, tx)
    _, params, state = run(step, pr.params, tx.init(pr.params), 1)
    for k, p in params.items():
        master = whole(state.master[k], p)
        np.testing.assert_array_equal(np.asarray(p), np.asarray(master.astype("bfloat16"), np.float32))
        assert p.dtype == jnp.float32
    assert_close({k: whole(state.master[k], p) for k, p in params.items()}, reference(pr, COMMON, {}, 1))


def test_a_wider_param_sync_dtype_changes_nothing():
    pr = problem(mesh(data=8), SHAPES)
    wide = jzero.distributed_fused_adam(1e-2, mesh=pr.mesh, param_sync_dtype=jnp.float32)
    narrow = jzero.distributed_fused_adam(1e-2, mesh=pr.mesh)
    assert_same(exact_steps(wide, pr, "bfloat16", 3)[0], exact_steps(narrow, pr, "bfloat16", 3)[0])


def test_param_sync_dtype_without_a_master_is_refused():
    tx = jzero.zero(optax.sgd(0.1), mesh=mesh(data=8), master="none", param_sync_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"\['w'\]: param_sync_dtype=bfloat16 would round the only copy of a float32"):
        tx.init(values({"w": (8,)}))
