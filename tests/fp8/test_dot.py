"""The FP8 product against its definition in float64, its error budgets, and how amaxes leave it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracles import fp8 as oracle

import jzero
from jzero.errors import JzeroError
from jzero.fp8 import dot as fp8
from jzero.fp8.numerics import E4M3, E5M2, Quantised, amax, losses, quantise
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling

SHAPES = {  # x, w, contracted dimensions: the products of a transformer's layer
    "qkv": ((2, 8, 32), (32, 2, 4, 8), 1),
    "out": ((2, 8, 4, 8), (4, 8, 32), 2),
    "up": ((2, 8, 32), (32, 64), 1),
    "up, gated": ((2, 8, 32), (32, 2, 64), 1),
    "down": ((2, 8, 64), (64, 32), 1),
}
SCALES = np.float32([90, 75.3, 9000])


def arrays(name, dtype="float32"):
    x, w, contract = SHAPES[name]
    rng = np.random.default_rng(0)
    shapes = x, w, x[: len(x) - contract] + w[contract:]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes], contract


def gradients(f, dy, *args):
    y, vjp = jax.vjp(f, *args)
    return y, *vjp(dy)


def exact(x, w, dy, contract):
    """The three products in float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    outer, outputs = x.ndim - contract, w.ndim - contract
    flat_x, flat_w = x.reshape(-1, np.prod(w.shape[:contract])), w.reshape(np.prod(w.shape[:contract]), -1)
    flat_dy = dy.reshape(flat_x.shape[0], -1)
    assert outputs + outer == dy.ndim
    return (
        (flat_x @ flat_w).reshape(dy.shape),
        (flat_dy @ flat_w.T).reshape(x.shape),
        (flat_x.T @ flat_dy).reshape(w.shape),
    )


def rounded(x, scale, name):
    x = np.asarray(x, np.float32) * np.float32(scale)
    return oracle.decode(name)[oracle.encode(x, name)] / np.float64(scale)


def distance(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "within"), [("float32", 3e-7), ("bfloat16", 4e-3), ("float16", 5e-4)])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_the_product_of_rounded_operands(name, dtype, within, fp8_format):
    """Nothing but the cast is approximate: operands rounded by hand, multiplied in float64."""
    (x, w, dy), contract = arrays(name, dtype)
    scales = SCALES * [1, 1, 0.01 if fp8_format == "e4m3" else 1]
    recipe = DelayedScaling(fp8_format=fp8_format)
    f = lambda x, w, s: fp8.dot(x, w, s, recipe=recipe, contract=contract)
    y, dx, dw, seen = jax.jit(functools.partial(gradients, f))(dy, x, w, jnp.float32(scales))
    names = [np.dtype(d).name for d in recipe.dtypes]
    expected = exact(*(rounded(*each) for each in zip((x, w, dy), scales, names, strict=True)), contract)
    for found, reference in zip((y, dx, dw), expected, strict=True):
        assert found.dtype == dtype
        assert distance(found, reference) < within
    np.testing.assert_array_equal(seen, [amax(x), amax(w), amax(dy)])


def test_scales_that_are_powers_of_two_change_no_bit():
    """Where nothing saturates and nothing is subnormal."""
    x, w, dy = (jax.random.uniform(jax.random.key(i), (32, 32), jnp.bfloat16, 0.1) for i in range(3))
    ends = []
    for scales in ([64, 64, 4096], [128, 32, 1024]):
        f = lambda x, w, s: fp8.dot(x, w, s, recipe=DelayedScaling(power_of_two=True))
        ends.append(gradients(f, dy, x, w, jnp.float32(scales)))
    jax.tree.map(lambda *y: np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in y)), *ends)


# --- error budgets ---------------------------------------------------------------------------------------------------

# Relative rounding error, root mean square: 0.026 for E4M3, 0.053 for E5M2; of a product, both operands' together.
BUDGETS = [  # recipe, error of y, of dx and dw
    (CurrentScaling(), 0.040, 0.062),
    (CurrentScaling(power_of_two=True), 0.041, 0.062),
    (CurrentScaling(fp8_format="e4m3"), 0.040, 0.040),
    (DelayedScaling(), 0.040, 0.062),
    (DelayedScaling(fp8_format="e4m3"), 0.040, 0.040),
    (BlockScaling(), 0.040, 0.040),
    (BlockScaling(fp8_format="hybrid"), 0.040, 0.062),
]
NAMES = [f"{type(b[0]).__name__} {b[0].fp8_format}" for b in BUDGETS]


