"""Tokenizers and the build of an indexed file."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from jzero.data import ByteTokenizer, IndexedDataset, build, load_tokenizer
from jzero.errors import JzeroError

TEXT = "to be, or not to be: that is the question"


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    from tokenizers.decoders import ByteLevel as Decoder

    backend.decoder = Decoder()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    # All that a file may ask for and a document must not get.
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 1)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int32
    clean = text.encode("utf-8", "replace")
    assert tokens.tolist() == list(clean)
    assert tokenizer.decode(tokens) == clean.decode()


def test_bytes_decode_whatever_a_model_says():
    assert ByteTokenizer().decode([104, 256, 105, 300, -1, 0xC3]) == "hi\ufffd\ufffd\ufffd"


def test_tokenizer_file(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json)
    tokens = tokenizer.encode(TEXT)
    assert 8 < len(tokens) < len(TEXT)
    assert tokens.dtype == np.int32
    assert (tokenizer.eod, max(tokens) < tokenizer.vocab_size) == (1, True)
    assert tokenizer.decode([*tokens, tokenizer.eod, 10**6]) == TEXT
    assert tokenizer.decode(tokenizer.encode("half \ud800 pair")) == "half ? pair"
    assert [x.tolist() for x in tokenizer.encode_batch([TEXT, ""])] == [tokens.tolist(), []]


def test_tokenizer_errors(tmp_path):
    with pytest.raises(JzeroError, match=r'missing\.json: expected "bytes" or the path of .*, found no such file'):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text('{"a":\n1}')
    with pytest.raises(JzeroError, match=r"bad\.json: expected a tokenizer\.json of .*, found: [^\n]*; save") as error:
        load_tokenizer(tmp_path / "bad.json")
    assert "\n" not in str(error.value)
    Tokenizer(BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(JzeroError, match=r"empty\.json: expected a token that ends a document, one of <\|endoftext\|>"):
        load_tokenizer(tmp_path / "empty.json")


def test_build_text_and_json_lines(tmp_path, tokenizer_json, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    (tmp_path / "a.txt").write_text("né\nx")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": "two"}')
    (tmp_path / "empty.txt").write_text("")
    inputs = [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "empty.txt"]
    built = build(inputs, "bytes", tmp_path / "out" / "text")
    assert (built.documents, built.tokens, built.empty, built.dtype) == (3, 14, 2, "uint16")
    assert "tokenize" in capsys.readouterr().err  # a bar, on what looks like a terminal
    dataset = IndexedDataset(built.prefix)
    texts = ["né\nx", "one", "two"]
    assert [x.tolist() for x in dataset] == [[*text.encode(), 256] for text in texts]
    assert dataset.documents.tolist() == [0, 1, 2, 3]

    tokenizer = load_tokenizer(tokenizer_json)
    build(inputs, tokenizer, tmp_path / "bpe", progress=False)
    assert capsys.readouterr().err == ""
    assert [tokenizer.decode(x[:-1]) for x in IndexedDataset(tmp_path / "bpe")] == texts
    assert [x[-1] for x in IndexedDataset(tmp_path / "bpe")] == [1, 1, 1]


def test_build_in_many_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("jzero.data.text._BATCH_BYTES", 64)
    documents = ["x" * i for i in range(1, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in documents))
    build([tmp_path / "a.jsonl"], "bytes", tmp_path / "a", key="body", progress=False)
    assert [len(x) - 1 for x in IndexedDataset(tmp_path / "a")] == list(range(1, 50))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntwo \xe9", r"a\.txt, line 2: expected UTF-8, found byte 0xe9; convert"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', r"a\.jsonl, line 2: expected UTF-8, found byte 0xe9"),
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": ',
            r"a\.jsonl, line 3: expected one JSON object, found: Expecting value",
        ),
        ("a.jsonl", b"[1]", r'line 1: expected an object with a text under "text", found list'),
        ("a.jsonl", b'{"body": "a", "id": 1}', r"line 1: .* found the keys \['body', 'id'\]"),
        ("a.jsonl", b'{"text": 1}', r"line 1: .* found int there"),
        (
            "a.jsonl",
            rb'{"text": "a\ud800"}',
            r"line 1: expected valid Unicode .*, found half a surrogate pair at character 1",
        ),
        ("a.txt", b"", r"a\.txt: expected at least one document with text, found none"),
        (None, b"", r"a\.txt: expected a text or \.jsonl file, found no such file"),
    ],
)
def test_bad_input_names_file_and_line(tmp_path, name, content, message):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(JzeroError, match=message) as error:
        build([tmp_path / (name or "a.txt")], "bytes", tmp_path / "out" / "text", progress=False)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ([name] if name else [])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_an_input_that_cannot_be_read(tmp_path, name):
    """The kernel opens this file but does not read at its beginning."""
    memory = Path("/proc/self/mem")
    if not memory.is_file():
        pytest.skip("needs Linux")
    (tmp_path / name).symlink_to(memory)
    with pytest.raises(JzeroError, match=rf"{name}: expected a readable file, found: "):
        build([tmp_path / name], "bytes", tmp_path / "out", progress=False)


def test_a_folder_is_not_an_input(tmp_path):
    with pytest.raises(JzeroError, match="found a folder; give the paths of files"):
        build([tmp_path], "bytes", tmp_path / "out", progress=False)
    with pytest.raises(JzeroError, match="inputs: expected at least one document"):
        build([], "bytes", tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("o/", "output {0}/o/: expected a path that ends in a name, found a folder; give {0}/o/text"),
        ("o/..", "output {0}/o/..: expected a path that ends in a name, found a folder; give {0}/o/../text"),
        ("o.bin", "output {0}/o.bin: expected a path without .bin and .idx, which are added, found .bin; give {0}/o"),
        ("o.idx", "output {0}/o.idx: expected a path without .bin and .idx, which are added, found .idx; give {0}/o"),
    ],
)
def test_an_output_that_names_no_pair_of_files(tmp_path, output, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(JzeroError) as error:
        build([tmp_path / "a.txt"], "bytes", f"{tmp_path}/{output}")
    assert str(error.value) == message.format(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_output_may_be_in_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    assert build(["~/a.txt"], "bytes", "~/out").prefix == f"{tmp_path}/out"
    assert (tmp_path / "out.idx").exists()
