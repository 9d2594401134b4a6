"""Megatron's indexed token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where each sequence and document is.

Layout of `.idx`, little-endian, without padding (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`):

    bytes  9     magic "MMIDIDX" and two zero bytes
    uint64       version, 1
    uint8        code of the token dtype, 1 to 8 (`DTYPES`)
    uint64       S, the number of sequences
    uint64       D, the number of document boundaries (documents + 1)
    int32  [S]   tokens of each sequence
    int64  [S]   byte offset of each sequence in `.bin`
    int64  [D]   index of the first sequence of each document; the last entry is S
    int8   [S]   mode of each sequence (multimodal files only)

Every known writer lays the sequences one after another, so the byte offsets are the running sum of the lengths. The
reader insists on it: a corrupt index is found when it is opened, not after a week of training on garbage."""

import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jzero.errors import JzeroError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

_CHECK = 1 << 20  # sequences checked at once: bounds the temporary memory
_REMEDY = "build the pair of files again (`jzero data build`) or copy both again"


def index_path(prefix: str | Path) -> Path:
    """The path of the index of `prefix`: the prefix with `.idx` appended."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """The path of the tokens of `prefix`: the prefix with `.bin` appended."""
    return Path(f"{prefix}.bin")


class IndexedDataset(Sequence):
    """The sequences of one indexed file, memory-mapped: nothing is read before it is used.

    Args:
        prefix: path without `.bin` and `.idx`.

    Attributes:
        prefix: the path given, as a string.
        dtype: NumPy dtype of the tokens.
        sizes: int32 [S], tokens of each sequence.
        documents: int64 [D], first sequence of each document, and S at the end.
        modes: int8 [S], or None where the file has none.
        tokens: `dtype` [all tokens], every token of the file in order.

    Raises:
        JzeroError: a file is missing, truncated, or says what cannot be.

    Example:
        >>> import tempfile, os
        >>> from jzero.data import IndexedWriter
        >>> prefix = os.path.join(tempfile.mkdtemp(), "text")
        >>> with IndexedWriter(prefix, "uint16") as writer:
        ...     writer.add([5, 6, 7])
        >>> dataset = IndexedDataset(prefix)
        >>> len(dataset), dataset[0].tolist(), dataset.get(0, 1, 2).tolist()
        (1, [5, 6, 7], [6, 7])
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        index = _map(index_path(prefix), self.prefix)
        self.dtype, S, D, has_modes = _read_header(index_path(prefix), index)
        at = HEADER.size
        self.sizes = np.frombuffer(index, "<i4", S, at)
        self._pointers = np.frombuffer(index, "<i8", S, at + 4 * S)
        self.documents = np.frombuffer(index, "<i8", D, at + 12 * S)
        self.modes = np.frombuffer(index, "i1", S, at + 12 * S + 8 * D) if has_modes else None
        _check_documents(index_path(prefix), self.documents, S)
        total = _check_sequences(index_path(prefix), self.sizes, self._pointers, self.dtype.itemsize)
        data = _map(tokens_path(prefix), self.prefix)
        if len(data) != total * self.dtype.itemsize:
            raise JzeroError(
                f"{tokens_path(prefix)}: expected {total * self.dtype.itemsize} bytes ({total} {self.dtype.name} "
                f"tokens, as {index_path(prefix).name} says), found {len(data)}; the file is truncated or belongs to "
                f"another index: {_REMEDY}"
            )
        self.tokens = np.frombuffer(data, self.dtype)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sizes)

    def __getitem__(self, i: int) -> np.ndarray:  # type: ignore[override]  no slices
        """The tokens of sequence `i` (negative: from the end), a read-only view."""
        return self.get(i)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Part of one sequence.

        Args:
            i: sequence; negative counts from the end.
            offset: first token wanted, 0 to the length of the sequence.
            length: tokens wanted; None is all that follow.

        Returns:
            `dtype` [length], a read-only view of the file.

        Raises:
            IndexError: the sequence or the part of it does not exist.
        """
        i = range(len(self))[i]
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"{self.prefix}: sequence {i} has {size} tokens, asked for [{offset}, {offset + length})")
        begin = int(self._pointers[i]) // self.dtype.itemsize + offset
        return self.tokens[begin : begin + length]

    @cached_property
    def document_starts(self) -> np.ndarray:
        """int64 [D]: where each document begins in `tokens`; the last entry is the number of all tokens."""
        starts = np.append(self._pointers, self.tokens.nbytes)[self.documents]
        return starts // self.dtype.itemsize

    def __reduce__(self):
        """Pickled as its path, so that a worker process maps the file itself instead of receiving a copy of it."""
        return IndexedDataset, (self.prefix,)


def _map(path: Path, prefix: str) -> np.ndarray:
    """uint8 [size of the file], memory-mapped."""
    try:
        # An empty file cannot be mapped.
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise JzeroError(
            f"{path}: expected a readable file, one of the pair {prefix}.idx and {prefix}.bin, found: "
            f"{error.strerror}; give the path without .idx or .bin, or make the files with `jzero data build`"
        ) from None


def _read_header(path: Path, index: np.ndarray) -> tuple[np.dtype, int, int, bool]:
    """Dtype, number of sequences, number of boundaries, whether there are modes; checked against the file's size."""
    if len(index) < HEADER.size:
        raise _corrupt(path, f"a header of {HEADER.size} bytes", f"a file of {len(index)}")
    magic, version, code, S, D = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _corrupt(path, f"the magic bytes {MAGIC!r} (data_impl mmap)", f"{magic!r}")
    if version != VERSION:
        raise _corrupt(path, f"version {VERSION}", f"{version}")
    if code not in DTYPES:
        raise _corrupt(path, f"a token dtype code in 1..{max(DTYPES)}", f"{code}")
    plain = HEADER.size + 12 * S + 8 * D
    if len(index) not in (plain, plain + S):
        raise _corrupt(
            path,
            f"{plain} bytes ({plain + S} with modes) for {S} sequences and {D} boundaries",
            f"a file of {len(index)}",
        )
    return DTYPES[code], S, D, S > 0 and len(index) == plain + S


