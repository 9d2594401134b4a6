"""Validation loss of `configs/gpt_tiny_fp8.yaml` with FP8 products, against the same run in bfloat16.

    python benchmarks/fp8.py [--steps N] [--seeds N ...] [--modes NAME ...] [--overrides KEY=VALUE ...] [--json FILE]

Runs of one seed have the same initial weights, batches and schedule. Printed are the losses in nats per byte, mean over
the seeds, and the mean and the largest deviation of their ratios to bfloat16's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from precision import run

from jzero.errors import JzeroError
from jzero.train.config import load_config

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "gpt_tiny_fp8.yaml"
REFERENCE = "bf16"
MODES = {
    REFERENCE: ["model.fp8=false"],
    "fp8, delayed scaling": [],
    "fp8 parameters too": ["model.fp8_params=true"],
    "fp8, current scaling": ["model.fp8_recipe=current", "model.fp8_amax_history_len=1024"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="besides the reference")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    losses: dict[str, list[float]] = {name: [] for name in MODES if name in (*args.modes, REFERENCE)}
    steps = args.steps or load_config(CONFIG, args.overrides).trainer.max_steps
    try:
        for seed in args.seeds:
            for name, found in losses.items():
                overrides = [*args.overrides, f"model.seed={seed}"]
                found.append(run(MODES[name], args.steps, overrides, CONFIG))
            if args.json:
                args.json.write_text(json.dumps(result(losses, steps, args.seeds, args.overrides), indent=2) + "\n")
    except JzeroError as error:
        parser.error(str(error))
    for name, row in result(losses, steps, args.seeds, args.overrides)["rows"].items():
        print(f"{name:24}{row['mean']:9.4f}{row['of_reference']:9.4f}{row['largest_deviation']:9.4f}")


def result(losses: dict[str, list[float]], steps: int, seeds: list[int], overrides: list[str]) -> dict[str, Any]:
    """What the JSON file holds."""
    rows = {}
    for name, found in losses.items():
        ratios = [loss / other for loss, other in zip(found, losses[REFERENCE], strict=True)]
        rows[name] = {
            "losses": found,
            "mean": sum(found) / len(found),
            "of_reference": sum(ratios) / len(ratios),
            "largest_deviation": max(abs(ratio - 1) for ratio in ratios),
        }
    done = seeds[: len(losses[REFERENCE])]
    return {"steps": steps, "seeds": done, "overrides": overrides, "reference": REFERENCE, "rows": rows}


if __name__ == "__main__":
    main()
