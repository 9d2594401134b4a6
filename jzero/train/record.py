"""What is saved beside the trees of a checkpoint, sealed, so that it can be told whether it is what was written.

A record is JSON: the step, the position in the data, the model's configuration, the shape and type of each leaf and a
fingerprint of its bits, and the checksum of all that. What a checkpoint *is* stands here and nowhere else: whatever
else of it then cannot be read, or reads differently, is damage, never another model.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from jzero.train.state_tree import fingerprints, named

Record = dict[str, Any]


class UnreadableError(Exception):
    """A checkpoint whose files cannot be read back as they were written."""


def seal(record: Record, trees: Any) -> Record:
    """A record with the leaves of `trees` described, and its checksum.

    Args:
        record: JSON values.
        trees: nested dicts of arrays.

    Example:
        >>> sealed = seal({"step": 3}, {"params": {"w": jnp.ones(2)}})
        >>> sealed["leaves"], unseal(sealed, 3) == sealed
        ({'params/w': ['float32', [2]]}, True)
    """
    leaves = {name: [jnp.dtype(leaf.dtype).name, list(leaf.shape)] for name, leaf in named(trees)}
    whole = json.loads(json.dumps({**record, "leaves": leaves, "fingerprints": fingerprints(trees)}))
    return {**whole, "checksum": _checksum(whole)}


def unseal(record: Any, step: int) -> Record:
    """The record as it was sealed.

    Raises:
        UnreadableError: it is missing, is not what was written, or is that of another step.
    """
    if not isinstance(record, dict) or "checksum" not in record:
        raise UnreadableError("its record is missing")
    if record["checksum"] != _checksum({key: value for key, value in record.items() if key != "checksum"}):
        raise UnreadableError("its record is not what was written")
    if record.get("step") != step:
        raise UnreadableError(f"its record is of step {record.get('step')}")
    return record


def leaves(record: Record) -> Record:
    """The trees that a record describes: nested dicts of `jax.ShapeDtypeStruct`s.

    Example:
        >>> leaves({"leaves": {"params/w": ["bfloat16", [2]]}})
        {'params': {'w': ShapeDtypeStruct(shape=(2,), dtype=bfloat16)}}
    """
    trees: Record = {}
    for name, (dtype, shape) in record["leaves"].items():
        *folders, last = name.split("/")
        node = trees
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    return trees


def compare_bits(record: Record, trees: Any) -> None:
    """Raises UnreadableError where a leaf of `trees` has other bits than were saved."""
    for name, bits in fingerprints(trees).items():
        if record["fingerprints"].get(name) != bits:
            raise UnreadableError(f"other bits than were saved in {name}")


def _checksum(record: Record) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
