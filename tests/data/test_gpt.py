"""Samples: every token once per epoch, in an order that depends on the seed and the number of the sample alone."""

import pickle
import struct
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jzero.data import GPTDataset, IndexedDataset, IndexedWriter
from jzero.data.stream import TokenStream, sample_order
from jzero.errors import JzeroError

from . import oracle


def write(prefix, documents, dtype="uint16"):
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return IndexedDataset(prefix)


@pytest.fixture
def numbered(tmp_path):
    """Documents of 0 to 29 tokens; all tokens are different, so a token says where it comes from."""
    ends = np.cumsum(np.arange(30))
    return write(tmp_path / "text", [np.arange(end - size, end) for size, end in enumerate(ends)])


OPTIONS = {"seed": 1, "vocab_size": 435}


@pytest.mark.parametrize("T", [1, 7, 64, 435, 1000])
def test_every_token_is_an_input_once_per_epoch(numbered, T):
    dataset = GPTDataset(numbered, seq_length=T, **OPTIONS)
    epochs = T // np.gcd(T, 435)  # the first number of epochs that is a whole number of samples
    samples = [dataset[k] for k in range(epochs * 435 // T)]
    seen = np.bincount(np.concatenate([sample["tokens"] for sample in samples]), minlength=435)
    assert (seen == epochs).all()
    assert len(dataset) == -(-435 // T)
    for sample in samples[:50]:
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()


def test_documents_stay_whole(numbered):
    # The order of documents in an epoch, read off the stream: each document is contiguous, in its own order.
    stream = TokenStream(numbered, 0, 30, seed=3)
    for epoch in range(3):
        tokens = stream.read(epoch * 435, 435).astype(int)
        begins = np.flatnonzero(np.diff(tokens, prepend=-5) != 1)
        assert len(begins) >= 20
        sizes = {int(tokens[a]): len(run) for a, run in zip(begins, np.split(tokens, begins[1:]), strict=True)}
        starts = set(numbered.document_starts.tolist())
        assert set(sizes) <= starts
        assert sorted(tokens) == list(range(435))


def test_epochs_differ_and_seeds_differ(numbered):
    def epoch(seed, e):
        return TokenStream(numbered, 0, 30, seed=seed).read(e * 435, 435).tolist()

    orders = [epoch(seed, e) for seed in (1, 2) for e in (0, 1, 7)]
    assert len({tuple(order) for order in orders}) == 6
    assert [sample_order(k, 1000, 10, seed=1) for k in range(100)] != [
        sample_order(k, 1000, 10, seed=2) for k in range(100)
    ]


def test_without_document_shuffle_only_windows_move(numbered):
    dataset = GPTDataset(numbered, seq_length=29, shuffle_documents=False, **OPTIONS)
    begins = [int(dataset[k]["tokens"][0]) for k in range(15)]
    assert sorted(begins) == list(range(0, 435, 29))
    assert begins != sorted(begins)
    assert all((dataset[k]["labels"] == (dataset[k]["tokens"] + 1) % 435).all() for k in range(30))


@settings(deadline=None)
@given(st.data(), st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_samples_of_an_epoch_are_permuted(data, T, seed, epoch):
    N = data.draw(st.integers(1, 100 * T))
    first, last = -(-epoch * N // T), -(-(epoch + 1) * N // T)
    assert sorted(sample_order(k, N, T, seed) for k in range(first, last)) == list(range(first, last))


def test_more_samples_than_32_bits_count():
    N = 2**33 + 5  # T = 1: two blocks of 2³² samples and one of 5
    for first, size in ((0, 2**32), (2**32, 2**32), (2**33, 5)):
        found = {sample_order(k, N, 1, seed=1) for k in range(first, first + 5)}
        assert len(found) == 5
        assert all(first <= j < first + size for j in found)


def test_the_order_is_the_one_it_always_was(numbered):
    # Stored runs resume on this order: a library that changes it must be noticed.
    dataset = GPTDataset(numbered, seq_length=50, **OPTIONS)
    assert [dataset[k]["tokens"][0].item() for k in (0, 1, 2, 8, 9, 1000, 10**12)] == [
        105,
        137,
        157,
        380,
        298,
        318,
        180,
    ]


def test_any_order_of_access_gives_the_same(numbered):
    def make():
        return GPTDataset(numbered, seq_length=16, **OPTIONS)

    dataset = make()
    forward = [dataset[k]["tokens"] for k in range(200)]
    for k in np.random.RandomState(0).permutation(200):
        assert (make()[k]["tokens"] == forward[k]).all()
        assert (dataset[k]["tokens"] == forward[k]).all()
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy[123]["labels"] == dataset[123]["labels"]).all()


def test_threads_share_one_dataset(numbered):
    dataset = GPTDataset(numbered, seq_length=16, **OPTIONS)
    expected = [GPTDataset(numbered, seq_length=16, **OPTIONS)[k]["tokens"] for k in range(300)]
    wrong = []

    def work(order):
        wrong.extend(k for k in order if not (dataset[k]["tokens"] == expected[k]).all())

    threads = [threading.Thread(target=work, args=(np.random.RandomState(i).permutation(300),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_range_of_documents(numbered):
    dataset = GPTDataset(numbered, seq_length=5, documents=(10, 13), **OPTIONS)
    seen = np.concatenate([dataset[k]["tokens"] for k in range(33)])
    starts = numbered.document_starts
    assert set(seen.tolist()) == set(range(starts[10], starts[13]))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=30))
def test_masks(tmp_path_factory, tokens):
    indexed = write(tmp_path_factory.mktemp("gpt") / "text", [tokens])
    flags = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    sample = GPTDataset(indexed, seq_length=len(tokens), seed=0, vocab_size=3, eod=0, **flags)[0]
    loss_mask, positions, segments = oracle.masks(tokens, eod=0)
    assert sample["tokens"].tolist() == tokens
    assert sample["loss_mask"].tolist() == loss_mask
    assert sample["positions"].tolist() == positions
    assert sample["segments"].tolist() == segments
    dtypes = {name: array.dtype.name for name, array in sample.items()}
    assert dtypes == dict.fromkeys(["tokens", "labels", "positions", "segments"], "int32") | {"loss_mask": "float32"}


def test_masks_only_where_asked_for(numbered):
    sample = GPTDataset(numbered, seq_length=8, eod=3, **OPTIONS)[0]
    assert sorted(sample) == ["labels", "loss_mask", "tokens"]
    assert sample["loss_mask"].tolist() == [1.0] * 8
    for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(JzeroError, match="expected a tokenizer with an end-of-document token, found none"):
            GPTDataset(numbered, seq_length=8, **OPTIONS, **{flag: True})


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 300), ("int64", 2**40), ("int32", -1), ("int8", -7)])
def test_a_token_outside_of_the_vocabulary(tmp_path, dtype, token):
    indexed = write(tmp_path / "text", [[1, 2, 3], [token, 4, 5], [6]], dtype)
    message = (
        rf"text\.bin: expected tokens in 0\.\.255 \(a vocabulary of 256\), found {token} at position 3 \(document 1\); "
        r"use the tokenizer that the file was built with"
    )
    for seed in range(6):  # in all orders of the documents
        dataset = GPTDataset(indexed, seq_length=7, seed=seed, vocab_size=256)
        with pytest.raises(JzeroError, match=message):
            dataset[0]
    assert GPTDataset(indexed, seq_length=2, seed=2, vocab_size=256, documents=(2, 3))[0]["tokens"].tolist() == [6, 6]


def test_refusals(numbered, tmp_path):
    with pytest.raises(IndexError, match="sample -1"):
        GPTDataset(numbered, seq_length=8, **OPTIONS)[-1]
    with pytest.raises(JzeroError, match=r"expected tokens in documents \[0, 1\), found none; change splits_string"):
        GPTDataset(numbered, seq_length=8, documents=(0, 1), **OPTIONS)
    with pytest.raises(JzeroError, match=r"expected a sequence length of at least 1 and a seed .*, found 0 and 1"):
        GPTDataset(numbered, seq_length=0, **OPTIONS)
    with pytest.raises(JzeroError, match="expected integer tokens, found float32"):
        GPTDataset(write(tmp_path / "f", [[1.0]], "float32"), seq_length=8, **OPTIONS)


def test_millions_of_documents_are_indexed_at_once(tmp_path):
    n = 2_000_000  # documents of one token
    arrays = [np.ones(n, "<i4"), np.arange(n, dtype="<i8"), np.arange(n + 1, dtype="<i8")]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 1, n, n + 1)
    (tmp_path / "text.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    (tmp_path / "text.bin").write_bytes(bytes(n))
    begin = time.perf_counter()
    dataset = GPTDataset(IndexedDataset(tmp_path / "text"), seq_length=1024, seed=1, vocab_size=2)
    assert dataset[10**6]["tokens"].tolist() == [0] * 1024
    assert time.perf_counter() - begin < 5  # it takes 0.3 s; a loop over the documents in Python takes longer
