"""Evaluation alone: what a model makes of indexed files it may never have seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jzero.data.blend import Blend
from jzero.data.gpt import GPTDataset
from jzero.data.loader import SPLITS, build_datasets
from jzero.errors import JzeroError
from jzero.models.hf import is_hf_folder
from jzero.train.memory import memory_errors
from jzero.train.metrics import means
from jzero.train.step import Program
from jzero.train.weights import open_model

_BATCH = ("model.micro_batch_size=1", "model.global_batch_size=8")  # unless overrides say otherwise


def evaluate(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    data: str | None = None,
    split: str | None = None,
    checkpoint: str = "best",
    note: Callable[[str], None] = print,
) -> dict[str, float]:
    """What a model makes of documents, as means over their tokens: each is a label once, but for the very first.

    Several files of a configuration are read one after another, and count by their tokens. For a BERT the tokens are
    those that the samples of one epoch mask, in whole batches.

    Args:
        source: what `jzero.train.weights.open_model` takes.
        overrides: "key=value" of the configuration.
        data: an indexed file without .bin/.idx; None: those of the configuration.
        split: "train", "validation" or "test" documents; None: all of `data`, or "validation" without it.
        checkpoint: of a run: "best", "last", or a step.
        note: called with one line where there is something to say.

    Returns:
        "loss" (natural logarithm), "perplexity" of a GPT, "lm_accuracy" and the like of a BERT, and "tokens".

    Raises:
        JzeroError: there is no such model, or no such documents.
    """
    if data is None and is_hf_folder(source):
        raise JzeroError(
            f"{source}: expected an indexed file to evaluate on, found none beside Hugging Face's model; add --data"
        )
    if split is not None and split not in SPLITS:
        raise JzeroError(f"--split: expected {', '.join(SPLITS)}, found {split}")
    chosen = [] if data is None else [f"model.data.data_prefix={json.dumps(str(data))}"]
    if data is not None and split is None:
        chosen, split = [*chosen, "model.data.splits_string=1"], "train"
    config, program, params, fp8, tokenizer = open_model(
        source, [*_BATCH, *overrides, *chosen], checkpoint=checkpoint, note=note
    )
    found = build_datasets(config, tokenizer)[split or "validation"]
    if found is None:
        raise JzeroError(
            f"model.data.splits_string: expected documents in the split {split or 'validation'}, found none with "
            f"{config.model.data.splits_string}; change it, or name a file with --data"
        )
    sums, tokens = [], 0.0
    with memory_errors(config):
        for dataset in found.datasets if isinstance(found, Blend) else [found]:
            for batch in _batches(dataset, program, config.model.global_batch_size):
                sums.append(jax.device_get(program.measure(params, program.place(batch), fp8)))
                tokens += float(next(pair for name, pair in sums[-1].items() if name.endswith("loss"))[1])
    measured = {name.removeprefix("val_"): value for name, value in means(sums).items()}
    if config.model.type == "gpt":
        measured["perplexity"] = math.exp(min(measured["loss"], 700.0))
    return {**measured, "tokens": tokens}


def _batches(dataset: Any, program: Program, size: int) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of batches in which a GPT's samples come once, a last one filled up with rows of no weight.

    Of samples that have a loss of their own, whole batches, and at least one.
    """
    exact, count, rows = isinstance(dataset, GPTDataset), len(dataset), range(size)[program.local_rows(size)]
    for first in range(0, count if exact else max(count // size, 1) * size, size):
        numbers = [first + row for row in rows]
        samples = [dataset.once(min(n, count - 1)) if exact else dataset[n] for n in numbers]
        for n, sample in zip(numbers, samples, strict=True):
            sample["loss_mask"] = sample["loss_mask"] * (n < count or not exact)
        yield {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
