"""The product of a layer, x · w, in FP8: forward and both backward products, each accumulated in float32.

    forward    y  = x̂ ŵ        x̂, ŵ, ĝ: x, w, dy as FP8 value / scale
    backward   dx = ĝ ŵᵀ       dw = x̂ᵀ ĝ

XLA's GPU compiler makes `__cublas$lt$matmul$f8` of a product whose operands are FP8 arrays, so the operands are never
written as cast-up copies; the CPU multiplies the same values in float32. docs/fp8.md says what was seen in the module.

`dot` is differentiable, and the cotangent of its `scales` is not a derivative: it is the three largest magnitudes that
`recipes.update` wants. So they leave through `jax.grad`, `lax.scan` (stacked, one entry per layer) and `jax.checkpoint`
(a recomputed forward pass does not count twice) without an output of their own. Autodiff *sums* cotangents of a value
that is used twice: each call has scales of its own, which under `vmap` are mapped and in a manual region vary over the
axes that split the batch. `forward` and `backward` are the same in two pure functions.

Letters: M... dimensions of the batch, I... contracted dimensions, O... dimensions of the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jzero.errors import JzeroError
from jzero.fp8 import blocks
from jzero.fp8.numerics import Quantised, amax, losses, quantise
from jzero.fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe

Weight = Array | Quantised

SAVED = ("fp8_input", "fp8_weight")
"""`checkpoint_name`s of the quantised operands, for a `jax.checkpoint` policy that keeps one byte instead of two."""

MEASURED = "fp8_amax"
"""That of an operand's amax: kept, it is measured (and reduced over ranks) once, not again in the backward pass."""


class Shared(NamedTuple):
    """Mesh axes over which each operand's amax is a maximum, where it is cut along them; for `CurrentScaling`."""

    x: tuple[str, ...] = ()
    w: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """What is static in a product.

    Attributes:
        recipe: how scales are chosen.
        contract: number of contracted dimensions: the last of x, the first of w.
        shared: for current scaling in a manual region.
        dtypes: of x (and the result and dx) and of dw.
        count: also count what the casts saturate and flush.
    """

    recipe: Recipe
    contract: int
    shared: Shared
    dtypes: tuple[Any, Any]
    count: bool = False


class Residuals(NamedTuple):
    """What the backward pass needs."""

    x: Any  # E4M3 [M..., I...]; block scaling: `Blocks`
    w: Any  # E4M3 [I..., O...]; block scaling: as given
    scales: Array  # float32 [3]: of x and w as they were cast; of the gradient as it was given
    amax: Array  # float32 [2]: of x and w; 0 for a weight that came quantised
    shares: Array | None = None  # float32 [2, 2]: of x and w


def dot(
    x: Array,
    w: Weight,
    scales: Array | None = None,
    *,
    recipe: Recipe,
    contract: int = 1,
    shared: Shared | None = None,
    shares: Array | None = None,
) -> Array:
    """`jnp.tensordot(x, w, contract)` in FP8.

    Args:
        x: bfloat16, float16 or float32 [M..., I...].
        w: floating [I..., O...]; or `Quantised`, an FP8 parameter, whose gradient has the dtype of x.
        scales: float32 [3], what x, w and dy are multiplied by before the cast; one array per call. `DelayedScaling`
            uses them; for other recipes they only carry amaxes out, and may be None.
        recipe: how scales are chosen. With `power_of_two` the scales, and a `Quantised` weight's, have to be such.
        contract: number of contracted dimensions.
        shared: mesh axes along which an operand is cut, so that all ranks find the scale of the whole; `CurrentScaling`
            in a manual region only. (`DelayedScaling`: reduce the amaxes before `recipes.update`.)
        shares: float32 [3, 2], of any values: its cotangent is the shares of x, w and dy that the cast saturates, and
            that it flushes to zero (0 for a `Quantised` weight). Costs reductions of each. None: not counted.

    Returns:
        [M..., O...] in the dtype of x. Under differentiation dx has the dtype of x, dw that of w, and the cotangent of
        `scales` is float32 [3], the largest magnitudes of x, w and dy.

    Raises:
        JzeroError: shapes that do not fit; scales that are missing or no float32 [3]; what does not go with the recipe.

    Example:
        >>> x, w, scales = jnp.ones((2, 4)), jnp.full((4, 3), 0.5), jnp.float32([64, 64, 1024])
        >>> f = lambda x, w, scales: dot(x, w, scales, recipe=DelayedScaling()).sum()
        >>> f(x, w, scales)
        Array(12., dtype=float32)
        >>> jax.grad(f, argnums=2)(x, w, scales)
        Array([1. , 0.5, 1. ], dtype=float32)
    """
    options = _options(x, w, scales, recipe, contract, shared)
    if shares is not None:
        options = _counting(options, shares)
    axes = frozenset().union(*(_varying(each) for each in jax.tree.leaves((x, w, scales, shares))))
    x, w = jax.tree.map(lambda each: _vary(each, axes), (x, w))  # outside of the VJP, so that dx and dw are summed
    return _dot(options, x, w, scales, shares)


