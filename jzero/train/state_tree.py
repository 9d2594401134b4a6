"""A state as checkpoints see it: nested dicts of named leaves, the shapes they must have, and a fingerprint of each.

Names are those of the tree's path: `params/blocks/mlp/up`, `fp8/scale`, `optimizer/opt/inner/0/mu/...`. Leaves without
elements are not saved; they are made again on the way back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

_ALONE = ("params", "fp8")


def named(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a tree that have elements, as ("a/b/0", leaf).

    Example:
        >>> [name for name, _ in named({"a": [jnp.ones(2), jnp.ones(0)]})]
        ['a/0']
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if math.prod(leaf.shape):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            yield f"{prefix}/{name}" if prefix and name else prefix or name, leaf


def nested(tree: Any) -> Any:
    """Any pytree as nested dicts with string keys, the form in which it is saved; a single leaf stays itself.

    Example:
        >>> sorted(nested({"a": [jnp.ones(1), jnp.ones(2)]})["a"])
        ['0', '1']
    """
    out: dict[str, Any] = {}
    for name, leaf in named(tree):
        if not name:
            return leaf
        *folders, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), folders, out)[last] = leaf
    return out


def join(abstract: Any, loaded: Any) -> Any:
    """The inverse of `nested`: the leaves of `loaded` in the structure of `abstract`."""
    leaves = dict(named(loaded))

    def pick(path: Any, leaf: Any) -> jax.Array:
        if math.prod(leaf.shape) == 0:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
        return leaves[jax.tree_util.keystr(path, simple=True, separator="/")]

    return jax.tree_util.tree_map_with_path(pick, abstract)


def split(state: Any) -> dict[str, Any]:
    """A state (a NamedTuple with a field `params`) as the trees of a checkpoint.

    These are "params" and, where there are scales, "fp8", which can be read alone, and "optimizer": all else.
    """
    fields = state._asdict()
    own = {name: nested(fields.pop(name, ())) for name in _ALONE}
    trees = {name: tree for name, tree in own.items() if tree}
    return {**trees, "optimizer": {name: nested(field) for name, field in fields.items()}}


def unsplit(abstract: Any, trees: Mapping[str, Any]) -> Any:
    """The inverse of `split`, in the structure of `abstract`."""
    found = {**trees["optimizer"], **{name: trees[name] for name in _ALONE if name in trees}}
    return abstract._replace(**{name: join(abstract._asdict()[name], tree) for name, tree in found.items()})


def first_difference(expected: Any, found: Any, prefix: str = "") -> tuple[str, str, str] | None:
    """The first leaf (in the order of `expected`) whose presence, shape or dtype differs: (path, expected, found).

    Example:
        >>> first_difference({"w": jnp.ones((2, 3))}, {"w": jnp.ones((2, 4))})
        ('w', 'float32[2,3]', 'float32[2,4]')
    """
    want = {name: _describe(leaf) for name, leaf in named(expected, prefix)}
    have = {name: _describe(leaf) for name, leaf in named(found, prefix)}
    for name in [*want, *(name for name in have if name not in want)]:
        if want.get(name) != have.get(name):
            return name, want.get(name, "no such leaf"), have.get(name, "no such leaf")
    return None


def _describe(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def fingerprints(tree: Any) -> dict[str, int]:
    """The sum of each leaf's bits, read as unsigned integers, modulo 2^32.

    Integer sums have no rounding, so the number depends on the values alone, not on the mesh or the order of addition.
    A fault in one element always changes it.

    Example:
        >>> fingerprints({"w": jnp.float32([1.0, 1.0])})  # 2 * 0x3f800000
        {'w': 2130706432}
    """
    names, leaves = zip(*named(tree), strict=True)
    shardings = [leaf.sharding for leaf in leaves if isinstance(leaf.sharding, NamedSharding)]
    everywhere = NamedSharding(shardings[0].mesh, PartitionSpec()) if shardings else None
    sums = np.asarray(jax.block_until_ready(_bit_sums(everywhere)(leaves)))
    return {name: int(bits) for name, bits in zip(names, sums, strict=True)}


@functools.cache
def _bit_sums(out_sharding: NamedSharding | None) -> Any:
    return jax.jit(lambda leaves: jnp.stack([_bit_sum(leaf) for leaf in leaves]), out_shardings=out_sharding)


def _bit_sum(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(bits, dtype=jnp.uint32)