@pytest.mark.parametrize(("recipe", "forward", "backward"), BUDGETS, ids=NAMES)
def test_error_budgets(recipe, forward, backward):
    rng = np.random.default_rng(1)
    x, w, dy = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in [(128, 256), (256, 192), (128, 192)])
    scales = jnp.float32([80, 80, 80 if recipe.fp8_format == "e4m3" else 9000])
    y, dx, dw, _ = gradients(lambda *a: fp8.dot(*a, recipe=recipe), dy, x, w, scales)
    errors = [distance(*pair) for pair in zip((y, dx, dw), exact(x, w, dy, 1), strict=True)]
    assert forward / 2 < errors[0] < forward
    assert backward / 2 < min(errors[1:])
    assert max(errors[1:]) < backward


# Rounding to nearest shortens a tensor of normal numbers by its mean square relative error; truncation would by 0.04.
SHORTENS = {"float8_e4m3fn": 0.026**2, "float8_e5m2": 0.053**2}


@pytest.mark.parametrize("recipe", [b[0] for b in BUDGETS], ids=NAMES)
def test_unbiased_over_a_thousand_draws(recipe):
    """No element has an error with a mean other than 0, and no product is shorter or longer than the exact one."""
    draws = [jax.random.normal(jax.random.key(i), (1000, 32, 32)) for i in range(3)]
    scales = jnp.float32([80, 80, 80 if recipe.fp8_format == "e4m3" else 9000])

    def one(x, w, dy):
        found = jnp.stack(gradients(lambda *a: fp8.dot(*a, recipe=recipe), dy, x, w, scales)[:3])
        reference = jnp.stack(gradients(lambda x, w: x @ w, dy, x, w))
        return found - reference, jnp.sum((found - reference) * reference, (1, 2)) / jnp.sum(reference**2, (1, 2))

    with jax.default_matmul_precision("highest"):
        errors, longer = (np.asarray(each, np.float64) for each in jax.jit(jax.vmap(one))(*draws))
    assert (
        np.abs(errors.mean(0)) < 5.5 * errors.std(0) / np.sqrt(1000)
    ).all()  # 3072 means: 1 in 10,000 runs by chance
    first, second, third = (SHORTENS[dtype.name] for dtype in recipe.dtypes)
    expected = -np.asarray([first + second, third + second, first + third])
    np.testing.assert_allclose(longer.mean(0), expected, atol=4e-4)


# --- how amaxes leave ------------------------------------------------------------------------------------------------


def stack(recipe, checkpoint):
    def layer(x, w, scales):
        return jnp.tanh(fp8.dot(x, w, scales, recipe=recipe))

    def loss(scales, ws, x):
        inner = jax.checkpoint(layer) if checkpoint else layer
        return jnp.sum(jax.lax.scan(lambda x, each: (inner(x, *each), None), x, (ws, scales))[0] ** 2)

    return loss


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_scan_over_layers_has_amaxes_for_each(checkpoint):
    ws = jax.random.normal(jax.random.key(0), (3, 16, 16))
    x, scales = jax.random.normal(jax.random.key(1), (8, 16)), jnp.tile(jnp.float32([50, 50, 2000]), (3, 1))
    found = jax.jit(jax.grad(stack(DelayedScaling(), checkpoint)))(scales, ws, x)
    expected = []
    for i in range(3):
        expected.append([amax(x), amax(ws[i])])
        x = jnp.tanh(fp8.dot(x, ws[i], scales[i], recipe=DelayedScaling()))
    np.testing.assert_allclose(found[:, :2], expected, rtol=1e-6)
    assert (found[:, 2] > 0).all()
    assert len(set(np.asarray(found[:, 2]).tolist())) == 3


def test_checkpointing_changes_no_amax_and_no_gradient():
    ws = jax.random.normal(jax.random.key(0), (3, 16, 16))
    x, scales = jax.random.normal(jax.random.key(1), (8, 16)), jnp.tile(jnp.float32([50, 50, 2000]), (3, 1))
    ends = [jax.jit(jax.grad(stack(DelayedScaling(), c), argnums=(0, 1, 2)))(scales, ws, x) for c in (False, True)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *ends)


