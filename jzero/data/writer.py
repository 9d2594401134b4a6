"""Writing Megatron's indexed files: both files appear complete, or not at all."""

import os
import uuid
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jzero.data.indexed import DTYPES, HEADER, MAGIC, VERSION, index_path, tokens_path
from jzero.errors import JzeroError
from jzero.folders import missing_folders, remove_empty

_MAX_SIZE = np.iinfo(np.int32).max


class IndexedWriter:
    """Writes documents to `PREFIX.bin` and `PREFIX.idx`; a context manager.

    The files are written under temporary names beside the final ones and renamed when the block ends without an error.
    After an error (a full disk, Ctrl-C, an exception of the caller) the temporary files and the folders made for them
    are removed. An older pair of files at the prefix survives until then; its index goes first and the new one comes
    last, so there is no moment at which an index stands beside tokens of another.

    Args:
        prefix: path without `.bin` and `.idx`; missing folders are made.
        dtype: one of Megatron's eight token dtypes; see `smallest_dtype`.
        multimodal: also store a mode (int8) for each sequence.

    Raises:
        JzeroError: a file cannot be written, or a token does not fit `dtype`.

    Example:
        >>> import tempfile, os
        >>> prefix = os.path.join(tempfile.mkdtemp(), "text")
        >>> with IndexedWriter(prefix, "int32") as writer:
        ...     writer.add([1, 2, 3])
        ...     writer.add([4, 5, 6, 7], lengths=[3, 1])
        >>> sorted(os.listdir(os.path.dirname(prefix)))
        ['text.bin', 'text.idx']
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, multimodal: bool = False):
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.multimodal = multimodal
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            names = ", ".join(known.name for known in DTYPES.values())
            raise JzeroError(f"token dtype: expected one of {names}, found {self.dtype.name}; choose one of them")
        self._code = codes[0]
        self._sizes = array("i")
        self._modes = array("b")
        self._documents = array("q", [0])
        self._file = None
        self._made: list[Path] = []

    def __enter__(self) -> "IndexedWriter":
        final = tokens_path(self.prefix)
        unique = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._temporary = {
            path: path.with_name(f".{path.name}.{unique}.tmp") for path in (final, index_path(self.prefix))
        }
        try:
            self._made = missing_folders(final.parent)
            final.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._temporary[final], "xb")
        except OSError as error:
            self._discard()
            raise self._unwritable(error) from None
        return self

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._unwritable(failure) from None
        finally:
            self._discard()

    def add(self, tokens: ArrayLike, lengths: Iterable[int] | None = None, modes: Iterable[int] | None = None):
        """Append one document.

        Args:
            tokens: [n] integers (any numbers for a float dtype).
            lengths: how the tokens divide into sequences; None is one sequence.
            modes: the mode of each sequence (multimodal only); None is 0 for all.

        Raises:
            JzeroError: a token does not fit the dtype, or the file cannot be written.
            ValueError: lengths or modes do not fit the tokens.
        """
        if self._file is None:
            raise ValueError("IndexedWriter: expected add() inside of its `with` block, found it outside")
        document = self._convert(np.asarray(tokens).ravel())
        lengths = [document.size] if lengths is None else list(lengths)
        modes = [0] * len(lengths) if modes is None else list(modes)
        if sum(lengths) != document.size or len(modes) != len(lengths) or min(lengths, default=0) < 0:
            raise ValueError(
                f"lengths, modes: expected {document.size} tokens altogether, and a mode per sequence, found {lengths} "
                f"and {modes}"
            )
        if max(lengths, default=0) > _MAX_SIZE:
            raise JzeroError(
                f"{tokens_path(self.prefix)}: expected sequences of at most {_MAX_SIZE} tokens, found {max(lengths)}; "
                "split the document"
            )
        try:
            self._file.write(document.tobytes())
        except OSError as error:
            raise self._unwritable(error) from None
        self._sizes.extend(lengths)
        self._modes.extend(modes)
        self._documents.append(len(self._sizes))

    def _convert(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.size == 0 or tokens.dtype == self.dtype or self.dtype.kind == "f":
            return tokens.astype(self.dtype)
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"tokens: expected integers for a file of {self.dtype.name}, found {tokens.dtype.name}")
        limits = np.iinfo(self.dtype.str)
        low, high = int(tokens.min()), int(tokens.max())
        if low < limits.min or high > limits.max:
            raise JzeroError(
                f"{tokens_path(self.prefix)}: expected tokens in {limits.min}..{limits.max} ({self.dtype.name}), found "
                f"{low if low < limits.min else high}; write the file with a wider dtype"
            )
        return tokens.astype(self.dtype)

    def _finish(self):
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.zeros(0, np.int32)
        ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        documents = np.frombuffer(self._documents, np.int64)
        _close(self._file)
        self._file = None
        with open(self._temporary[index_path(self.prefix)], "xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(documents)))
            file.write(sizes.astype("<i4").tobytes())
            file.write((ends - sizes.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            file.write(documents.astype("<i8").tobytes())
            if self.multimodal:
                file.write(self._modes.tobytes())
            _close(file)
        index_path(self.prefix).unlink(missing_ok=True)
        for final in (tokens_path(self.prefix), index_path(self.prefix)):
            os.replace(self._temporary[final], final)
        self._made = []

    def _discard(self):
        """Remove whatever is temporary; nothing after a `_finish` that went well."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # a full disk refuses the last buffer again; the file goes anyway
                file.close()
        for path in self._temporary.values():
            with suppress(OSError):
                path.unlink()
        remove_empty(self._made)
        self._made = []

    def _unwritable(self, error: OSError) -> JzeroError:
        return JzeroError(
            f"{tokens_path(self.prefix)}: expected to write here, found: {error.strerror or error}; free some space or "
            "choose another place (nothing was left behind)"
        )


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice of the dtype for a vocabulary: uint16 below 65,500 tokens, int32 from there on.

    Example:
        >>> smallest_dtype(257).name, smallest_dtype(128_000).name
        ('uint16', 'int32')
    """
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def _close(file):
    """Flush to the disk first: a full disk may show only there."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
