"""Evaluation alone: what a model makes of indexed files it may never have seen."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jzero.data.blend import Blend
from jzero.data.gpt import GPTDataset
from jzero.data.loader import SPLITS, Dataset, build_datasets
from jzero.errors import JzeroError
from jzero.models.hf import is_hf_folder
from jzero.train.memory import memory_errors
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
    """The loss of a model, its mean over all tokens of the documents; each is a label once, but for the very first.

    Several files of a configuration are read one after another, and count by their tokens.

    Args:
        source: what `jzero.train.weights.open_model` takes.
        overrides: "key=value" of the configuration.
        data: an indexed file without .bin/.idx; None: those of the configuration.
        split: "train", "validation" or "test" documents; None: all of `data`, or "validation" without it.
        checkpoint: of a run: "best", "last", or a step.
        note: called with one line where there is something to say.

    Returns:
        "loss" (natural logarithm), "perplexity" and "tokens".

    Raises:
        JzeroError: there is no such model, or no such documents.
    """
    if data is None and is_hf_folder(source):
        raise JzeroError(f"{source}: expected --data with an indexed file to evaluate on, found none")
    if split is not None and split not in SPLITS:
        raise JzeroError(f"--split: expected {', '.join(SPLITS)}, found {split}")
    chosen = [] if data is None else [f"model.data.data_prefix={json.dumps(str(data))}"]
    if data is not None and split is None:
        chosen, split = [*chosen, "model.data.splits_string=1"], "train"
    config, program, params, tokenizer = open_model(
        source, [*_BATCH, *overrides, *chosen], checkpoint=checkpoint, note=note
    )
    found = build_datasets(config, tokenizer)[split or "validation"]
    if found is None:
        raise JzeroError(
            f"model.data.splits_string: expected documents in the split {split or 'validation'}, found none with "
            f"{config.model.data.splits_string}"
        )
    total, count = 0.0, 0.0
    with memory_errors(config):
        for dataset in found.datasets if isinstance(found, Blend) else [found]:
            for batch in _batches(dataset, program, config.model.global_batch_size):
                sums = jax.block_until_ready(program.evaluate(params, program.place(batch)))
                total, count = total + float(sums[0]), count + float(sums[1])
    loss = total / max(count, 1.0)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}


def _batches(dataset: Dataset, program: Program, size: int) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of batches in which every sample comes once; the last is filled up with rows of no weight."""
    assert isinstance(dataset, GPTDataset)
    rows = range(size)[program.local_rows(size)]
    for first in range(0, len(dataset), size):
        samples = [dataset.once(min(first + row, len(dataset) - 1)) for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            sample["loss_mask"] *= first + row < len(dataset)
        yield {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
