"""Layers of two kinds in one loop: which kind a layer is depends on the stage, so a traced number decides.

    forward    one of two branches; each leaves what its own backward pass needs, in arrays that both share as far as
               shapes and types are the same (all but a few small ones are)
    backward   the same branch, which takes its own out of them

Both branches are compiled. On a GPU the host waits for the number: once for each layer and direction, as it does for
what a stage does in a tick. Where all ranks run the same layers, scans of one kind each (`stack.Pieces`) need neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jzero.optim import collectives
from jzero.parallel.stack import take_apart

Layer = Callable[[Any, Array, Any, Array, Any], Array]
"""(A layer's weights, x [B, T, D], batch, its number, FP8 slots) -> x."""


class Kinds(NamedTuple):
    """A layer of either kind."""

    block: Layer
    other: Layer | None = None  # of layers before `start` and from `stop` on; None: all are of one kind
    start: int = 0
    stop: int = 0

    def __call__(self, weights: Any, x: Array, batch: Any, number: Array, slots: Any) -> Array:
        """The layer's output."""
        operands = weights, x, batch, number, slots
        return self.block(*operands) if self.other is None else self._pick(number, self.other, self.block, *operands)

    def vjp(
        self, weights: Any, x: Array, batch: Any, number: Array, slots: Any
    ) -> tuple[Array, list[Array], Callable[..., Any]]:
        """The output, and the layer's VJP taken apart as by `take_apart`; known: weights, batch, number, slots."""
        operands = weights, x, batch, number, slots
        if self.other is None:
            return _vjp(self.block, *operands)
        blocks, probed = (self.other, self.block), []
        for block in blocks:
            rebuild: list[Callable] = []  # filled while the layer is traced

            def run(*operands: Any, block: Layer = block, rebuild: list[Callable] = rebuild) -> list[Array]:
                _, residuals, put_together = _vjp(block, *operands)
                rebuild.append(put_together)
                return residuals

            probed.append((jax.eval_shape(run, *operands), rebuild[0]))
        types, places = shared([residuals for residuals, _ in probed])

        def forward(block: Layer, own: list[int], *operands: Any) -> tuple[Array, list[Array]]:
            y, residuals, _ = _vjp(block, *operands)
            found = dict(zip(own, residuals, strict=True))
            return y, [found[i] if i in found else zeros(t) for i, t in enumerate(types)]

        def backward(known: Any, values: Sequence[Array]) -> Callable[[Array], Any]:
            def one(kind: int, known: Any, values: Sequence[Array], dy: Array) -> Any:
                return probed[kind][1](known, [values[i] for i in places[kind]])(dy)

            branches = [lambda *given, kind=kind: one(kind, *given) for kind in range(2)]
            return lambda dy: self._pick(known[2], *branches, known, values, dy)

        branches = [
            lambda *given, block=block, own=own: forward(block, own, *given)
            for block, own in zip(blocks, places, strict=True)
        ]
        return *self._pick(number, *branches, *operands), backward

    def _pick(self, number: Array, other: Callable[..., Any], block: Callable[..., Any], *operands: Any) -> Any:
        return jax.lax.cond((number < self.start) | (number >= self.stop), other, block, *operands)


def shared(kinds: Sequence[Sequence[Any]]) -> tuple[list[Any], list[list[int]]]:
    """Types in which each kind's values have a place of their own, few of them; and the places of each kind.

    Example:
        >>> a, b = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
        >>> types, places = shared([[a, a], [b, a]])
        >>> len(types), places
        (3, [[0, 1], [2, 0]])
    """
    types: list[Any] = []
    places: list[list[int]] = []
    alike = lambda x: (x.shape, x.dtype, x.manual_axis_type)
    for kind in kinds:
        free, own = list(range(len(types))), []
        for value in kind:
            place = next((i for i in free if alike(types[i]) == alike(value)), None)
            if place is None:
                place = len(types)
                types.append(value)
            else:
                free.remove(place)
            own.append(place)
        places.append(own)
    return types, places


def _vjp(
    block: Layer, weights: Any, x: Array, batch: Any, number: Array, slots: Any
) -> tuple[Array, list[Array], Callable[..., Any]]:
    y, vjp = jax.vjp(lambda w, x, slots: block(w, x, batch, number, slots), weights, x, slots)
    return y, *take_apart(vjp, (weights, batch, number, slots))


def zeros(types: Any, lead: tuple[int, ...] = ()) -> Any:
    """Zeros of the types of `jax.eval_shape`, which vary over the same axes; `lead` in front of each shape."""

    def one(x: Any) -> Array:
        axes = tuple(sorted(x.manual_axis_type.varying)) if x.manual_axis_type else ()
        empty = jnp.zeros((*lead, *x.shape), x.dtype)
        return collectives.vary(empty, axes) if axes else empty

    return jax.tree.map(one, types)
