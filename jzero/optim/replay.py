"""Replaying an elementwise program on shards: the jaxpr of whole parameters, evaluated on pieces of them.

A value in the program is one of three:

    Shard    has the shape of one parameter, and each element depends on that parameter's same position alone
    Uniform  has the same number everywhere, whatever its shape: a schedule, a bias correction, `zeros_like`
    Whole    differs between positions but not by any parameter: a key, random numbers, a constant array

Elementwise operations take Shards and Uniforms to Shards; Whole values may only lead to other Whole or Uniform ones.
Whatever else is done to a Shard raises `MixesPositions`. So the replay is the proof that a result on a shard is the
shard of the result; and what the program read off the parameters' shapes when it was traced stays as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from jzero.optim import regions

# Operations on each position alone. Operands are of one shape, or scalars.
# fmt: off
ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow",
    "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision",
    "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "zeta",
))
# Operations that give the same number everywhere where their operand has.
RESHAPING = frozenset(("broadcast_in_dim", "expand_dims", "reshape", "rev", "slice", "squeeze", "transpose"))
INLINED = frozenset((
    "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr",
))
# fmt: on
SUBPROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(frozen=True)
class Shard:
    """A piece of a value of one parameter's shape."""

    value: Array  # the shard's shape
    leaf: int  # index of the parameter


@dataclasses.dataclass(frozen=True)
class Uniform:
    """One number for every position."""

    value: Array  # scalar
    shape: tuple[int, ...]  # in the program


@dataclasses.dataclass(frozen=True)
class Whole:
    """An array that is the same on every rank, but differs between positions."""

    value: Array
    origin: str  # the operation or input that made it


Value = Shard | Uniform | Whole


class MixesPositions(Exception):  # noqa: N818  a finding, turned into a ValueError that names the leaf
    """An operation makes an element depend on other positions than its own."""

    def __init__(self, leaves: Sequence[int], operation: str, what: str, equation: Any = None):
        super().__init__(operation)
        self.leaves, self.operation, self.what = tuple(leaves), operation, what
        self.equations = [equation]  # the operation, and the calls around it


def plain(value: Any, origin: str) -> Value:
    """An array that no parameter enters."""
    return Uniform(value, ()) if jnp.ndim(value) == 0 else Whole(value, origin)


def array(value: Value) -> Array:
    """The array that stands for a value: a shard's piece, otherwise all of it."""
    return jnp.broadcast_to(value.value, value.shape) if isinstance(value, Uniform) else value.value


def evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
    """The results of a `jax.extend.core.Jaxpr` on values that are shards or not.

    Raises:
        MixesPositions: names the parameters and the operation.
    """
    known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {var: plain(x, "a constant array") for var, x in zip(jaxpr.constvars, constants, strict=True)}
    read = lambda x: plain(jnp.asarray(x.val, cast(Any, x.aval).dtype), "") if isinstance(x, core.Literal) else known[x]
    for equation in jaxpr.eqns:
        results = _equation(equation, [read(x) for x in equation.invars])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _equation(equation: Any, values: list[Value]) -> list[Value]:
    name = equation.primitive.name
    if name in INLINED:
        inner = next(equation.params[key] for key in SUBPROGRAMS if key in equation.params)
        try:
            return evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        except MixesPositions as found:
            found.equations.append(equation)
            raise
    leaves = sorted({v.leaf for v in values if isinstance(v, Shard)})
    if not leaves:
        return _without_shards(equation, values)
    if name == "optimization_barrier":
        return _rewrapped(values, _bind(equation, [v.value for v in values]))
    if name in CONTROL:
        return CONTROL[name](equation, values)
    if len(leaves) > 1:
        raise MixesPositions(leaves, name, "puts several leaves together", equation)
    if name in ELEMENTWISE:
        return _elementwise(equation, values, leaves[0])
    if name in RESHAPING and _keeps(equation):
        return values[:1]
    raise MixesPositions(leaves, name, "mixes positions of this leaf", equation)


def _elementwise(equation: Any, values: list[Value], leaf: int) -> list[Value]:
    shape = next(v.value.shape for v in values if isinstance(v, Shard))
    if any(math.prod(x.aval.shape) != 1 for x in equation.outvars) and not _same_shapes(equation):
        raise MixesPositions([leaf], equation.primitive.name, "changes the shape of this leaf", equation)
    operands = []
    for v, x in zip(values, equation.invars, strict=True):
        if isinstance(v, Whole):
            what = f"gives this leaf {v.origin}, which differs between positions"
            raise MixesPositions([leaf], equation.primitive.name, what, equation)
        scalar = x.aval.shape == () and equation.primitive.name == "clamp"
        operands.append(v.value if isinstance(v, Shard) or scalar else jnp.broadcast_to(v.value, shape))
    return [Shard(y, leaf) for y in _bind(equation, alike(operands))]


