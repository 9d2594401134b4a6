"""The built-in corpus: what is in it, where it is kept, and who may build it."""

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jzero.data import ByteTokenizer, IndexedDataset, corpus, split_documents, stdlib_corpus
from jzero.errors import JzeroError


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return stdlib_corpus(tmp_path_factory.mktemp("cache"))


def test_holds_the_standard_library(prefix):
    dataset = IndexedDataset(prefix)
    documents = {ByteTokenizer().decode(tokens) for tokens in dataset}
    assert Path(textwrap.__file__).read_text() in documents
    assert len(dataset) > 400
    assert len(dataset.tokens) > 5_000_000
    assert all(tokens[-1] == 256 and tokens[:-1].max() < 256 for tokens in dataset)
    assert not any("class TestCase" in text and "import support" in text for text in documents)


def test_splits_are_alike(prefix):
    dataset = IndexedDataset(prefix)
    starts = dataset.document_starts
    splits = [dataset.tokens[starts[a] : starts[b]] for a, b in split_documents("900,50,50", len(starts) - 1)]
    train, *others = [np.bincount(tokens, minlength=257) / len(tokens) for tokens in splits]
    for other in others:
        assert np.abs(train - other).sum() / 2 < 0.1  # total variation of the bytes


def test_the_order_mixes_folders():
    folders = [Path(name).parent for name, _ in corpus._sources(Path(sysconfig.get_paths()["stdlib"]))]
    assert np.mean([a == b for a, b in pairwise(folders)]) < 0.4  # sorted by name it would be 0.9


def test_a_whole_copy_is_never_moved(prefix, tmp_path):
    folder, late = tmp_path / "corpus", tmp_path / "late"
    for place in (folder, late):
        shutil.copytree(Path(prefix).parent, place)
    before = folder.stat().st_ino
    corpus._publish(late, folder)
    assert folder.stat().st_ino == before


def test_is_built_once(prefix):
    cache = Path(prefix).parents[1]
    before = Path(f"{prefix}.bin").stat().st_mtime_ns
    assert stdlib_corpus(cache) == prefix
    assert Path(f"{prefix}.bin").stat().st_mtime_ns == before
    assert [path.name for path in cache.iterdir()] == [Path(prefix).parent.name]


def test_a_damaged_copy_is_replaced(prefix, tmp_path):
    damaged = tmp_path / Path(prefix).parent.name
    damaged.mkdir()
    (damaged / "text.idx").write_bytes(b"")
    assert len(IndexedDataset(stdlib_corpus(tmp_path))) == len(IndexedDataset(prefix))
    assert list(tmp_path.iterdir()) == [damaged]


def test_two_processes_at_the_same_time(prefix, tmp_path):
    code = (
        "import sys; from jzero.data import IndexedDataset, stdlib_corpus; sys.stdin.read(1); "
        "print(len(IndexedDataset(stdlib_corpus(sys.argv[1])).tokens))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:  # both wait for this before they build
        process.stdin.write("x")
        process.stdin.flush()
    assert [process.communicate()[0].strip() for process in running] == [str(len(IndexedDataset(prefix).tokens))] * 2
    assert [process.returncode for process in running] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1


def test_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(stdlib_corpus()).parents[1] == tmp_path / "jzero"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        JzeroError, match=r"expected a place to keep .* set model\.data\.cache_dir or XDG_CACHE_HOME"
    ) as error:
        stdlib_corpus(tmp_path / "file")
    assert "\n" not in str(error.value)


def test_an_interpreter_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(
        JzeroError, match=r"built-in corpus: expected the source text .* found none; set model\.data\.data_prefix"
    ):
        stdlib_corpus(tmp_path)
