"""Dropout whose masks depend on what is dropped, not on where or together with what it is computed.

A mask is a function of the key, the layer, the site in the layer, the *global* number of the sample, the position in
the sequence, and the feature (or head and key position). So no two data ranks ever share a mask, and splitting the
batch into other ranks or micro-batches, the sequence or the heads over ranks, changes nothing.

Letters: B batch, T sequence, D features, H heads, S key positions.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jzero.models.parameters import check_key


class Dropout(NamedTuple):
    """What masks are made from. Where a model takes one, None means: no dropout.

    A new step needs a new key, or sample numbers that count on over the whole run.

    Example:
        >>> Dropout(jax.random.key(0), jnp.arange(8, dtype=jnp.int32)).samples.shape  # rows 0 … 7 of the global batch
        (8,)
    """

    key: jax.Array  # [] typed threefry key, the same on every rank and for every micro-batch
    samples: jax.Array  # [B] int32, global number of each row's sample


class Site(enum.IntEnum):
    """Where a mask is applied; part of its key."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUT = 2
    MLP_OUT = 3


def drop_features(
    x: jax.Array,
    rate: float,
    dropout: Dropout | None,
    site: Site,
    layer: int | jax.Array,
    first_position: int | jax.Array = 0,
) -> jax.Array:
    """Zeroes features of x [B, T, D] at `rate` and scales the others up, so that the expectation stays.

    `first_position` is where x begins in the sequence that it is a part of.
    """
    if dropout is None or rate == 0:
        return x
    keys = _fold_range(_sample_keys(dropout, site, layer), x.shape[1], first_position)
    return _apply(x, keys, rate)


def drop_attention(
    p: jax.Array, rate: float, dropout: Dropout | None, layer: int | jax.Array, first_head: int | jax.Array = 0
) -> jax.Array:
    """The same for attention weights p [B, H, T, S]; a head's mask does not depend on how many heads there are.

    `first_head` is the number of the first of these heads among all of the layer's.
    """
    if dropout is None or rate == 0:
        return p
    heads = _fold_range(_sample_keys(dropout, Site.ATTENTION, layer), p.shape[1], first_head)
    return _apply(p, _fold_range(heads, p.shape[2]), rate)


def _sample_keys(dropout: Dropout, site: Site, layer: int | jax.Array) -> jax.Array:
    """[B] keys."""
    check_key(dropout.key, "dropout")
    key = jax.random.fold_in(jax.random.fold_in(dropout.key, int(site)), layer)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, dropout.samples)


def _fold_range(keys: jax.Array, count: int, first: int | jax.Array = 0) -> jax.Array:
    """[...] keys -> [..., count] keys, those of the numbers first … first + count - 1."""
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, first + jnp.arange(count))


def _apply(x: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
    """Drops along the last dimension of x [..., N], with one key per row [...]."""
    threshold = min(max(1, round(rate * 2**16)), 2**16 - 1)
    bits = jax.vmap(lambda key: _bits16(key, x.shape[-1]))(keys.reshape(-1)).reshape(x.shape)
    # Scaled by the rate as rounded to 16 bits, so that the expectation is exact.
    return jnp.where(bits >= threshold, x * (1 / (1 - threshold / 2**16)), 0).astype(x.dtype)


def _bits16(key: jax.Array, count: int) -> jax.Array:
    """Random uint16 [count], two from each word that threefry makes: half the work of `jax.random.bernoulli`."""
    words = jax.random.bits(key, ((count + 1) // 2,), jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:count]