def _same_shapes(equation: Any) -> bool:
    shapes = {x.aval.shape for x in (*equation.invars, *equation.outvars) if x.aval.shape != ()}
    return len(shapes) <= 1


def _keeps(equation: Any) -> bool:
    """Whether a reshaping leaves every position where it is."""
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    moved = equation.params.get("broadcast_dimensions", equation.params.get("permutation", range(len(after))))
    return before == after and tuple(moved) == tuple(range(len(after))) and equation.primitive.name != "rev"


def _without_shards(equation: Any, values: list[Value]) -> list[Value]:
    name = equation.primitive.name
    if values and all(isinstance(v, Uniform) for v in values):
        if name in RESHAPING:
            return [Uniform(values[0].value, equation.outvars[0].aval.shape)]
        if name in ELEMENTWISE and _same_shapes(equation):
            results = _bind(equation, alike([v.value for v in values]))
            return [Uniform(y, x.aval.shape) for y, x in zip(results, equation.outvars, strict=True)]
    inherited = next((v.origin for v in values if isinstance(v, Whole) and v.origin), name)
    origin = inherited if name in ELEMENTWISE | RESHAPING else f"`{name}`"
    return [plain(y, origin) for y in _bind(equation, alike([array(v) for v in values]))]


def _bind(equation: Any, operands: Sequence[Any]) -> list[Array]:
    results = equation.primitive.bind(*operands, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _rewrapped(values: Sequence[Value], arrays: Sequence[Array]) -> list[Value]:
    return [dataclasses.replace(v, value=x) for v, x in zip(values, arrays, strict=True)]


def alike(arrays: Sequence[Any]) -> list[Any]:
    """Arrays that all vary over the mesh axes that any of them varies over, as one operation wants them."""
    axes = frozenset().union(*(regions.varying_axes(x) for x in arrays))
    return [vary(x, axes) for x in arrays]


def vary(x: Any, axes: frozenset[str]) -> Any:
    """`x`, marked as varying over `axes` too."""
    missing = tuple(sorted(axes - regions.varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


# --- control flow ----------------------------------------------------------------------------------------------------
# Branches and carries are made to be of one kind: a Uniform becomes a Shard where the other branch, or the next round,
# has one.


def _check_fits(value: Value, kind: Value, equation: Any) -> None:
    """Refuse a value that cannot be made to be of another's kind."""
    same = type(value) is type(kind) and getattr(value, "leaf", None) == getattr(kind, "leaf", None)
    if not same and not isinstance(value, Uniform):
        leaves = sorted({v.leaf for v in (value, kind) if isinstance(v, Shard)})
        raise MixesPositions(leaves, equation.primitive.name, "gives results of several kinds", equation)


def _raised(value: Value, kind: Value, equation: Any) -> Value:
    """`value` as the kind of `kind`; a Shard's shape is `kind`'s."""
    _check_fits(value, kind, equation)
    if isinstance(kind, Shard):
        return Shard(jnp.broadcast_to(value.value, kind.value.shape), kind.leaf)
    return Whole(array(value), kind.origin) if isinstance(kind, Whole) else value


def _joined(first: Sequence[Value], second: Sequence[Value], equation: Any) -> list[Value]:
    """The more general kind of each pair."""
    pairs = [sorted(pair, key=lambda v: not isinstance(v, Uniform)) for pair in zip(first, second, strict=True)]
    for low, high in pairs:
        _check_fits(low, high, equation)
    return [high for _, high in pairs]


def _kinds(f: Callable[..., list[Value]], *arguments: Sequence[Value]) -> list[Value]:
    """What `f` gives, as values that hold abstract arrays."""
    found: list[Value] = []

    def traced(arrays: Any) -> list[Array]:
        out = f(*(_rewrapped(vs, xs) for vs, xs in zip(arguments, arrays, strict=True)))
        found[:] = out
        return [v.value for v in out]

    shapes = jax.eval_shape(traced, [[v.value for v in vs] for vs in arguments])
    return _rewrapped(found, shapes)


Axes = dict[int, frozenset[str]]


def _axes(values: Sequence[Value]) -> Axes:
    """Per leaf, the axes over which anything of it in a control-flow operation may vary."""
    axes: Axes = {}
    for v in values:
        if isinstance(v, Shard):
            axes[v.leaf] = axes.get(v.leaf, frozenset()) | regions.varying_axes(v.value)
    return axes


def _cast(values: Sequence[Value], kinds: Sequence[Value], axes: Axes, equation: Any) -> list[Array]:
    """The arrays of values raised to `kinds`; shards vary over the axes of their leaf."""
    raised = [_raised(v, kind, equation) for v, kind in zip(values, kinds, strict=True)]
    return [vary(v.value, axes[v.leaf]) if isinstance(v, Shard) else v.value for v in raised]


def _closed(jaxpr: Any) -> Callable[[Sequence[Value]], list[Value]]:
    return lambda values: evaluate(jaxpr.jaxpr, jaxpr.consts, list(values))


def _scalar(value: Value, equation: Any) -> Any:
    if isinstance(value, Shard):
        raise MixesPositions([value.leaf], equation.primitive.name, "chooses by this leaf for all others", equation)
    return value.value


def _cond(equation: Any, values: list[Value]) -> list[Value]:
    index, operands = _scalar(values[0], equation), values[1:]
    branches = [_closed(jaxpr) for jaxpr in equation.params["branches"]]
    kinds = functools.reduce(lambda a, b: _joined(a, b, equation), (_kinds(branch, operands) for branch in branches))
    axes = _axes([*operands, *kinds])

    def run(branch: Any, arrays: Sequence[Array]) -> list[Array]:
        return _cast(branch(_rewrapped(operands, arrays)), kinds, axes, equation)

    calls = [functools.partial(run, branch) for branch in branches]
    out = jax.lax.switch(index, calls, [v.value for v in operands]) if len(calls) > 1 else calls[0](
        [v.value for v in operands])  # fmt: skip
    return _rewrapped(kinds, out)


def _settled(step: Callable[[Sequence[Value]], list[Value]], carry: list[Value], equation: Any) -> list[Value]:
    """The kinds of a carry that one more round leaves as they are."""
    kinds = [v if isinstance(v, Shard) else dataclasses.replace(v) for v in carry]
    for _ in range(len(carry) + 1):
        after = _joined(kinds, _kinds(step, kinds), equation)
        if [type(v) for v in after] == [type(v) for v in kinds]:
            return kinds
        axes = _axes([*carry, *after])
        kinds = [
            Shard(vary(jnp.zeros(v.value.shape, v.value.dtype), axes[v.leaf]), v.leaf)
            if isinstance(v, Shard)
            else dataclasses.replace(v, value=w.value)
            for v, w in zip(after, kinds, strict=True)
        ]
    return kinds


def _while(equation: Any, values: list[Value]) -> list[Value]:
    tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    first, second, carry = values[:tests], values[tests : tests + bodies], values[tests + bodies :]
    test, body = _closed(equation.params["cond_jaxpr"]), _closed(equation.params["body_jaxpr"])
    kinds = _settled(lambda state: body([*second, *state]), carry, equation)
    axes = _axes([*second, *kinds])
    again = lambda arrays: _scalar(test([*first, *_rewrapped(kinds, arrays)])[0], equation)
    step = lambda arrays: _cast(body([*second, *_rewrapped(kinds, arrays)]), kinds, axes, equation)
    return _rewrapped(kinds, jax.lax.while_loop(again, step, _cast(carry, kinds, axes, equation)))


def _scan(equation: Any, values: list[Value]) -> list[Value]:
    params = equation.params
    consts, carries = params["num_consts"], params["num_carry"]
    fixed, carry, rows = values[:consts], values[consts : consts + carries], values[consts + carries :]
    for row in rows:
        if isinstance(row, Shard):
            raise MixesPositions([row.leaf], "scan", "goes through the rows of this leaf", equation)
    body = _closed(params["jaxpr"])
    slices = [plain(jnp.take(array(r), 0, axis=0), "a row") for r in rows]
    kinds = _settled(lambda state: body([*fixed, *state, *slices])[:carries], carry, equation)
    axes = _axes([*fixed, *kinds])

    def step(arrays: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        out = body([*fixed, *_rewrapped(kinds, arrays), *(plain(x, "a row") for x in xs)])
        for v in out[carries:]:
            if isinstance(v, Shard):
                raise MixesPositions([v.leaf], "scan", "stacks values of this leaf", equation)
        return _cast(out[:carries], kinds, axes, equation), [array(v) for v in out[carries:]]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = jax.lax.scan(step, _cast(carry, kinds, axes, equation), [array(r) for r in rows], **options)
    return [*_rewrapped(kinds, last), *(plain(y, "`scan`") for y in stacked)]


CONTROL: dict[str, Callable[[Any, list[Value]], list[Value]]] = {"cond": _cond, "while": _while, "scan": _scan}
