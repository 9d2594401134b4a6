"""Final validation loss of `configs/gpt_tiny.yaml` against a bigram model counted on the same training bytes.

    python benchmarks/bigram.py [--steps N] [--json FILE]     trains in a temporary folder first (minutes)
    python benchmarks/bigram.py --run runs/gpt_tiny           reads the metrics of a run that is there

Both losses are means over the same tokens: the validation batches that the trainer's evaluation takes. The bigram model
is p(b | a) = (count(a, b) + k) / (count(a) + k V), with the counts of the whole training split and V the tokenizer's
vocabulary. k is the constant that is best on those validation tokens, which favours the bigram model. The built-in
corpus is the standard library of the running interpreter: read a run with the Python it was trained with.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import sys
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from precision import finished

from jzero.data import GPTDataset, batches, build_datasets, config_tokenizer
from jzero.errors import JzeroError
from jzero.train.config import Config, load_config
from jzero.train.loop import TrainResult
from jzero.train.metrics import read_metrics

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "gpt_tiny.yaml"
CONSTANTS = np.geomspace(1e-5, 10, 601)  # candidates for k: the loss is flat around the best one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=pathlib.Path, help="folder of a finished run")
    parser.add_argument("--steps", type=int, help="train for this many steps (default: the configuration's)")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, for the configuration to train")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.run and (args.steps is not None or args.overrides):
        parser.error("--steps and --overrides are for a run that is to be trained, not for --run")
    try:
        result = measure(args.run, args.steps, args.overrides)
    except JzeroError as error:
        parser.error(str(error))
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(run: pathlib.Path | None, steps: int | None, overrides: list[str]) -> dict[str, Any]:
    """Both losses, in nats per token, and what they are losses of."""
    changed = [*overrides, *([f"trainer.max_steps={steps}"] if steps is not None else [])]
    config = load_config(run / "config.yaml") if run else load_config(CONFIG, changed)
    tokenizer = config_tokenizer(config)
    data = build_datasets(config, tokenizer)
    if not isinstance(data["train"], GPTDataset) or not isinstance(data["validation"], GPTDataset):
        raise JzeroError("model.data: expected one file with documents for training and validation, found others")
    counts = bigram_counts(data["train"], tokenizer.vocab_size)
    held_out = validation_batches(config, data["validation"])
    constant, loss = best_bigram(counts, held_out)
    gpt = last_evaluation(run) if run else train_and_check(config, held_out)
    return {
        "python": platform.python_version(),
        "train_tokens": int(counts.sum()) + 1,
        "validation_tokens": int(sum(batch["loss_mask"].sum() for batch in held_out)),
        "bigram": {"additive_constant": constant, "loss": loss},
        "gpt": {**gpt, "max_steps": config.trainer.max_steps},
        "difference": gpt["loss"] - loss,
    }


def bigram_counts(dataset: GPTDataset, vocabulary: int) -> np.ndarray:
    """int64 [V, V]: how often token b follows token a in the documents of a dataset, joined in the file's order."""
    starts = dataset.indexed.document_starts
    first, last = dataset.documents
    tokens = dataset.indexed.tokens[starts[first] : starts[last]].astype(np.int64)
    return np.bincount(tokens[:-1] * vocabulary + tokens[1:], minlength=vocabulary**2).reshape(vocabulary, vocabulary)


def validation_batches(config: Config, dataset: GPTDataset) -> list[dict[str, np.ndarray]]:
    """The batches of an evaluation: the first `limit_val_batches`, or as many whole ones as there are."""
    size = config.model.global_batch_size
    stream = batches(dataset, batch_size=size)
    try:
        return [next(stream) for _ in range(min(config.trainer.limit_val_batches, max(len(dataset) // size, 1)))]
    finally:
        stream.close()


def best_bigram(counts: np.ndarray, held_out: list[dict[str, np.ndarray]]) -> tuple[float, float]:
    """The additive constant that is best on the held-out batches, and the mean loss with it."""
    mask, a, b = (
        np.concatenate([batch[name].ravel() for batch in held_out]) for name in ("loss_mask", "tokens", "labels")
    )
    pair, before = counts[a, b], counts.sum(1)[a]

    def loss(k: float) -> float:
        return float(-np.average(np.log((pair + k) / (before + k * len(counts))), weights=mask))

    return min(((float(k), loss(k)) for k in CONSTANTS), key=lambda candidate: candidate[1])


def last_evaluation(run: pathlib.Path) -> dict[str, Any]:
    """Step and validation loss of the last evaluation of a run."""
    evaluations = [record for record in read_metrics(run / "metrics.jsonl") if "val_loss" in record]
    if not evaluations or evaluations[-1]["val_loss"] is None:
        found = "none" if not evaluations else "one that is not finite"
        raise JzeroError(f"{run}: expected an evaluation in metrics.jsonl, found {found}; train the run (again)")
    return {"step": evaluations[-1]["step"], "loss": evaluations[-1]["val_loss"]}


def train_and_check(config: Config, held_out: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Step and final validation loss of a new run, which must be that of the same batches evaluated here."""
    result = finished(config)
    again = evaluate(result, held_out)
    assert result.val_loss is not None
    assert math.isclose(again, result.val_loss, rel_tol=1e-6), f"other batches: {again} here, {result.val_loss} there"
    return {"step": result.step, "loss": result.val_loss}


def evaluate(result: TrainResult, held_out: list[dict[str, np.ndarray]]) -> float:
    """Mean loss per token of a trained model."""
    total = count = 0.0
    for batch in held_out:
        losses, tokens = result.program.evaluate(result.state.params, result.program.place(batch))
        total, count = total + float(losses), count + float(tokens)
    return total / count


def table(result: dict[str, Any]) -> str:
    bigram, gpt = result["bigram"], result["gpt"]
    rows = {
        f"bigram of {result['train_tokens']:,} tokens + {bigram['additive_constant']:.2g}": bigram["loss"],
        f"GPT after {gpt['step']} of {gpt['max_steps']} steps": gpt["loss"],
        "difference": result["difference"],
    }
    title = f"validation loss ({result['validation_tokens']:,} tokens)"
    lines = [f"{title:44}{'nats':>10}{'bits':>10}   per token"]
    return "\n".join([*lines, *(f"{name:44}{loss:10.4f}{loss / math.log(2):10.4f}" for name, loss in rows.items())])


if __name__ == "__main__":
    main()
