"""The reader against an independent one, and everything that can be wrong with a pair of files."""

import pickle
import re
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.data import IndexedDataset, IndexedWriter
from jzero.errors import JzeroError

from . import oracle

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [], [[7, 8, 9, 10]]]
TOKENS, SEQUENCES, BOUNDARIES = 10, 4, 5


@st.composite
def files(draw):
    code = draw(st.sampled_from(sorted(oracle.NAMES)))
    dtype = np.dtype(oracle.NAMES[code])
    if dtype.kind == "f":
        numbers = st.floats(width=8 * dtype.itemsize, allow_nan=False)
    else:
        limits = np.iinfo(dtype)
        numbers = st.integers(int(limits.min), int(limits.max))
    documents = draw(st.lists(st.lists(st.lists(numbers, max_size=4), max_size=3), max_size=5))
    count = sum(map(len, documents))
    modes = draw(st.none() | st.lists(st.integers(-128, 127), min_size=count, max_size=count))
    return code, documents, modes or None


def read_back(dataset):
    boundaries = dataset.documents
    return [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(boundaries)]


@settings(deadline=None)
@given(files())
def test_reads_what_an_independent_writer_wrote(tmp_path_factory, file):
    code, documents, modes = file
    prefix = tmp_path_factory.mktemp("indexed") / "text"
    oracle.write(prefix, code, documents, modes)
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == np.dtype(oracle.NAMES[code])
    assert len(dataset) == sum(map(len, documents))
    assert read_back(dataset) == documents
    assert (None if dataset.modes is None else dataset.modes.tolist()) == modes
    flat = [[token for sequence in document for token in sequence] for document in documents]
    starts = dataset.document_starts
    assert [dataset.tokens[a:b].tolist() for a, b in pairwise(starts)] == flat


@settings(deadline=None)
@given(files())
def test_an_independent_reader_reads_what_was_written(tmp_path_factory, file):
    code, documents, modes = file
    prefix = tmp_path_factory.mktemp("indexed") / "text"
    left = list(modes or [])
    with IndexedWriter(prefix, oracle.NAMES[code], multimodal=modes is not None) as writer:
        for document in documents:
            mine, left = left[: len(document)], left[len(document) :]
            tokens = [token for sequence in document for token in sequence]
            writer.add(tokens, [len(sequence) for sequence in document], mine if modes else None)
    assert oracle.read(prefix) == (oracle.NAMES[code], documents, modes)


@pytest.fixture
def prefix(tmp_path):
    oracle.write(tmp_path / "text", 8, DOCUMENTS)
    return tmp_path / "text"


def fails(prefix, *words):
    with pytest.raises(JzeroError) as error:
        IndexedDataset(prefix)
    message = str(error.value)
    assert "\n" not in message
    for word in ("expected", "found", *words):
        assert re.search(re.escape(word), message), message


def patch(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def test_part_of_a_sequence(prefix):
    dataset = IndexedDataset(prefix)
    assert dataset.get(3, 1).tolist() == [8, 9, 10]
    assert dataset.get(3, 1, 2).tolist() == [8, 9]
    assert dataset.get(-1, 4).tolist() == []
    for arguments in ((3, 1, 4), (3, -1), (3, 0, -1), (4,), (-5,)):
        with pytest.raises(IndexError):
            dataset.get(*arguments)


def test_is_a_read_only_view(prefix):
    dataset = IndexedDataset(prefix)
    assert np.shares_memory(dataset[0], dataset.tokens)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1


def test_is_pickled_as_its_path(prefix):
    data = pickle.dumps(IndexedDataset(prefix))
    assert len(data) < 300
    assert read_back(pickle.loads(data)) == DOCUMENTS


@pytest.mark.parametrize(
    ("at", "data", "words"),
    [
        (0, b"TNTIDX\x00\x00\x00", ["magic", "TNTIDX"]),
        (9, struct.pack("<Q", 2), ["version 1", "found 2"]),
        (17, b"\x00", ["code in 1..8", "found 0"]),
        (17, b"\x09", ["code in 1..8", "found 9"]),
        (18, struct.pack("<Q", 5), ["5 sequences", "122"]),
        (18, struct.pack("<Q", 2**63), ["sequences"]),
        (26, struct.pack("<Q", 6), ["6 boundaries", "122"]),
        (26, struct.pack("<Q", 0), ["0 boundaries"]),
        (34, struct.pack("<i", -3), ["length of at least 0 for sequence 0", "found -3"]),
        (38, struct.pack("<i", 2), ["sequence 2 to begin at byte 10", "found 8"]),
        (46, struct.pack("<i", 5), ["text.bin", "22 bytes (11 uint16 tokens", "found 20"]),
        (50, struct.pack("<q", 2), ["sequence 0 to begin at byte 0", "found 2"]),
        (74, struct.pack("<q", 1 << 40), ["sequence 3 to begin at byte 12", f"found {1 << 40}"]),
        (82, struct.pack("<q", 1), ["first document boundary of 0", "found 1"]),
        (90, struct.pack("<q", 9), ["boundary 2", "at least 9", "found 3"]),
        (90, struct.pack("<q", -1), ["boundary 1", "at least 0", "found -1"]),
        (114, struct.pack("<q", 3), ["last document boundary of 4", "found 3"]),
    ],
)
def test_a_corrupt_field_is_named(prefix, at, data, words):
    patch(prefix.with_suffix(".idx"), at, data)
    fails(prefix, str(prefix), "jzero data build", *words)


def test_any_wrong_byte_before_the_boundaries_is_found(prefix):
    index = prefix.with_suffix(".idx")
    good = index.read_bytes()
    for at in range(34 + 12 * SEQUENCES):
        if at == 17:
            continue  # another dtype of the same width cannot be told
        patch(index, at, bytes([good[at] ^ 0x11]))
        fails(prefix)
        index.write_bytes(good)


def test_any_truncation_is_found(prefix):
    index = prefix.with_suffix(".idx")
    good = index.read_bytes()
    assert len(good) == 34 + 12 * SEQUENCES + 8 * BOUNDARIES
    for size in range(len(good)):
        index.write_bytes(good[:size])
        fails(prefix, "text.idx", "truncated")
    index.write_bytes(good + b"0")
    fails(prefix, "text.idx")


@pytest.mark.parametrize("size", [0, 1, 2 * TOKENS - 1, 2 * TOKENS + 1, 4 * TOKENS])
def test_tokens_must_fit_the_index(prefix, size):
    data = prefix.with_suffix(".bin")
    data.write_bytes((data.read_bytes() * 2)[:size])
    fails(prefix, "text.bin", f"{2 * TOKENS} bytes", f"found {size}", "belongs to another index")


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_is_named(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    fails(prefix, f"text{suffix}: expected a readable file", "No such file", "without .idx or .bin", "jzero data build")
    prefix.with_suffix(suffix).mkdir()
    fails(prefix, f"text{suffix}", "directory")


def test_a_path_below_a_file_is_named(prefix):
    fails(f"{prefix}.bin/text", "Not a directory")
