"""Every transformation of optax inside of `zero`: those that are elementwise match themselves, the others are named."""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.contexts import assert_close, mesh, values

import jzero
from jzero.optim.elementwise import on_shards
from jzero.optim.partition import make_plan

SHAPES = {"w": (8, 3), "odd": (5, 3), "gain": (7,)}
BY_SHAPE = {"big": (160, 144)}  # adafactor factors only what is large

# What optax offers beside transformations of gradients, and what it needs to be built.
ARGUMENTS = {
    "scale_by_schedule": (lambda t: 0.1,), "stateless": (lambda u, p: u,), "freeze": (True,), "monitor": ({},),
    "stateless_with_tree_map": (lambda u, p: u,), "split_real_and_imaginary": (optax.sgd(0.1),),
    "lookahead": (optax.sgd(0.1), 5, 0.5), "apply_if_finite": (optax.sgd(0.1), 3), "mechanize": (optax.sgd(0.1),),
    "schedule_free": (optax.sgd(0.1), 0.1), "sam": (optax.sgd(0.1), optax.sgd(0.1)),
    "conditionally_transform": (optax.sgd(0.1), lambda step: step < 2),
    "conditionally_mask": (optax.sgd(0.1), lambda step: step < 2), "measure_with_ema": (None,),
}  # fmt: skip
REFUSED = {
    "adafactor", "adaptive_grad_clip", "apply_if_finite", "centralize", "clip_by_block_rms", "clip_by_global_norm",
    "dadapt_adamw", "dog", "dowg", "fromage", "galore", "lamb", "lars", "mechanize", "momo", "momo_adam", "muon",
    "noisy_sgd", "normalize", "normalize_by_update_norm", "novograd", "polyak_sgd", "prodigy", "scale_by_galore",
    "scale_by_distance_over_gradients", "scale_by_factored_rms", "scale_by_lbfgs", "scale_by_novograd", "sm3",
    "scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_polyak", "scale_by_sm3", "scale_by_trust_ratio",
    "zero_nans", "add_noise",
}  # fmt: skip
# They need functions of the parameters, complex numbers, or other arguments than gradients.
OTHERS = {
    "hutchinson_estimator_diag_hessian", "lbfgs", "scale_by_backtracking_linesearch", "scale_by_muon", "sophia",
    "scale_by_zoom_linesearch", "lookahead",
}  # fmt: skip


@functools.cache
def constructed():
    """Every transformation that optax and optax.contrib build from nothing, or from a learning rate."""
    found = {}
    for module in (optax, optax.contrib):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            for arguments in [ARGUMENTS[name]] if name in ARGUMENTS else [(), (1e-2,)]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        tx = f(*arguments)
                    except (TypeError, ValueError, AttributeError):
                        continue
                if isinstance(tx, optax.GradientTransformation):
                    found[name] = tx
                    break
    found["add_noise"] = optax.add_noise(0.1, 0.5, key=0)
    return found


TAKEN = sorted(set(constructed()) - REFUSED - OTHERS)


def test_the_lists_name_what_exists():
    assert set(constructed()) >= REFUSED | OTHERS - {"lookahead"}
    assert {"adamw", "lion", "adan", "rprop", "yogi", "ademamix", "adopt", "madgrad", "schedule_free_adamw"} <= {*TAKEN}
    assert len(TAKEN) >= 60


def lifted(tx, shapes=None):
    params = values(shapes or SHAPES)
    plan = make_plan(params, mesh(data=8), axis="data")
    return on_shards(tx, plan), plan.unflatten(
        [jax.ShapeDtypeStruct(leaf.shard_shape, jnp.float32) for leaf in plan.leaves]
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_mixes_positions_is_refused_at_init(name):
    tx, shards = lifted(constructed()[name], BY_SHAPE if "factor" in name else None)
    leaf = r"\['big'\]" if "factor" in name else r"\['(gain|odd|w)'\]"
    with pytest.raises(ValueError, match=rf"^{leaf}.*: zero needs an elementwise transformation, but "):
        jax.eval_shape(tx.init, shards)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lamb", r"`reduce_sum` of scale_by_trust_ratio \(\w+\.py:\d+\) mixes positions of this leaf; use it without"),
        ("adafactor", r"`reduce_sum` of scale_by_factored_rms \(\w+\.py:\d+\) mixes positions of this leaf"),
        ("muon", r"of scale_by_muon \(\w+\.py:\d+\) mixes positions of this leaf"),
        ("clip_by_global_norm", r"`reduce_sum` of clip_by_global_norm .*; .* use zero\(\.\.\., clip_norm=\.\.\.\)"),
        ("add_noise", r"`\w+` of add_noise \(\w+\.py:\d+\) gives this leaf `random_bits`, which differs between"),
        ("zero_nans", r"`reduce_or` of zero_nans \(\w+\.py:\d+\) mixes positions"),
    ],
)
def test_the_operation_and_where_it_stands_are_named(name, message):
    tx, shards = lifted(constructed()[name], BY_SHAPE if name == "adafactor" else None)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(tx.init, shards)