def _check_documents(path: Path, documents: np.ndarray, S: int):
    if len(documents) == 0 or documents[0] != 0:
        found = int(documents[0]) if len(documents) else "none"
        raise _corrupt(path, "a first document boundary of 0", f"{found}")
    if documents[-1] != S:
        raise _corrupt(path, f"a last document boundary of {S}, the number of sequences", f"{documents[-1]}")
    backwards = np.flatnonzero(documents[1:] < documents[:-1])
    if len(backwards):
        at = int(backwards[0]) + 1
        raise _corrupt(path, f"boundary {at} of a document to be at least {documents[at - 1]}", f"{documents[at]}")


def _check_sequences(path: Path, sizes: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Check that every sequence begins where the one before it ends; returns the number of all tokens."""
    total = 0
    for first in range(0, len(sizes), _CHECK):
        size = sizes[first : first + _CHECK].astype(np.int64)
        negative = np.flatnonzero(size < 0)
        if len(negative):
            at = int(negative[0])
            raise _corrupt(path, f"a length of at least 0 for sequence {first + at}", f"{size[at]}")
        expected = (total + np.cumsum(size) - size) * itemsize
        wrong = np.flatnonzero(pointers[first : first + _CHECK] != expected)
        if len(wrong):
            at = int(wrong[0])
            raise _corrupt(path, f"sequence {first + at} to begin at byte {expected[at]}", f"{pointers[first + at]}")
        total += int(size.sum())
    return total


def _corrupt(path: Path, expected: str, found: str) -> JzeroError:
    return JzeroError(f"{path}: expected {expected}, found {found}; the index is corrupt or truncated: {_REMEDY}")