def forward(x: Array, w: Weight, scales: Array | None, options: Options) -> tuple[Array, Residuals]:
    """The result of `dot`, and what `backward` needs.

    Args:
        x, w, scales: as for `dot`; scales None: ones.
        options: all else.

    Returns:
        [M..., O...] in the dtype of x; the residuals.

    Example:
        >>> options = Options(CurrentScaling(power_of_two=True), 1, Shared(), (jnp.float32, jnp.float32))
        >>> y, residuals = forward(jnp.ones((2, 4)), jnp.full((4, 3), 0.5), None, options)
        >>> dx, dw, amaxes, _ = backward(residuals, jnp.ones((2, 3)), options)
        >>> y[0], amaxes
        (Array([2., 2., 2.], dtype=float32), Array([1. , 0.5, 1. ], dtype=float32))
    """
    scales = jnp.ones(3, jnp.float32) if scales is None else scales
    if isinstance(options.recipe, BlockScaling):
        return _forward_blocks(x, w, scales, options)
    dtypes = options.recipe.dtypes
    x_max, x_scale = _measure(x, scales[0], 0, options)
    x_hat = checkpoint_name(quantise(x, x_scale, dtypes[0]), SAVED[0])
    if isinstance(w, Quantised):
        w_max, w_scale, w_hat = jnp.zeros_like(x_max), w.scale, w.value
    else:
        w_max, w_scale = _measure(w, scales[1], 1, options)
        w_hat = checkpoint_name(quantise(w, w_scale, dtypes[1]), SAVED[1])
    outer, inner = x.ndim - options.contract, range(options.contract)
    dims = (tuple(outer + i for i in inner), tuple(inner))
    y = _product(x_hat, w_hat, dims, (x_scale, w_scale), options.dtypes[0], options.recipe)
    shares = None
    if options.count:
        of_w = (jnp.zeros_like(w_max),) * 2 if isinstance(w, Quantised) else losses(w, w_scale, dtypes[1])
        shares = jnp.stack([jnp.stack(losses(x, x_scale, dtypes[0])), jnp.stack(of_w)])
    return y, Residuals(x_hat, w_hat, jnp.stack([x_scale, w_scale, scales[2]]), jnp.stack([x_max, w_max]), shares)


