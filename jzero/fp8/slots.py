"""What a stack of layers hands to its FP8 products beside weights and activations, and what comes back.

    scales    what each tensor is multiplied by before the cast     as cotangent: the amaxes, joined by their maximum
    shares    anything; there where losses are to be counted        as cotangent: what the casts lost, joined by sums

One layer's slots go to its block as an argument of their own. The cotangents of a layer that runs for several
micro-batches are joined by `record`: autodiff would sum them.

Letters: L layers, P products of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Slots(NamedTuple):
    """Of all layers [L, P, ...], of one [P, ...], or of one product; None where nothing is wanted.

    Example:
        >>> Slots(scales=jnp.ones((4, 3))).of(0).scales.shape
        (3,)
    """

    scales: Any = None  # float32 [..., 3]: of input, weight and gradient
    shares: Any = None  # float32 [..., 3, 2]: saturated, flushed to zero

    def of(self, product: int) -> Slots:
        """One product's, of one layer's."""
        return Slots(*(None if x is None else x[product] for x in self))


def record(seen: Slots | None, i: Any, found: Slots | None) -> Slots | None:
    """What was seen, with what layer i's backward pass found in one more micro-batch.

    Args:
        seen: of all layers so far; None without FP8.
        i: number of the layer.
        found: the cotangent of the layer's slots.

    Example:
        >>> seen = Slots(jnp.float32([[[1, 2, 3]]]))
        >>> record(seen, 0, Slots(jnp.float32([[3, 1, 3]]))).scales[0, 0]
        Array([3., 2., 3.], dtype=float32)
    """
    if seen is None or found is None:
        return seen

    def put(join: Callable[[Array, Array], Array], total: Array | None, new: Array | None) -> Array | None:
        if total is None or new is None:
            return total
        old = jax.lax.dynamic_index_in_dim(total, i, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, join(old, new), i, 0)

    return Slots(put(jnp.maximum, seen.scales, found.scales), put(jnp.add, seen.shares, found.shares))
