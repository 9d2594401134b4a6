"""Tokenizers trained on one's own text, files of sentences, and the built-in corpus in words."""

import numpy as np
import pytest

from jzero.data import BertDataset, FileTokenizer, IndexedDataset, bert_tokens, build, open_datasets, train_tokenizer
from jzero.data.sentences import split_sentences
from jzero.errors import JzeroError

TEXT = "The cats sat on the mats. The hats were flat! Were the rats there? No: they had left.\nA line of its own\n" * 30


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_tokenizer_is_a_function_of_its_input(kind, text, tmp_path):
    made = [train_tokenizer([text], tmp_path / f"{i}.json", vocab_size=300, kind=kind) for i in range(2)]
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert made[0].vocab_size <= 300
    assert [made[0].pieces[name] for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")] == [0, 2, 3, 4]
    assert made[0].eod == made[0].pieces["<|endoftext|>" if kind == "bpe" else "[SEP]"]
    assert made[0].decode(made[0].encode("The cats were there")) == "The cats were there"
    if kind == "bpe":  # every text has tokens
        assert made[0].decode(made[0].encode("žluťoučký")) == "žluťoučký"


def test_lower_case(text, tmp_path):
    made = train_tokenizer([text], tmp_path / "t.json", vocab_size=100, lowercase=True)
    assert made.decode(made.encode("THE CATS")) == "the cats"
    assert not any(piece.lower() != piece for piece, token in made.pieces.items() if token not in made.special_ids)


def test_what_bert_needs_of_a_vocabulary(text, tmp_path):
    words = train_tokenizer([text], tmp_path / "w.json", vocab_size=120)
    special = bert_tokens(words)
    assert (special.pad, special.cls, special.sep, special.mask) == (0, 2, 3, 4)
    assert special.ordinary.tolist() == list(range(5, words.vocab_size))
    inverse = {token: piece for piece, token in words.pieces.items()}
    assert all(special.continues[i] == inverse[i].startswith("##") for i in special.ordinary)
    pieces = train_tokenizer([text], tmp_path / "b.json", vocab_size=300, kind="bpe")
    continues = bert_tokens(pieces).continues
    assert continues[pieces.pieces["a"]]
    assert not continues[pieces.pieces["Ġ"]]


def test_sentences():
    assert split_sentences("One. two. Three? 4 is! (Five) Six.\n\n  seven  \n") == [
        "One. two.", "Three?", "4 is!", "(Five) Six.", "seven"
    ]  # fmt: skip
    assert split_sentences("第一句。第二句！三") == ["第一句。", "第二句！", "三"]
    assert split_sentences(" \n\n") == []


def test_a_file_of_sentences(text, tmp_path):
    tokenizer = train_tokenizer([text], tmp_path / "t.json", vocab_size=120)
    built = build([text], tokenizer, tmp_path / "data", split=True, progress=False)
    indexed = IndexedDataset(built.prefix)
    assert built.documents == 1
    assert [tokenizer.decode(s) for s in indexed][:2] == ["The cats sat on the mats.", "The hats were flat!"]
    assert len(indexed) == 5 * 30
    assert tokenizer.eod not in indexed.tokens
    assert built.tokens == len(indexed.tokens)
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(JzeroError, match="at least one document with text, found none"):
        build([tmp_path / "empty.txt"], tokenizer, tmp_path / "none", split=True, progress=False)


def test_the_built_in_corpus_in_words(tmp_path_factory):
    from jzero.data import stdlib_sentences, stdlib_tokenizer

    cache = tmp_path_factory.mktemp("cache")
    tokenizer = FileTokenizer(stdlib_tokenizer(cache))
    assert tokenizer.vocab_size == 2048
    indexed = IndexedDataset(stdlib_sentences(cache))
    assert np.bincount(indexed.tokens, minlength=2048)[tokenizer.pieces["[UNK]"]] < 1e-3 * len(indexed.tokens)
    data = open_datasets("stdlib", kind=BertDataset, seq_length=64, seed=1, vocab_size=2048, cache_dir=cache,
                         tokens=bert_tokens(tokenizer))  # fmt: skip
    train, validation = (data[name] for name in ("train", "validation"))
    assert len(train) > 20_000
    assert len(validation) > 640
    assert train[0]["tokens"].max() < 2048


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "tokenizer vocab-size: expected at least 1, found 0"),
        ({"vocab_size": 6}, r"expected at least \d+, the special tokens and the characters of this text, found 6"),
        ({"kind": "unigram"}, "tokenizer kind: expected wordpiece or bpe, found unigram"),
        ({"kind": "bpe", "lowercase": True}, "lowercase is for the kind wordpiece, found bpe"),
        ({"inputs": ["no-such"]}, "no-such: expected a text or .jsonl file, found no such file"),
        ({"output": "."}, "expected the path of a file, found a folder"),
    ],
)
def test_mistakes_are_named(options, message, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"inputs": [text], "output": "t.json", "vocab_size": 100, **options}
    with pytest.raises(JzeroError, match=message):
        train_tokenizer(**arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


def test_a_vocabulary_without_masks_is_refused():
    from jzero.data import ByteTokenizer

    with pytest.raises(
        JzeroError, match=r"expected a tokenizer with \[CLS\], \[SEP\], \[MASK\], \[PAD\] for model.type"
    ):
        bert_tokens(ByteTokenizer())