def test_vmap_with_scales_of_its_own_for_each():
    x, w = jax.random.normal(jax.random.key(0), (4, 8, 16)), jax.random.normal(jax.random.key(1), (16, 8))
    f = lambda s, x: fp8.dot(x, w, s, recipe=CurrentScaling()).sum()
    found = jax.vmap(jax.grad(f))(jnp.ones((4, 3)), x)
    np.testing.assert_array_equal(found, [[amax(each), amax(w), 1] for each in x])


def test_ranks_have_amaxes_of_their_own_and_a_maximum_joins_them():
    mesh = jzero.make_mesh(data=4, devices=jax.devices()[:4])
    x, w = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (16, 8))
    scales = jnp.float32([50, 50, 2000])

    def local(x, w, scales):
        own = jax.lax.pcast(scales, ("data",), to="varying")
        seen = jax.grad(lambda s: fp8.dot(x, w, s, recipe=DelayedScaling()).sum())(own)
        return seen[None], jax.lax.pmax(seen, "data")

    specs = {"in_specs": (P("data"), P(), P()), "out_specs": (P("data"), P())}
    each, joined = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(x, w, scales)
    np.testing.assert_array_equal(each[:, 0], [amax(part) for part in x.reshape(4, 2, 16)])
    np.testing.assert_array_equal(joined, [amax(x), amax(w), 1])


def test_scales_that_ranks_share_are_refused_as_their_amaxes_would_be_summed():
    mesh = jzero.make_mesh(data=2, devices=jax.devices()[:2])
    local = lambda x, s: jax.grad(lambda s: fp8.dot(x, jnp.ones((16, 8)), s, recipe=DelayedScaling()).sum())(s)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    with pytest.raises(JzeroError, match=r"expected scales that vary over \('data',\).*jax.lax.pcast\(scales"):
        jax.jit(mapped)(jnp.ones((8, 16)), jnp.ones(3))


def test_the_two_functions_are_the_differentiable_one():
    (x, w, dy), contract = arrays("out", "bfloat16")
    recipe, scales = DelayedScaling(), jnp.float32(SCALES)
    options = fp8.Options(recipe, contract, fp8.Shared(), (x.dtype, w.dtype))
    y, residuals = fp8.forward(x, w, scales, options)
    assert residuals.x.dtype == residuals.w.dtype == E4M3
    expected = gradients(lambda *a: fp8.dot(*a, recipe=recipe, contract=contract), dy, x, w, scales)
    jax.tree.map(np.testing.assert_array_equal, (y, *fp8.backward(residuals, dy, options)), (*expected, None))


@pytest.mark.parametrize("quantised", [False, True])
def test_shares_of_what_the_casts_lose(quantised):
    (x, w, dy), contract = arrays("down")
    scales, recipe = jnp.float32([400, 1e-3, 1e5]), DelayedScaling()
    weight = Quantised(quantise(w, scales[1], E4M3), scales[1]) if quantised else w
    f = lambda shares: jnp.sum(fp8.dot(x, weight, scales, recipe=recipe, contract=contract, shares=shares) * dy)
    found = jax.jit(jax.grad(f))(jnp.zeros((3, 2)))
    expected = [losses(x, scales[0], E4M3), losses(w, scales[1], E4M3), losses(dy, scales[2], E5M2)]
    if quantised:
        expected[1] = (0, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert expected[0][0] > 0.2
    assert expected[2][0] > 0.2
    assert quantised or expected[1][1] > 0.3


# --- an FP8 parameter as weight --------------------------------------------------------------------------------------


def test_a_quantised_weight_is_used_as_it_is_and_has_a_gradient_of_two_bytes():
    (x, w, dy), contract = arrays("qkv", "bfloat16")
    scales, recipe = jnp.float32(SCALES), DelayedScaling()
    f = lambda x, w, s: fp8.dot(x, w, s, recipe=recipe, contract=contract)
    leaf = Quantised(quantise(w, scales[1], E4M3), scales[1])
    y, dx, dw, seen = gradients(f, dy, x, leaf, scales)
    expected = gradients(f, dy, x, w, scales)
    assert dw.value.dtype == jnp.bfloat16
    assert dw.scale == 0
    assert seen[1] == 0
    for found, reference in zip((y, dx, dw.value), expected[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(reference, np.float32))


def test_quantised_weights_in_a_scan_over_layers():
    ws = jax.random.normal(jax.random.key(0), (3, 16, 16))
    leaves = Quantised(quantise(ws, jnp.float32(64), E4M3), jnp.full(3, 64.0))
    x, scales = jax.random.normal(jax.random.key(1), (8, 16)), jnp.tile(jnp.float32([50, 64, 2000]), (3, 1))
    loss = stack(DelayedScaling(), checkpoint=True)
    found = jax.jit(lambda leaves: jax.vjp(lambda w: loss(scales, w, x), leaves)[1](jnp.float32(1))[0])(leaves)
    expected = jax.jit(jax.grad(loss, argnums=1))(scales, ws, x)
    assert found.value.dtype == jnp.float32
    np.testing.assert_allclose(found.value, expected, rtol=1e-5, atol=1e-6)


# --- current scaling of a tensor in parts ----------------------------------------------------------------------------


def test_tensor_parallel_ranks_use_the_whole_tensors_scale():
    """Column- then row-parallel, result and gradients: one device's, up to the order of float32 additions."""
    mesh = jzero.make_mesh(tensor=4, devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    x, up, down = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(8, 32), (32, 64), (64, 32)])
    up, recipe = up.at[:, :16].multiply(50), CurrentScaling()
    columns, rows = fp8.Shared(w=("tensor",), gradient=("tensor",)), fp8.Shared(x=("tensor",), w=("tensor",))

    def layers(x, up, down, first, second, join=lambda y: y):
        def loss(x, up, down):
            inner = jnp.tanh(fp8.dot(x, up, recipe=recipe, shared=first) / 100)
            return jnp.sum(join(fp8.dot(inner, down, recipe=recipe, shared=second)) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, up, down)

    cut = (P(), P(None, "tensor"), P("tensor"))

    def parallel(first, second):
        local = lambda *a: layers(*a, first, second, lambda y: jax.lax.psum(y, "tensor"))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=(P(), cut)))(x, up, down)

    one = jax.tree.map(lambda a: np.asarray(a, np.float64), layers(x, up, down, None, None))
    assert max(jax.tree.leaves(jax.tree.map(distance, parallel(columns, rows), one))) < 1e-5
    assert max(jax.tree.leaves(jax.tree.map(distance, parallel(None, None), one))) > 1e-3  # with the shard's own scale