def test_zero_itself_refuses_on_init_with_values_and_with_shapes():
    params = values(SHAPES)
    tx = jzero.zero(optax.lamb(1e-3), mesh=mesh(data=8))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for given in (params, shapes):
        with pytest.raises(ValueError, match=r"zero needs an elementwise transformation, but `reduce_sum`"):
            tx.init(given)


# The parts that optimizers are made of run with the slow tests, the optimizers themselves always.
PARTS = [pytest.param(n, marks=pytest.mark.slow) if n.startswith(("scale_by_", "optimistic_")) else n for n in TAKEN]


@pytest.mark.parametrize("name", PARTS)
def test_what_is_elementwise_is_the_same_on_shards(name):
    """Three steps on shards that lie flattened and padded, or as rows: the same numbers as by itself."""
    inner = constructed()[name]
    params, plan = values(SHAPES), make_plan(values(SHAPES), mesh(data=8), axis="data")
    tx = on_shards(inner, plan)
    cut = lambda tree: {leaf.path[2:-2]: pieces(tree[leaf.path[2:-2]], leaf) for leaf in plan.leaves}
    extra = {"value": jnp.float32(0.5)} if name in ("reduce_on_plateau", "momo") else {}
    plain, ours = jax.jit(optax.with_extra_args_support(inner).update), jax.jit(tx.update)
    state, shards = inner.init(params), tx.init(cut(params))
    for seed in (1, 2, 3):
        grads = values(SHAPES, seed)
        expected, state = plain(grads, state, params, **extra)
        found, shards = ours(cut(grads), shards, cut(params), **extra)
        for leaf in plan.leaves:
            key = leaf.path[2:-2]
            want = pieces(np.asarray(expected[key]), leaf)
            inside = pieces(np.ones(leaf.shape, np.float32), leaf) > 0
            np.testing.assert_allclose(np.asarray(found[key])[inside], want[inside], rtol=2e-6, atol=1e-7, err_msg=key)


def pieces(x, leaf):
    """What all ranks hold of a leaf, as one array."""
    if leaf.split is not None:
        return x
    flat = np.pad(x.reshape(-1), (0, leaf.padding))
    return flat.reshape(leaf.shard_shape)


# --- what a transformation sees ---------------------------------------------------------------------------------------


def test_masks_and_labels_see_the_original_shapes():
    """Decisions by size and by the number of dimensions, inside of plain transformations: no factory is needed."""
    seen = []

    def mask(params):
        seen.append({k: p.shape for k, p in params.items()})
        return {k: p.size in (15, 24) for k, p in params.items()}

    tx = jzero.zero(
        optax.chain(optax.add_decayed_weights(0.5, mask), optax.masked(optax.scale(2.0), mask), optax.scale(-1.0)),
        mesh=mesh(data=8),
    )
    params, grads = values(SHAPES), values(SHAPES, 1)
    found, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    expected = {k: p - (2 * (grads[k] + 0.5 * p) if k != "gain" else grads[k]) for k, p in params.items()}
    assert_close(found, expected)
    assert all(shapes == SHAPES for shapes in seen)
    assert seen


def test_numbers_read_off_a_shape_are_those_of_the_whole_leaf():
    by_rows = optax.stateless_with_tree_map(lambda u, p: u * p.shape[0])
    tx = jzero.zero(by_rows, mesh=mesh(data=8))
    params, grads = values(SHAPES), values(SHAPES, 1)
    found, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    assert_close(found, {k: p + grads[k] * p.shape[0] for k, p in params.items()})


# --- other operations than optax's -----------------------------------------------------------------------------------


def stateless(f):
    return optax.stateless(lambda u, p: jax.tree.map(f, u, p))