def backward(residuals: Residuals, dy: Array, options: Options) -> tuple[Array, Array, Array, Array | None]:
    """Both gradients, from what `forward` left and the cotangent of its result.

    Args:
        residuals: of `forward`.
        dy: [M..., O...].
        options: as for `forward`.

    Returns:
        dx; dw; the largest magnitudes of x, w and dy, float32 [3]; the shares, float32 [3, 2], or None.
    """
    if isinstance(options.recipe, BlockScaling):
        return _backward_blocks(residuals, dy, options)
    x_hat, w_hat, scales, seen, shares = residuals
    g_max, g_scale = _measure(dy, scales[2], 2, options)
    g_hat = quantise(dy, g_scale, options.recipe.dtypes[2])
    outer, outputs = x_hat.ndim - options.contract, w_hat.ndim - options.contract
    over_outputs = (tuple(range(outer, outer + outputs)), tuple(range(options.contract, options.contract + outputs)))
    over_batch = (tuple(range(outer)),) * 2
    dx = _product(g_hat, w_hat, over_outputs, (g_scale, scales[1]), options.dtypes[0], options.recipe)
    dw = _product(x_hat, g_hat, over_batch, (scales[0], g_scale), options.dtypes[1], options.recipe)
    if shares is not None:
        shares = jnp.concatenate([shares, jnp.stack(losses(dy, g_scale, options.recipe.dtypes[2]))[None]])
    return dx, dw, jnp.append(seen, g_max), shares


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(options: Options, x: Array, w: Weight, scales: Array | None, shares: Array | None) -> Array:
    return forward(x, w, scales, options)[0]


def _dot_forward(
    options: Options, x: Array, w: Weight, scales: Array | None, shares: Array | None
) -> tuple[Array, Any]:
    slots = [each for each in (scales, shares) if each is not None]
    missing = tuple(sorted(frozenset().union(*(_varying(x) - _varying(each) for each in slots))))
    if missing:
        raise JzeroError(
            f"fp8.dot: expected scales that vary over {missing}, found the same on every rank, whose amaxes autodiff "
            f"would sum; mark them by jax.lax.pcast(scales, {missing}, to='varying'), then take the pmax"
        )
    y, residuals = forward(x, w, scales, options)
    return y, (residuals, (scales, shares), w.scale if isinstance(w, Quantised) else None)


def _dot_backward(options: Options, saved: Any, dy: Array) -> tuple[Any, ...]:
    residuals, slots, own = saved
    dx, dw, *found = backward(residuals, dy, options)
    if own is not None:
        dw = Quantised(dw, _vary(jnp.zeros_like(own), _varying(own)))
    seen = [
        None if x is None or slot is None else _vary(x, _varying(slot)) for slot, x in zip(slots, found, strict=True)
    ]
    return dx, dw, *seen


_dot.defvjp(_dot_forward, _dot_backward)


def _measure(x: Array, scale: Array, operand: int, options: Options) -> tuple[Array, Array]:
    """An operand's largest magnitude, and the scale it is to be cast with."""
    largest, recipe = amax(x), options.recipe
    if isinstance(recipe, CurrentScaling) and options.shared[operand]:
        largest = jax.lax.pmax(largest, options.shared[operand])
    largest = checkpoint_name(largest, MEASURED)
    if not isinstance(recipe, CurrentScaling):
        return largest, scale
    return largest, recipe.scale(largest, jnp.ones_like(largest), recipe.limits[operand])


def _product(a: Array, b: Array, dims: Any, scales: tuple[Array, Array], dtype: Any, recipe: Any) -> Array:
    """The product of FP8 arrays over `dims`, divided by both scales.

    A factor in the dtype of the product goes into XLA's FP8 matmul, in float32. It is exact if it is a power of two.
    Any other factor would be rounded to bfloat16 where XLA leaves it outside, so it multiplies in float32, in whatever
    kernel reads the result.
    """
    # unscaled products overflow float16
    accumulated = jnp.float32 if dtype == jnp.float16 else dtype
    y = jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=accumulated)
    inverse = (1 / scales[0]) * (1 / scales[1])
    if recipe.power_of_two:
        return (y * inverse.astype(y.dtype)).astype(dtype)
    return (y.astype(jnp.float32) * inverse).astype(dtype)