# --- what is not finite ----------------------------------------------------------------------------------------------


def test_infinities_saturate_and_show_in_the_amax_while_nan_goes_through():
    (x, w, _), _ = arrays("down")
    f = lambda x: fp8.dot(x, w, jnp.float32(SCALES), recipe=DelayedScaling())
    seen = lambda x: jax.grad(lambda s: fp8.dot(x, w, s, recipe=DelayedScaling()).sum())(jnp.float32(SCALES))
    infinite, nan = x.at[0, 0, 0].set(jnp.inf), x.at[0, 0, 0].set(jnp.nan)
    assert np.isfinite(f(infinite)).all()
    assert np.isinf(seen(infinite)[0])
    assert np.isnan(f(nan)[0, 0]).all()
    assert np.isfinite(f(nan)[0, 1:]).all()
    assert np.isnan(seen(nan)[0])


X, W = jnp.ones((4, 32)), jnp.ones((32, 32))
WRONG = [
    (
        {"x": X, "w": W.T[:16], "recipe": CurrentScaling()},
        r"last 1 dimensions of x to be the first 1 of w, found \(4, 32\)",
    ),
    ({"x": X, "w": W, "recipe": CurrentScaling(), "contract": 3}, "expected the last 3 dimensions"),
    ({"x": X, "w": W, "recipe": DelayedScaling()}, "DelayedScaling needs scales, float32 .3., found None"),
    (
        {"x": X, "w": W, "scales": jnp.ones(2), "recipe": DelayedScaling()},
        r"scales to be float32 \[3\], found float32 \[2\]",
    ),
    (
        {"x": X, "w": W, "recipe": BlockScaling(), "shared": fp8.Shared()},
        "`shared` is for CurrentScaling, found BlockScaling",
    ),
    (
        {"x": X, "w": Quantised(W, 1), "recipe": BlockScaling()},
        "expected an array for BlockScaling, found a Quantised weight",
    ),
    (
        {"x": X, "w": W, "recipe": BlockScaling(), "shares": jnp.zeros((3, 2))},
        "`shares` is for recipes with a scale per",
    ),
    (
        {"x": X, "w": W, "recipe": CurrentScaling(), "shares": jnp.zeros(3)},
        r"shares to be float32 \[3, 2\], found float32",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_mistakes_are_named(arguments, text):
    with pytest.raises(JzeroError, match=text):
        fp8.dot(**arguments)
