"""Training a tokenizer on one's own text: WordPiece (BERT's) or byte-level BPE (GPT-2's), by the tokenizers library."""

import os
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jzero.data.text import FileTokenizer, input_files, read_documents
from jzero.errors import JzeroError
from jzero.folders import missing_folders, remove_empty

BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The special tokens of both kinds, ids from 0 in this order; BPE has no use for [UNK]."""
KINDS = ("wordpiece", "bpe")
_END = "<|endoftext|>"


def train_tokenizer(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    kind: str = "wordpiece",
    lowercase: bool = False,
    key: str = "text",
) -> FileTokenizer:
    """Trains a tokenizer on text files and writes its `tokenizer.json`. No download; the same input, the same file.

    Args:
        inputs: files, as for `jzero.data.build`.
        output: the file to write; ~ is the user's home.
        vocab_size: entries of the vocabulary, special tokens included; fewer if the text has not so many.
        kind: "wordpiece" or "bpe" (of bytes, so that every text has tokens).
        lowercase: make text lower case and drop accents (WordPiece alone).
        key: where the text is in an object of a `.jsonl` file.

    Returns:
        The tokenizer.

    Raises:
        JzeroError: an argument is out of range, an input is missing or not what it should be, the characters of the
            text alone are more than `vocab_size`, or the file cannot be written.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("the cat and the hat and the mat " * 20)
        >>> tokenizer = train_tokenizer([folder / "a.txt"], folder / "tokenizer.json", vocab_size=60)
        >>> tokenizer.decode(tokenizer.encode("the hat and the cat"))
        'the hat and the cat'
    """
    paths, output = input_files(inputs), os.path.expanduser(output)
    if os.path.isdir(output) or not os.path.basename(output):
        raise JzeroError(
            f"output {output}: expected the path of a file, found a folder; give for example tokenizer.json"
        )
    texts = (text for text, _ in read_documents(paths, key))
    backend = learn(texts, vocab_size=vocab_size, kind=kind, lowercase=lowercase)
    save(backend, output)
    return FileTokenizer(output)


def learn(texts: Iterable[str], *, vocab_size: int, kind: str, lowercase: bool = False) -> Any:
    """A tokenizer of the tokenizers library, trained; arguments and errors as for `train_tokenizer`."""
    if kind not in KINDS:
        raise JzeroError(f"tokenizer kind: expected {' or '.join(KINDS)}, found {kind}")
    if kind == "bpe" and lowercase:
        raise JzeroError("tokenizer: lowercase is for the kind wordpiece, found bpe; leave it out")
    if vocab_size < 1:
        raise JzeroError(f"tokenizer vocab-size: expected at least 1, found {vocab_size}")
    texts = list(texts)
    if not any(text and not text.isspace() for text in texts):
        raise JzeroError("tokenizer: expected text to train on, found none; give files that hold text")
    backend = _wordpiece(texts, vocab_size, lowercase) if kind == "wordpiece" else _bpe(texts, vocab_size)
    found = backend.get_vocab_size()
    if found > vocab_size:
        raise JzeroError(
            f"tokenizer vocab-size: expected at least {found}, the special tokens and the characters of this text, "
            f"found {vocab_size}"
        )
    return backend


def save(backend: Any, output: str | Path) -> None:
    """Writes a tokenizer of the library as `tokenizer.json`, whole or not at all."""
    output = Path(output)
    own = output.with_name(f".{output.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    made = missing_folders(output.parent)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(backend.to_str(pretty=True), encoding="utf-8")
        os.replace(own, output)
    except OSError as error:
        with suppress(OSError):
            own.unlink()
        remove_empty(made)
        raise JzeroError(
            f"{output}: expected to write here, found: {error.strerror or error}; choose another place"
        ) from None


def _wordpiece(texts: list[str], vocab_size: int, lowercase: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def empty(model: Any) -> Any:
        backend = Tokenizer(model)
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        return backend

    backend = empty(models.WordPiece(unk_token="[UNK]"))
    letters = _letters(map(backend.normalizer.normalize_str, texts), max(1, vocab_size // 4))
    # The trainer numbers what continues a word in the order of a hash table, and breaks ties by these numbers: give
    # them theirs, as if they were special.
    inside = [f"##{letter}" for letter in letters if len(backend.pre_tokenizer.pre_tokenize_str(f"a{letter}a")) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*BERT_SPECIAL, *inside],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    whole = empty(models.WordPiece(backend.get_vocab(), unk_token="[UNK]"))
    whole.add_special_tokens(list(BERT_SPECIAL))
    return whole


def _letters(texts: Iterable[str], limit: int) -> list[str]:
    """The most frequent characters, sorted; rarer ones become [UNK], or they would fill the vocabulary."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    common = sorted((letter for letter in counts if not letter.isspace()), key=lambda c: (-counts[c], c))
    return sorted(common[:limit])


def _bpe(texts: list[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*BERT_SPECIAL, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
