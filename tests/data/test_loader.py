"""Batches: the same for every number of processes, workers and restarts."""

import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jzero.data import Blend, GPTDataset, IndexedDataset, IndexedWriter, batches, build_datasets, open_datasets
from jzero.data.checks import check_vocabulary
from jzero.data.loader import parse_prefix
from jzero.errors import JzeroError

OPTIONS = {"seq_length": 16, "seed": 5, "vocab_size": 1000}


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate("ab"):
        with IndexedWriter(folder / name, "uint16") as writer:
            for document in range(100):
                writer.add(np.full(50 + document, number * 100 + document))
    return str(folder / "a"), str(folder / "b")


@pytest.fixture
def train(prefixes):
    return open_datasets([0.7, prefixes[0], 0.3, prefixes[1]], **OPTIONS)["train"]


def take(iterator, count):
    out = [next(iterator) for _ in range(count)]
    iterator.close()
    return out


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_batch_k_is_rows_of_the_dataset(train):
    for step, batch in enumerate(take(batches(train, batch_size=6), 5)):
        assert batch["tokens"].shape == (6, 16)
        for row in range(6):
            assert same({name: array[row] for name, array in batch.items()}, train[6 * step + row])


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_processes_see_together_what_one_sees(train, processes):
    whole = take(batches(train, batch_size=6), 4)
    size = 6 // processes
    parts = [take(batches(train, batch_size=6, rows=slice(i * size, (i + 1) * size)), 4) for i in range(processes)]
    for step in range(4):
        joined = {name: np.concatenate([part[step][name] for part in parts]) for name in whole[step]}
        assert same(joined, whole[step])


def test_rows_may_be_any(train):
    (whole,) = take(batches(train, batch_size=6), 1)
    for rows in (slice(1, None, 2), slice(-2, None), [4, 0], [5]):
        (batch,) = take(batches(train, batch_size=6, rows=rows), 1)
        assert np.array_equal(batch["labels"], whole["labels"][rows])


@pytest.mark.parametrize("step", [1, 7, 10_000_000])
def test_resumes_exactly(train, step):
    (batch,) = take(batches(train, batch_size=6, start_step=step), 1)
    assert np.array_equal(batch["tokens"], np.stack([train[6 * step + row]["tokens"] for row in range(6)]))


def test_workers_change_nothing(train):
    alone = take(batches(train, batch_size=6, start_step=3, rows=slice(0, 4)), 7)
    helped = take(batches(train, batch_size=6, start_step=3, rows=slice(0, 4), num_workers=2), 7)
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))
    assert type(helped[0]["tokens"]) is np.ndarray


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_foreign_token_reaches_the_caller(prefixes, num_workers):
    dataset = GPTDataset(IndexedDataset(prefixes[0]), seq_length=16, seed=5, vocab_size=50)
    iterator = batches(dataset, batch_size=64, num_workers=num_workers)
    with pytest.raises(JzeroError, match=r"a\.bin: expected tokens in 0\.\.49 .*, found \d+ at position \d+") as error:
        next(iterator)
    assert "\n" not in str(error.value)
    iterator.close()


def test_a_file_of_another_vocabulary_is_refused_when_it_is_opened(prefixes, tmp_path):
    with pytest.raises(JzeroError, match=r"a\.bin: expected tokens in 0\.\.50 \(a vocabulary of 51\), found 51 at"):
        open_datasets(prefixes[0], seq_length=16, seed=5, vocab_size=51)
    with IndexedWriter(tmp_path / "negative", "int32") as writer:
        writer.add([1, 2, -7])
    with pytest.raises(JzeroError, match=r"negative\.bin: expected .*, found -7 at position 2 \(document 0\); use the"):
        open_datasets(tmp_path / "negative", seq_length=16, seed=5, vocab_size=51)


@pytest.mark.parametrize(("at", "found"), [(1, True), (2, False), (156 * 32, True), (156 * 63, True)])
def test_a_large_file_is_looked_at_in_windows_all_over(tmp_path, at, found):
    """64 windows of 2 tokens each, 156 tokens apart."""
    with IndexedWriter(tmp_path / "large", "uint16") as writer:
        writer.add(np.where(np.arange(10_000) == at, 99, 0))
    file = IndexedDataset(tmp_path / "large")
    with pytest.raises(JzeroError, match=f"found 99 at position {at} ") if found else nullcontext():
        check_vocabulary(file, 99, limit=128)


def test_a_type_that_holds_no_foreign_token_is_not_read(tmp_path):
    with IndexedWriter(tmp_path / "bytes", "uint8") as writer:
        writer.add(np.arange(256))
    file = IndexedDataset(tmp_path / "bytes")
    file.tokens = None
    check_vocabulary(file, 257)


def test_paths_may_begin_with_the_users_home(prefixes, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(prefixes[0]).parent))
    assert len(open_datasets("~/a", **OPTIONS)["train"]) == len(open_datasets(prefixes[0], **OPTIONS)["train"])


