"""The built-in corpus: the source text of the Python standard library, in bytes or words. No download."""

import hashlib
import os
import platform
import shutil
import sysconfig
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np

from jzero.data.indexed import IndexedDataset
from jzero.data.text import ByteTokenizer, FileTokenizer
from jzero.data.tokenizer import learn, save
from jzero.data.writer import IndexedWriter
from jzero.errors import JzeroError

_WORDS = 2048  # entries of the tokenizer of words
_RECIPE = b"1"  # part of the key: raise it when the choice or the order of files changes
# Tests repeat themselves, encodings and pydoc_data are generated tables; the rest is other people's code.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


def stdlib_corpus(cache_dir: str | Path | None = None) -> str:
    """The path of the built-in corpus, built on the first call (about a second) and found in the cache from then on.

    One document per `.py` file of the standard library without its tests and generated tables: its bytes, then 256, the
    end of a document of `ByteTokenizer`. The order of documents is fixed and mixes all folders, so that contiguous
    splits are alike. The folder in the cache is named after the Python version and a hash of the content, and appears
    in one rename: processes that build at the same time do not see each other.

    Args:
        cache_dir: where to keep it; None is `$XDG_CACHE_HOME/jzero`, or `~/.cache/jzero`.

    Returns:
        The path without `.bin` and `.idx`, for `IndexedDataset`.

    Raises:
        JzeroError: this interpreter has no source text, or the cache cannot be written.

    Example:
        >>> import tempfile
        >>> from jzero.data import IndexedDataset
        >>> bytes(IndexedDataset(stdlib_corpus(tempfile.mkdtemp())).tokens[:200].astype("u1")).isascii()
        True
    """
    return _cached(cache_dir, "stdlib", _bytes)


def stdlib_sentences(cache_dir: str | Path | None = None) -> str:
    """The built-in corpus for a BERT, as `stdlib_corpus`: a sequence per line, in WordPiece tokens, none between files.

    Beside the two files stands `tokenizer.json`: 2,048 entries, trained on all of it (about ten seconds altogether).

    Example:
        >>> import tempfile, os
        >>> from jzero.data import FileTokenizer, IndexedDataset
        >>> prefix = stdlib_sentences(tempfile.mkdtemp())
        >>> tokenizer = FileTokenizer(os.path.join(os.path.dirname(prefix), "tokenizer.json"))
        >>> tokenizer.vocab_size, int(IndexedDataset(prefix).tokens.max()) < 2048
        (2048, True)
    """
    return _cached(cache_dir, "stdlib-words", _words, version("tokenizers"))


def stdlib_tokenizer(cache_dir: str | Path | None = None) -> str:
    """The path of the `tokenizer.json` of `stdlib_sentences`."""
    return str(Path(stdlib_sentences(cache_dir)).with_name("tokenizer.json"))


def _cached(
    cache_dir: str | Path | None, name: str, fill: Callable[[list[tuple[str, bytes]], Path], None], *versions: str
) -> str:
    """The prefix of the indexed file that `fill(sources, folder)` writes, from the cache if it is there.

    Args:
        cache_dir: as for `stdlib_corpus`.
        name: of the folder; the version of Python, a hash of the sources and `versions` follow it.
        fill: writes "text.bin" and "text.idx", and whatever else belongs to them.
        versions: of what else decides on the content.
    """
    sources = list(_sources(Path(sysconfig.get_paths()["stdlib"])))
    if not sources:
        raise JzeroError(
            f"built-in corpus: expected the source text of the standard library in {sysconfig.get_paths()['stdlib']}, "
            "found none; set model.data.data_prefix to an indexed file of your own (`jzero data build`)"
        )
    folder = _cache(cache_dir) / "-".join([name, platform.python_version(), _digest(sources), *versions])
    if not _is_complete(folder / "text"):
        _build(folder, lambda own: fill(sources, own))
    return str(folder / "text")


def _sources(root: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file, in an order that depends on the names only and has nothing to do with folders."""
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        content = (root / name).read_bytes()
        # _sysconfigdata… is a generated table that names the machine's folders.
        if content and not name.startswith("_sysconfigdata"):
            yield name, content


def _digest(sources: list[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256(_RECIPE)
    for name, content in sources:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def _cache(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jzero"


def _is_complete(prefix: Path) -> bool:
    try:
        IndexedDataset(prefix)
    except JzeroError:
        return False
    return True


def _bytes(sources: list[tuple[str, bytes]], folder: Path):
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for _, content in sources:
            writer.add(np.append(np.frombuffer(content, np.uint8), np.uint16(ByteTokenizer.eod)))


def _words(sources: list[tuple[str, bytes]], folder: Path):
    texts = [content.decode("utf-8", "replace") for _, content in sources]
    save(learn(texts, vocab_size=_WORDS, kind="wordpiece"), folder / "tokenizer.json")
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    with IndexedWriter(folder / "text", np.uint16) as writer:
        for text in texts:
            lines = tokenizer.encode_batch([line for line in text.splitlines() if line.strip()])
            writer.add(np.concatenate([np.zeros(0, np.int32), *lines]), [len(ids) for ids in lines])


def _build(folder: Path, fill: Callable[[Path], None]):
    """Fill a folder of its own, then move that to its place; whoever comes second throws his away."""
    own = folder.with_name(f".{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        fill(own)
        _publish(own, folder)
    except (JzeroError, OSError) as error:
        cause = error.__context__ if isinstance(error, JzeroError) else error
        raise JzeroError(
            f"{folder}: expected a place to keep the built-in corpus, found: "
            f"{getattr(cause, 'strerror', None) or error}; "
            "set model.data.cache_dir or XDG_CACHE_HOME to a folder that can be written"
        ) from None
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _publish(own: Path, folder: Path):
    try:
        os.rename(own, folder)
    except OSError:
        if _is_complete(folder / "text"):
            return
        if not folder.is_dir():
            raise
        # Something damaged is in the way. It is moved aside, not emptied: it may be open elsewhere.
        damaged = own.with_suffix(".old")
        os.rename(folder, damaged)
        os.rename(own, folder)
        shutil.rmtree(damaged, ignore_errors=True)
