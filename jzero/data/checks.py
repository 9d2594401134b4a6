"""What every kind of sample refuses: files without integer tokens, tokens that a vocabulary lacks, numbers below 0."""

from typing import SupportsIndex

import numpy as np

from jzero.data.indexed import IndexedDataset
from jzero.errors import JzeroError

_LOOKED_AT = 1 << 26  # tokens of a file that are compared with the vocabulary when it is opened (0.1 s)
_WINDOWS = 64  # in which they lie, where the file has more


def check_source(file: IndexedDataset, seq_length: int, seed: int, least: int) -> None:
    """Refuse a file and options that no samples can be made of.

    Args:
        file: must have integer tokens.
        seq_length: T, at least `least`.
        seed: at least 0.
        least: tokens of the shortest sample.

    Raises:
        JzeroError: names the file or the options.
    """
    if seq_length < least or seed < 0:
        raise JzeroError(
            f"data: expected a sequence length of at least {least} and a seed of at least 0, found {seq_length} and "
            f"{seed}; correct model.encoder_seq_length or model.seed"
        )
    if file.dtype.kind not in "iu":
        raise JzeroError(
            f"{file.prefix}.idx: expected integer tokens, found {file.dtype.name}; build it with integer tokens"
        )


def sample_number(k: SupportsIndex) -> int:
    """The number of a sample.

    Raises:
        IndexError: it is negative.
    """
    number = k.__index__()
    if number < 0:
        raise IndexError(f"sample {number}: samples are counted from 0 and have no end")
    return number


def first_foreign(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Where the first token outside of 0..vocab_size - 1 stands, if there is one.

    Example:
        >>> first_foreign(np.array([1, 2, 9]), 9), first_foreign(np.array([1, 2]), 9)
        (2, None)
    """
    if not len(tokens) or (tokens.max() < vocab_size and tokens.min() >= 0):
        return None
    return int(np.flatnonzero((tokens >= vocab_size) | (tokens < 0))[0])


def foreign_token(file: IndexedDataset, place: int, vocab_size: int) -> JzeroError:
    """The error that token number `place` of a file is outside of the vocabulary."""
    document = int(np.searchsorted(file.document_starts, place, side="right")) - 1
    return JzeroError(
        f"{file.prefix}.bin: expected tokens in 0..{vocab_size - 1} (a vocabulary of {vocab_size}), found "
        f"{file.tokens[place]} at position {place} (document {document}); use the tokenizer that the file was built "
        "with"
    )


def check_vocabulary(file: IndexedDataset, vocab_size: int, limit: int = _LOOKED_AT) -> None:
    """Looks for tokens outside of the vocabulary, in the whole of a small file, in windows all over a large one.

    What is not looked at here is checked when it is read; but a file of another tokenizer shows here, before a run has
    begun.

    Args:
        file: integer tokens; others are refused by `check_source`.
        vocab_size: every token must be in 0..vocab_size - 1.
        limit: tokens looked at.

    Raises:
        JzeroError: names the file, the token and its place.
    """
    if file.dtype.kind not in "iu" or (file.dtype.kind == "u" and np.iinfo(file.dtype).max < vocab_size):
        return
    size = len(file.tokens)
    step, length = (size // _WINDOWS, limit // _WINDOWS) if size > limit else (max(size, 1), size)
    for begin in range(0, size, step):
        at = first_foreign(file.tokens[begin : begin + length], vocab_size)
        if at is not None:
            raise foreign_token(file, begin + at, vocab_size)
