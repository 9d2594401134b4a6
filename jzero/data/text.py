"""From text to tokens: two tokenizers with the same four methods, and the build of an indexed file from text files."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from jzero.data.sentences import split_sentences
from jzero.data.writer import IndexedWriter, smallest_dtype
from jzero.errors import JzeroError

# What tokenizers of well-known models call their end of a document, most specific first.
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<eod>", "<|eod|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_BATCH_BYTES = 1 << 22  # text encoded at once: enough to occupy the threads of a tokenizer


class Tokenizer(Protocol):
    """What the rest of jzero asks of a tokenizer."""

    vocab_size: int  # every token is in [0, vocab_size)
    eod: int  # the token that ends a document

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] tokens of the text, without any special token."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text."""
        ...

    def decode(self, tokens: ArrayLike) -> str:
        """The text of the tokens [n]; the end-of-document token has none."""
        ...


class ByteTokenizer:
    """The 256 values of a byte, and 256 for the end of a document.

    Text is UTF-8. What cannot be encoded (half a surrogate pair) becomes "?"; bytes that are no UTF-8 and tokens
    outside of the vocabulary decode to U+FFFD, so that a half-trained model can always be printed.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist()
        [110, 195, 169]
        >>> tokenizer.decode([110, 195, 169, 256])
        'né'
    """

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], one token per byte of the UTF-8 text."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: ArrayLike) -> str:
        """The text of the tokens [n]."""
        tokens = np.asarray(tokens, np.int64).ravel()
        tokens = tokens[tokens != self.eod]
        # 0xFF is in no UTF-8 text, so it decodes to U+FFFD.
        return (
            np.where((tokens < 0) | (tokens > 255), 255, tokens).astype(np.uint8).tobytes().decode("utf-8", "replace")
        )


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Its own truncation, padding and special tokens are switched off: a document is encoded whole.

    Args:
        path: the `tokenizer.json`.

    Attributes:
        pieces: id of every token's text.
        special_ids: ids of the special tokens, which no text encodes to.

    Raises:
        JzeroError: no such file, not a tokenizer, or none of its tokens is known to end a document.
    """

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer as Backend  # costs an import that byte-level users need not pay

        path = os.path.expanduser(path)
        if not os.path.isfile(path):
            raise JzeroError(
                f'tokenizer {path}: expected "bytes" or the path of a tokenizer.json, found no such file; check the '
                f"path, or make one: jzero data tokenizer --input FILE... --vocab-size N --output {path}"
            )
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise JzeroError(
                f"tokenizer {path}: expected a tokenizer.json of the tokenizers library, found: {_line(error)}; save "
                "it with Tokenizer.save(path)"
            ) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pieces = vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = {token for token, content in added.items() if content.special}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have holes
        names = [name for name in _EOD_NAMES if name in vocabulary]
        if not names:
            raise JzeroError(
                f"tokenizer {path}: expected a token that ends a document, one of {', '.join(_EOD_NAMES)}, found none; "
                "add one to the tokenizer's special tokens"
            )
        self.eod = vocabulary[names[0]]

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] tokens of the text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, encoded in parallel."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [np.array(e.ids, np.int32) for e in self._backend.encode_batch(clean, add_special_tokens=False)]

    def decode(self, tokens: ArrayLike) -> str:
        """The text of the tokens [n]; special tokens and ids outside of the vocabulary have none."""
        tokens = np.asarray(tokens, np.int64).ravel()
        return self._backend.decode(tokens[(tokens >= 0) & (tokens < self.vocab_size)].tolist())


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        name: "bytes", or the path of a `tokenizer.json`.

    Raises:
        JzeroError: neither of the two.

    Example:
        >>> load_tokenizer("bytes").vocab_size
        257
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


@dataclass(frozen=True)
class Built:
    """What `build` wrote."""

    prefix: str  # path without .bin and .idx
    documents: int
    tokens: int  # with one end-of-document token per document, unless it was split into sentences
    empty: int  # documents without any token, which were left out
    dtype: str  # of the tokens in the file


def build(
    inputs: Sequence[str | Path],
    tokenizer: str | Path | Tokenizer,
    output: str | Path,
    *,
    key: str = "text",
    split: bool = False,
    progress: bool = True,
) -> Built:
    """Tokenize text into an indexed file, with an end-of-document token after each document; or into sentences.

    Args:
        inputs: files. Each line of a `.jsonl` file is an object whose `key` is a document (blank lines are skipped);
            any other file is one document. All are UTF-8.
        tokenizer: a name for `load_tokenizer`, or a tokenizer.
        output: path without `.bin` and `.idx`; ~ in paths is the user's home.
        key: where the text is in an object of a `.jsonl` file.
        split: a sequence per sentence (`jzero.data.sentences`), as BERT needs it, and no end-of-document tokens.
        progress: show a bar on standard error, if that is a terminal.

    Returns:
        What was written. Tokens are uint16 for vocabularies below 65,500, else int32.

    Raises:
        JzeroError: an input is missing or not what it should be (the message names file and line), there is no
            document, or the output cannot be written. Nothing is left behind.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("hello")
        >>> built = build([folder / "a.txt"], "bytes", folder / "a", progress=False)
        >>> built.documents, built.tokens
        (1, 6)
    """
    encoder = load_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    paths = input_files(inputs)
    output = _prefix(output)
    documents = tokens = empty = 0
    dtype = smallest_dtype(encoder.vocab_size)
    with _bar(sum(path.stat().st_size for path in paths), progress) as advance, IndexedWriter(output, dtype) as writer:
        for texts, size in _batches(read_documents(paths, key)):
            for ids, lengths in _encoded(encoder, texts, split):
                if not sum(lengths):
                    empty += 1
                    continue
                writer.add(ids, lengths)
                documents += 1
                tokens += len(ids)
            advance(size)
        if not documents:
            raise JzeroError(
                f"{', '.join(map(str, paths)) or 'inputs'}: expected at least one document with text, found none; give "
                "files that hold text"
            )
    return Built(output, documents, tokens, empty, dtype.name)


def _encoded(encoder: Tokenizer, texts: Sequence[str], split: bool) -> Iterator[tuple[np.ndarray, list[int]]]:
    """The tokens of each text and the lengths of its sequences; no sequence where there is no token."""
    if not split:
        for ids in encoder.encode_batch(texts):
            ids = np.append(ids, np.int32(encoder.eod)) if len(ids) else ids
            yield ids, [len(ids)]
        return
    sentences = [split_sentences(text) for text in texts]
    encoded = iter(encoder.encode_batch([sentence for document in sentences for sentence in document]))
    for document in sentences:
        parts = [ids for ids in (next(encoded) for _ in document) if len(ids)]
        yield np.concatenate([np.zeros(0, np.int32), *parts]), [len(ids) for ids in parts]


def _prefix(output: str | Path) -> str:
    """The output's path without ~, if it is one that names two files."""
    text = os.path.expanduser(output)
    name = os.path.basename(text)
    if name in ("", ".", ".."):
        raise JzeroError(
            f"output {output}: expected a path that ends in a name, found a folder; give {os.path.join(text, 'text')}"
        )
    if name.endswith((".bin", ".idx")):
        raise JzeroError(
            f"output {output}: expected a path without .bin and .idx, which are added, found {name[-4:]}; "
            f"give {text[:-4]}"
        )
    return text


