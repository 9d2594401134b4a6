"""Megatron's own indexed files: what its builder writes is read here, and what is written here its reader reads."""

import warnings

import numpy as np
import pytest

from jzero.data import IndexedDataset, IndexedWriter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about the CUDA libraries that it does without
    torch = pytest.importorskip("torch")
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


def documents(dtype):
    """Documents as lists of sequences: several, one, none, an empty one."""
    rng = np.random.default_rng(3)
    sequence = lambda n: rng.integers(0, 100, n).astype(dtype)
    return [[sequence(5), sequence(1), sequence(7)], [sequence(300)], [], [sequence(0), sequence(2)], [sequence(4)]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("modes", [False, True], ids=["text", "multimodal"])
def test_their_builders_files_are_read_here(tmp_path, dtype, modes):
    prefix, content = str(tmp_path / "theirs"), documents(dtype)
    builder = megatron.IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(np, dtype), multimodal=modes)
    for i, document in enumerate(content):
        for sequence in document:
            builder.add_item(torch.tensor(sequence), **({"mode": i} if modes else {}))
        builder.end_document()
    builder.finalize(prefix + ".idx")
    check(IndexedDataset(prefix), megatron.IndexedDataset(prefix, multimodal=modes), content, dtype, modes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("modes", [False, True], ids=["text", "multimodal"])
def test_our_writers_files_are_read_there(tmp_path, dtype, modes):
    prefix, content = str(tmp_path / "ours"), documents(dtype)
    with IndexedWriter(prefix, dtype, multimodal=modes) as writer:
        for i, document in enumerate(content):
            lengths = [len(sequence) for sequence in document]
            whole = np.concatenate([np.zeros(0, dtype), *document])
            writer.add(whole, lengths=lengths, modes=[i] * len(lengths))
    check(IndexedDataset(prefix), megatron.IndexedDataset(prefix, multimodal=modes), content, dtype, modes)


def check(ours, theirs, content, dtype, modes):
    sequences = [sequence for document in content for sequence in document]
    assert len(ours) == len(theirs) == len(sequences)
    np.testing.assert_array_equal(ours.sizes, theirs.sequence_lengths)
    np.testing.assert_array_equal(ours.documents, theirs.document_indices)
    np.testing.assert_array_equal(ours.documents, np.cumsum([0, *map(len, content)]))
    assert ours.dtype == theirs.index.dtype == np.dtype(dtype)
    numbers = [i for i, document in enumerate(content) for _ in document]
    for i, expected in enumerate(sequences):
        found = theirs[i][0] if modes else theirs[i]
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(ours[i], expected)
        if modes:
            assert ours.modes[i] == theirs[i][1] == numbers[i]
    part = theirs.get(0, offset=1, length=3)
    np.testing.assert_array_equal(part[0] if modes else part, ours.get(0, 1, 3))
