"""Whether a checkpoint is of the model that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jzero.errors import JzeroError
from jzero.train.state_tree import first_difference

Record = dict[str, Any]

# Keys of the model's configuration that decide what its numbers mean. (Others may change between two parts of a run.)
_MEANING = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "activation", "bias", "transformer_block_type", "position_embedding_type",
    "rotary_base", "rotary_percentage", "share_embeddings_and_output_weights", "vocab_size",
    "library",
}  # fmt: skip
# Keys that decide shapes besides.
_SHAPES = {"encoder_seq_length", "max_position_embeddings", "make_vocab_size_divisible_by"} | {
    "fp8", "fp8_params", "fp8_recipe", "fp8_amax_history_len"
}  # fmt: skip


def check_same(folder: Path, expected: Any, found: Any, record: Record, now: Record | None) -> None:
    """Raises where a checkpoint is of another model: a leaf differs, or a key that decides what the leaves mean.

    Args:
        folder: of the checkpoint, for the message.
        expected: the trees "params" and, if wanted, "fp8" and "optimizer", as `jax.ShapeDtypeStruct`s.
        found: the same trees as they were saved.
        record: what was saved beside them; its "model" is the configuration then.
        now: the configuration of the model now; None: not compared.

    Raises:
        JzeroError: names the first leaf or key that differs, with what was expected and found.
    """
    saved = record.get("model") or {}
    changed = {key: key.rpartition(".")[2] for key in changed_keys(saved, now or saved)}
    keys = [key for key, name in changed.items() if name in _MEANING]
    shown = [key for key, name in changed.items() if name in _MEANING | _SHAPES]
    hint = ", ".join(f"model.{key} was {_at(saved, key)}, is {_at(now, key)}" for key in shown[:3])
    difference = None
    for name in sorted(expected, reverse=True):  # the parameters first
        difference = difference or first_difference(expected[name], found.get(name, {}), name)
    if difference is None and keys:
        difference = (f"model.{keys[0]}", str(_at(now, keys[0])), str(_at(saved, keys[0])))
        hint = "the same shapes mean another model"
    if difference:
        path, want, have = difference
        why = f" ({hint})" if hint else ""
        only_fp8 = not keys and any(name.startswith("fp8") for name in changed.values())
        start = f", from these weights by model.restore_from_path={folder.parent.parent}" if only_fp8 else ""
        raise JzeroError(
            f"checkpoint {folder} is of another model: {path}: expected {want}, found {have}{why}; "
            f"restore the old settings or train under another exp_manager.name{start}"
        )


def same_meaning(record: Record, now: Record | None) -> bool:
    """Whether a checkpoint is of the model that is asked for, as far as the configurations tell."""
    saved = record.get("model") or {}
    return not any(key.rpartition(".")[2] in _MEANING for key in changed_keys(saved, now or saved))


def changed_keys(saved: Record, now: Record) -> list[str]:
    """The dotted keys whose values differ between two nested records.

    Example:
        >>> changed_keys({"optim": {"lr": 1e-3}, "seed": 1}, {"optim": {"lr": 2e-3}, "seed": 1})
        ['optim.lr']
    """
    before, after = dict(_flat(saved)), dict(_flat(now))
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _at(record: Record | None, key: str) -> Any:
    return dict(_flat(record or {})).get(key)