def _varying(x: Array) -> frozenset[str]:
    """The mesh axes over which ranks have values of their own, where a manual region tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# --- block scaling ----------------------------------------------------------------------------------------------------


def _forward_blocks(x: Array, w: Weight, scales: Array, options: Options) -> tuple[Array, Residuals]:
    assert not isinstance(w, Quantised)  # refused by `_options`
    rows, columns, inner = _sizes(x.shape, w.shape, options.contract)
    dtypes = options.recipe.dtypes
    flat_x, flat_w = x.reshape(rows, inner), w.reshape(inner, columns)
    y = blocks.matmul(blocks.quantise(flat_x, dtypes[0]), blocks.quantise(flat_w.T, dtypes[1]), options.dtypes[0])
    across = blocks.quantise(flat_x.T, dtypes[0])  # for dw, whose contraction is over the batch
    shape = x.shape[: x.ndim - options.contract] + w.shape[options.contract :]
    amaxes = jnp.stack([amax(x), amax(w)])
    return y.reshape(shape), Residuals(across, w, scales, amaxes)


def _backward_blocks(residuals: Residuals, dy: Array, options: Options) -> tuple[Array, Array, Array, None]:
    w, dtypes = residuals.w, options.recipe.dtypes
    outer = dy.ndim - (w.ndim - options.contract)
    columns = math.prod(dy.shape[outer:])
    flat, flat_w = dy.reshape(-1, columns), w.reshape(-1, columns)
    dx = blocks.matmul(blocks.quantise(flat, dtypes[2]), blocks.quantise(flat_w, dtypes[1]), options.dtypes[0])
    dw = blocks.matmul(residuals.x, blocks.quantise(flat.T, dtypes[2]), options.dtypes[1])
    dx = dx.reshape(dy.shape[:outer] + w.shape[: options.contract])
    return dx, dw.reshape(w.shape), jnp.append(residuals.amax, amax(dy)), None


def _sizes(x: tuple[int, ...], w: tuple[int, ...], contract: int) -> tuple[int, int, int]:
    outer = len(x) - contract
    return math.prod(x[:outer]), math.prod(w[contract:]), math.prod(w[:contract])


# --- arguments --------------------------------------------------------------------------------------------------------


def _options(x: Array, w: Weight, scales: Any, recipe: Recipe, contract: int, shared: Shared | None) -> Options:
    value = w.value if isinstance(w, Quantised) else w
    inner = x.shape[x.ndim - contract :]
    if not 1 <= contract <= min(x.ndim, value.ndim) or inner != value.shape[:contract]:
        raise JzeroError(
            f"fp8.dot: expected the last {contract} dimensions of x to be the first {contract} of w, found "
            f"{x.shape} and {value.shape}; change the shapes or `contract`"
        )
    if scales is None and isinstance(recipe, DelayedScaling):
        raise JzeroError("fp8.dot: DelayedScaling needs scales, float32 [3], found None; take them from recipes.init")
    if scales is not None and (scales.shape != (3,) or scales.dtype != jnp.float32):
        found = f"{scales.dtype} {list(scales.shape)}"
        raise JzeroError(f"fp8.dot: expected scales to be float32 [3], found {found}; give each call three of its own")
    if shared is not None and not isinstance(recipe, CurrentScaling):
        raise JzeroError(
            f"fp8.dot: `shared` is for CurrentScaling, found {type(recipe).__name__}; reduce its amaxes before `update`"
        )
    if isinstance(w, Quantised) and isinstance(recipe, BlockScaling):
        raise JzeroError("fp8.dot: expected an array for BlockScaling, found a Quantised weight; dequantise it")
    return Options(recipe, contract, shared or Shared(), (x.dtype, x.dtype if isinstance(w, Quantised) else w.dtype))


def _counting(options: Options, shares: Array) -> Options:
    if isinstance(options.recipe, BlockScaling):
        raise JzeroError("fp8.dot: `shares` is for recipes with a scale per tensor, found BlockScaling; leave it out")
    if shares.shape != (3, 2) or shares.dtype != jnp.float32:
        raise JzeroError(
            f"fp8.dot: expected shares to be float32 [3, 2], found {shares.dtype} {list(shares.shape)}; give zeros"
        )
    return dataclasses.replace(options, count=True)