MIXING = {
    "reduce_sum": lambda u, p: u - jnp.mean(u),
    "sort": lambda u, p: jnp.sort(u, axis=0),
    "cumsum": lambda u, p: jnp.cumsum(u, axis=0),
    "rev": lambda u, p: jnp.flip(u),
    "reshape": lambda u, p: u.reshape(-1)[::1].reshape(u.shape),
    "dot_general": lambda u, p: jnp.outer(u.reshape(-1), jnp.ones(u.size))[:, 0].reshape(u.shape),
    "concatenate": lambda u, p: jnp.roll(u, 1, axis=0),
    "gather": lambda u, p: u[jnp.argsort(jnp.arange(u.shape[0]))],
    "iota": lambda u, p: u * jnp.arange(u.size).reshape(u.shape),
    "a constant array": lambda u, p: u * np.arange(1.0, u.size + 1, dtype=np.float32).reshape(u.shape),
    "scan": lambda u, p: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(u.shape[1:]), u)[1],
    "while": lambda u, p: jax.lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: c + 1, u),
    "cond": lambda u, p: jax.lax.cond(u.reshape(-1)[0] > 0, lambda: u, lambda: -u),
    "fft": lambda u, p: jnp.real(jnp.fft.fft(u)),
    "custom": lambda u, p: jax.nn.softmax(u),
}


@pytest.mark.parametrize("operation", MIXING)
def test_operations_that_mix_positions(operation):
    tx, shards = lifted(stateless(MIXING[operation]))
    with pytest.raises(ValueError, match=r"\['\w+'\]: zero needs an elementwise transformation, but"):
        jax.eval_shape(tx.init, shards)


def newton(u, p):
    """Elementwise, in control flow: a root by Newton's method, with a branch, a count and a carried constant."""
    start = (jnp.int32(0), jnp.ones_like(u), jnp.float32(2.0))
    step = lambda c: (c[0] + 1, 0.5 * (c[1] + jnp.abs(p) / c[1]), c[2])
    _, root, two = jax.lax.while_loop(lambda c: c[0] < 20, step, start)
    total, _ = jax.lax.scan(lambda c, x: (c + x * u, x), jnp.zeros_like(u), jnp.arange(3.0))
    return jax.lax.cond(two > 1, lambda a, b: a + b, lambda a, b: jnp.zeros_like(a), root, jax.nn.gelu(total))


def test_control_flow_over_elementwise_operations():
    tx = jzero.zero(stateless(newton), mesh=mesh(data=8))
    params, grads = values(SHAPES), values(SHAPES, 1)
    found, _ = jax.jit(tx.step)(grads, tx.init(params), params)
    gelu = lambda x: np.asarray(jax.nn.gelu(x))
    assert_close(found, {k: p + np.sqrt(np.abs(p)) + gelu(3 * grads[k]) for k, p in params.items()}, rtol=1e-5)


def test_one_leaf_in_another_is_refused():
    both = optax.stateless(lambda u, p: {k: u[k] + u["a"] for k in u})
    swap = optax.stateless(lambda u, p: {"a": u["b"], "b": u["a"]})
    for tx, message in (
        (both, r"\['a'\] and \['b'\]: .* `add` .*puts several leaves together"),
        (swap, r"^\['a'\]: .* the update of this leaf comes from \['b'\]"),
    ):
        lift, shards = lifted(tx, {"a": (8, 2), "b": (8, 2)})
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lift.init, shards)


def test_state_of_a_leaf_under_another_path_is_refused():
    hidden = optax.GradientTransformation(lambda p: jax.tree.leaves(p), lambda u, s, p=None: (u, jax.tree.leaves(u)))
    tx, shards = lifted(hidden)
    with pytest.raises(ValueError, match=re.escape("its state [0] holds values of this leaf under a path that does")):
        jax.eval_shape(tx.init, shards)


def test_an_argument_that_only_the_caller_knows_is_checked_on_update():
    def update(u, s, p=None, *, weight, **_):
        return jax.tree.map(lambda x: x * weight / jnp.linalg.norm(x), u), s

    tx = jzero.zero(optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update), mesh=mesh(data=8))
    params = values(SHAPES)
    state = tx.init(params)
    with pytest.raises(ValueError, match="zero needs an elementwise transformation, but `reduce_sum`"):
        tx.update(params, state, params, weight=jnp.float32(1.0))
