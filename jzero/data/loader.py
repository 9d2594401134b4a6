"""From a configuration to batches: datasets by name of the split, and Grain to read ahead of the training step."""

import multiprocessing
import operator
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

from jzero.data.bert import BertDataset, bert_tokens
from jzero.data.blend import Blend, split_documents
from jzero.data.checks import check_vocabulary
from jzero.data.corpus import stdlib_corpus, stdlib_sentences, stdlib_tokenizer
from jzero.data.gpt import GPTDataset
from jzero.data.indexed import IndexedDataset
from jzero.data.text import Tokenizer, load_tokenizer
from jzero.errors import JzeroError

SPLITS = ("train", "validation", "test")
Dataset = GPTDataset | BertDataset | Blend

_AHEAD = 4  # batches read ahead, per process that reads
_ENDLESS = 1 << 36  # steps: more than any run has, few enough for Grain, which divides lengths as floats


def parse_prefix(data_prefix: Any) -> tuple[list[str], list[float] | None]:
    """The paths of `data_prefix` and their weights.

    Args:
        data_prefix: a path, a list of paths (weights None: each counts by its size), or weight and path in turn.

    Raises:
        JzeroError: anything else.

    Example:
        >>> parse_prefix([0.7, "a", 0.3, "b"])
        (['a', 'b'], [0.7, 0.3])
    """
    entries = [data_prefix] if isinstance(data_prefix, (str, Path)) else list[Any](data_prefix or [])
    if entries and all(isinstance(entry, (str, Path)) and not _is_number(entry) for entry in entries):
        return [str(entry) for entry in entries], None
    weights, paths = entries[::2], entries[1::2]
    if len(weights) != len(paths) or not entries or not all(map(_is_number, weights)) or any(map(_is_number, paths)):
        raise JzeroError(
            "model.data.data_prefix: expected a path, a list of paths, or weight and path in turn, found "
            f"{data_prefix}; write for example [0.7, a, 0.3, b]"
        )
    return [str(path) for path in paths], [float(str(weight)) for weight in weights]


def open_datasets(
    data_prefix: Any,
    *,
    kind: type[GPTDataset] | type[BertDataset] = GPTDataset,
    splits_string: str = "900,50,50",
    cache_dir: str | Path | None = None,
    **options: Any,
) -> dict[str, Dataset | None]:
    """The datasets of the three splits.

    Args:
        data_prefix: see `parse_prefix`; "stdlib" among the paths is the built-in corpus.
        kind: what samples are made by.
        splits_string: see `split_documents`; each file is divided by it.
        cache_dir: where the built-in corpus is kept, see `stdlib_corpus`.
        **options: of `kind`: seq_length, seed, vocab_size, eod, shuffle_documents, …

    Returns:
        "train", "validation" and "test"; the last two are None where no file has documents for them. Without weights a
        file counts by the samples it has in the split.

    Raises:
        JzeroError: a file is missing or corrupt, has no documents for training, or is of another vocabulary.

    Example:
        >>> import tempfile
        >>> options = {"seq_length": 64, "seed": 1, "vocab_size": 257, "cache_dir": tempfile.mkdtemp()}
        >>> open_datasets("stdlib", **options)["train"][0]["tokens"].shape
        (64,)
    """
    paths, weights = parse_prefix(data_prefix)
    corpus = stdlib_corpus if kind is GPTDataset else stdlib_sentences
    files = [IndexedDataset(corpus(cache_dir) if path == "stdlib" else os.path.expanduser(path)) for path in paths]
    for file in files:
        check_vocabulary(file, options["vocab_size"])
    ranges = [split_documents(splits_string, len(file.documents) - 1) for file in files]
    datasets: dict[str, Dataset | None] = {}
    for split, name in enumerate(SPLITS):
        used = [i for i, file in enumerate(files) if _tokens(file, ranges[i][split])]
        if name == "train" and len(used) < len(files):
            empty = next(i for i in range(len(files)) if i not in used)
            raise JzeroError(
                f"{files[empty].prefix}: expected documents for training, found none among its "
                f"{len(files[empty].documents) - 1} with splits_string {splits_string}; give more documents or another "
                "splits_string"
            )
        parts = [kind(files[i], documents=ranges[i][split], **options) for i in used]
        shares = [len(part) for part in parts] if weights is None else [weights[i] for i in used]
        datasets[name] = None if not parts else parts[0] if len(parts) == 1 else Blend(parts, shares)
    return datasets


def config_tokenizer(config: Any) -> Tokenizer:
    """The tokenizer of `config.model.tokenizer`: that of bytes, the one in the file `model`, or "stdlib", see `corpus`.

    Args:
        config: read by attribute: model.tokenizer.model, model.data.cache_dir.

    Raises:
        JzeroError: the file is missing or of no use.

    Example:
        >>> from jzero.train.config import Config
        >>> config_tokenizer(Config()).vocab_size
        257
    """
    return load_tokenizer(tokenizer_path(config) or "bytes")


def tokenizer_path(config: Any) -> Path | None:
    """The file of the tokenizer of `config.model.tokenizer`; None: it has none."""
    name = config.model.tokenizer.model
    if name == "stdlib":
        return Path(stdlib_tokenizer(config.model.data.cache_dir))
    return Path(os.path.expanduser(name)) if name else None