def input_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The paths of text files, ~ as the user's home.

    Raises:
        JzeroError: one of them is no file.
    """
    paths = [Path(os.path.expanduser(path)) for path in inputs]
    for path in paths:
        if not path.is_file():
            found = "a folder" if path.is_dir() else "no such file"
            raise JzeroError(f"{path}: expected a text or .jsonl file, found {found}; give the paths of files")
    return paths


def read_documents(paths: Sequence[Path], key: str = "text") -> Iterator[tuple[str, int]]:
    """Each document's text and the bytes of input it took; see `build`."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, key)
        else:
            with _opened(path) as file:
                raw = file.read()
            yield _utf8(raw, path), len(raw)


def _json_lines(path: Path, key: str) -> Iterator[tuple[str, int]]:
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield _field(_utf8(raw, path, number), key, f"{path}, line {number}"), len(raw)


def _field(line: str, key: str, where: str) -> str:
    """The document in one line of a `.jsonl` file."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise JzeroError(
            f"{where}: expected one JSON object, found: {_line(error)}; correct or remove the line"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        found = f"the keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
        if isinstance(record, dict) and key in record:
            found = f"{type(record[key]).__name__} there"
        raise JzeroError(f'{where}: expected an object with a text under "{key}", found {found}; correct the line')
    text = record[key]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair at character {error.start}"
        raise JzeroError(f'{where}: expected valid Unicode under "{key}", found {found}; correct the line') from None
    return text


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise JzeroError(f"{path}: expected a readable file, found: {error.strerror}; check its permissions") from None


def _utf8(raw: bytes, path: Path, line: int | None = None) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1 if line is None else line
        raise JzeroError(
            f"{path}, line {line}: expected UTF-8, found byte 0x{raw[error.start]:02x}; convert the file, for example "
            "with `iconv -f latin1 -t utf-8`"
        ) from None


def _batches(documents: Iterator[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    """Documents grouped until they fill a batch."""
    texts, size = [], 0
    for text, count in documents:
        texts.append(text)
        size += count
        if size >= _BATCH_BYTES:
            yield texts, size
            texts, size = [], 0
    if texts:
        yield texts, size


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("tokenize"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task("tokenize", total=total)
        yield lambda size: progress.advance(task, size)


def _line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())