def test_a_worker_outlives_signals_to_the_group_but_not_its_parent(prefixes):
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from jzero.data import batches, open_datasets\n"
        "dataset = open_datasets(sys.argv[1], seq_length=16, seed=5, vocab_size=1000)['train']\n"
        "iterator = batches(dataset, batch_size=2, num_workers=1)\n"
        "next(iterator)\n"
        "(worker,) = multiprocessing.active_children()\n"
        "os.kill(worker.pid, signal.SIGINT), os.kill(worker.pid, signal.SIGTERM)\n"
        "[next(iterator) for _ in range(20)]\n"
        "print(worker.pid, flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, prefixes[0]], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_arguments_are_checked(train):
    for wrong in ({"batch_size": 0}, {"batch_size": 4, "start_step": -1}, {"batch_size": 4, "rows": slice(4, 8)}):
        with pytest.raises(ValueError, match=r"batch_size from 1 and start_step|some of 0\.\.3, the rows"):
            batches(train, **wrong)
    with pytest.raises(IndexError):
        batches(train, batch_size=4, rows=[4])
    with pytest.raises(JzeroError, match=r"model\.data\.num_workers: expected at least 0, found -1"):
        batches(train, batch_size=4, num_workers=-1)


def test_splits_share_no_document(prefixes):
    datasets = open_datasets(prefixes[0], splits_string="8,1,1", **OPTIONS)
    seen = {
        name: {int(token) for k in range(2 * len(dataset)) for token in dataset[k]["tokens"]}
        for name, dataset in datasets.items()
    }
    assert seen == {"train": set(range(80)), "validation": set(range(80, 90)), "test": set(range(90, 100))}


def test_a_split_without_documents(prefixes):
    datasets = open_datasets(prefixes[0], splits_string="100", **OPTIONS)
    assert (datasets["validation"], datasets["test"]) == (None, None)
    with pytest.raises(
        JzeroError, match=r"a: expected documents for training, found none among its 100 with splits_string 0,1"
    ):
        open_datasets(list(prefixes), splits_string="0,1", **OPTIONS)


def test_without_weights_files_count_by_size(prefixes, tmp_path):
    with IndexedWriter(tmp_path / "small", "uint16") as writer:
        for _ in range(4):
            writer.add(np.full(100, 999))
    datasets = open_datasets([prefixes[0], tmp_path / "small"], splits_string="3,1", **OPTIONS)
    blend = datasets["train"]
    assert isinstance(blend, Blend)
    ones = sum(999 in blend[k]["tokens"] for k in range(1000))
    assert abs(ones / 1000 - len(blend.datasets[1]) / len(blend)) < 2e-3
    only = open_datasets([1, prefixes[0], 1, tmp_path / "small"], splits_string="9,1", **OPTIONS)["validation"]
    assert isinstance(only, GPTDataset)  # four documents divided 9 to 1 leave none of the second file


def test_parse_prefix(tmp_path):
    assert parse_prefix("a") == (["a"], None)
    assert parse_prefix(["a", tmp_path]) == (["a", str(tmp_path)], None)
    assert parse_prefix(["0.7", "a", 3, "b"]) == (["a", "b"], [0.7, 3.0])
    for wrong in ([], None, ["a", 0.3], [0.7, "a", "b"], [0.7, 0.3], ["a", 0.7], [0.7, "a", 0.3], [True, "a"]):
        with pytest.raises(
            JzeroError, match=r"model\.data\.data_prefix: expected a path, a list of paths, or weight and path"
        ):
            parse_prefix(wrong)


def config(data_prefix, *, library="bytes", path=None, **data):
    keys = {
        "data_prefix": data_prefix,
        "data_impl": "mmap",
        "splits_string": "900,50,50",
        "shuffle_documents": True,
        "reset_position_ids": True,
        "reset_attention_mask": False,
        "eod_mask_loss": True,
        "cache_dir": None,
    }
    return SimpleNamespace(
        model=SimpleNamespace(
            type="gpt",
            seed=5,
            encoder_seq_length=16,
            vocab_size=None,
            tokenizer=SimpleNamespace(library=library, model=path),
            data=SimpleNamespace(**(keys | data)),
        )
    )


def test_build_datasets_from_a_config(prefixes, tmp_path):
    datasets = build_datasets(config(prefixes[0], splits_string="1,1"))
    assert sorted(datasets) == ["test", "train", "validation"]
    train = datasets["train"]
    assert (train.seed, train.seq_length, train.vocab_size, train.eod, train.documents) == (5, 16, 257, 256, (0, 50))
    assert sorted(train[0]) == ["labels", "loss_mask", "positions", "tokens"]
    corpus = build_datasets(config("stdlib", cache_dir=tmp_path))["train"]
    assert corpus[0]["tokens"].max() < 257


def test_a_tokenizer_that_is_not_there(prefixes):
    with pytest.raises(JzeroError, match=r"x\.json: expected .* found no such file"):
        build_datasets(config(prefixes[0], library="tokenizers", path="x.json"))