def build_datasets(config: Any, tokenizer: Tokenizer | None = None) -> dict[str, Dataset | None]:
    """The datasets of a configuration: `open_datasets` with the keys of `config.model` and `config.model.data`.

    Args:
        config: read by attribute: model.{type, seed, encoder_seq_length, vocab_size, tokenizer, data, …}.
        tokenizer: None loads the one of the configuration.

    Returns:
        "train", "validation" and "test"; the last two may be None.

    Raises:
        JzeroError: see `open_datasets`.

    Example:
        >>> import tempfile
        >>> from jzero.train.config import load_config
        >>> config = load_config(None, ["model.encoder_seq_length=64", f"model.data.cache_dir={tempfile.mkdtemp()}"])
        >>> build_datasets(config)["train"][0]["tokens"].shape
        (64,)
    """
    data = config.model.data
    tokenizer = config_tokenizer(config) if tokenizer is None else tokenizer
    shared = {
        "splits_string": data.splits_string,
        "cache_dir": data.cache_dir,
        "seq_length": config.model.encoder_seq_length,
        "seed": config.model.seed,
        "vocab_size": config.model.vocab_size or tokenizer.vocab_size,
    }
    if config.model.type == "bert":
        return open_datasets(
            data.data_prefix,
            kind=BertDataset,
            tokens=bert_tokens(tokenizer),
            masked_lm_prob=data.masked_lm_prob,
            short_seq_prob=data.short_seq_prob,
            whole_word_masking=data.whole_word_masking,
            binary_head=config.model.bert_binary_head,
            **shared,
        )
    return open_datasets(
        data.data_prefix,
        eod=tokenizer.eod,
        shuffle_documents=data.shuffle_documents,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        **shared,
    )


def batches(
    dataset: Dataset,
    *,
    batch_size: int,
    start_step: int = 0,
    rows: slice | Sequence[int] | None = None,
    num_workers: int = 0,
) -> grain.DatasetIterator[dict[str, np.ndarray]]:
    """An endless iterator of batches, read ahead of their use.

    Row r of the batch of step s is sample s·B + r of the dataset, whatever the other arguments: processes that each
    take their own rows see together what one process would see alone, and a run that starts at step s sees what it
    would have seen without a stop.

    Args:
        dataset: what to read.
        batch_size: B, the rows of the whole batch, over all processes.
        start_step: step of the first batch.
        rows: the rows of this process, a slice of or a list from 0..B-1; None is all.
        num_workers: 0 reads ahead in a thread, more in that many processes.

    Returns:
        A Grain iterator of dicts of arrays [rows, T]. `close()` ends its thread or processes at once.

    Raises:
        JzeroError: num_workers is negative; on iteration, a token outside of the vocabulary.
        ValueError: another argument is out of range.

    Example:
        >>> import tempfile
        >>> options = {"seq_length": 64, "seed": 1, "vocab_size": 257, "cache_dir": tempfile.mkdtemp()}
        >>> data = open_datasets("stdlib", **options)["train"]
        >>> batch = next(batches(data, batch_size=8, start_step=1000, rows=slice(0, 4)))
        >>> batch["tokens"].shape, bool((batch["tokens"][3] == data[8003]["tokens"]).all())
        ((4, 64), True)
    """
    if num_workers < 0:
        raise JzeroError(f"model.data.num_workers: expected at least 0, found {num_workers}; 0 reads in this process")
    if batch_size < 1 or start_step < 0:
        raise ValueError(
            f"batches: expected batch_size from 1 and start_step from 0, found {batch_size} and {start_step}"
        )
    whole = range(batch_size)
    own = list(whole[rows] if isinstance(rows, slice) else whole if rows is None else [whole[row] for row in rows])
    if not own:
        raise ValueError(f"rows: expected some of 0..{batch_size - 1}, the rows of a batch, found {rows}")
    steps = grain.MapDataset.source(_Rows(dataset, batch_size, own, start_step)).batch(len(own))
    # One thread: reading is a copy under Python's lock, so more threads only contend for it.
    ahead = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD))
    if num_workers:
        options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=_AHEAD)
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain's processes read absl flags, which only absl's own programs parse
        # Copied out of the shared memory, which the worker uses again.
        ahead = ahead.mp_prefetch(options, worker_init_fn=_settle_worker).map(_copy)
    return iter(ahead)


class _Rows:
    """The samples that one process reads, in order: a source for Grain."""

    def __init__(self, dataset: Dataset, batch_size: int, rows: list[int], start_step: int):
        self._dataset = dataset
        self._batch_size = batch_size
        self._rows = rows
        self._start_step = start_step

    def __len__(self) -> int:
        return len(self._rows) * _ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        step, row = divmod(operator.index(index), len(self._rows))
        return self._dataset[(self._start_step + step) * self._batch_size + self._rows[row]]


def _settle_worker(worker: int, count: int):
    """A worker ends when its parent says so or dies, not by a signal to the group: the parent may first save."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _copy(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.array(array, subok=False) for name, array in batch.items()}


def _tokens(file: IndexedDataset, documents: tuple[int, int]) -> int:
    first, last = documents
    return int(file.document_starts[last] - file.document_starts[first])


def _is_number(entry: Any) -> bool:
    """Numbers, and text that reads as one: a command line does not tell them apart."""
    try:
        float(str(entry))
    except ValueError:
        return False
    return True
