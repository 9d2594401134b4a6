"""Final validation loss of `configs/gpt_tiny.yaml` in every precision mode, against float32 state.

    python benchmarks/precision.py [--steps N] [--modes NAME ...] [--overrides KEY=VALUE ...] [--json FILE]

Every run has the same initial weights, batches and schedule; what differs is how parameters, masters and moments are
stored. The reference has bfloat16 parameters with float32 masters and moments. Printed are the losses, and each as a
fraction of the reference's. Runs that differ by rounding alone drift apart by some tenths of a percent.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from typing import Any

from jzero.errors import JzeroError
from jzero.train.config import Config, load_config
from jzero.train.config_check import validate
from jzero.train.loop import TrainResult, train

CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "gpt_tiny.yaml"
BF16, OPTIM = "trainer.precision=bf16", "model.optim."
NARROW = [f"{OPTIM}master=none", f"{OPTIM}exp_avg_dtype=bf16", f"{OPTIM}exp_avg_sq_dtype=bf16"]
SCALED = [f"{OPTIM}{name}=scaled_fp16" for name in ("master", "exp_avg_dtype", "exp_avg_sq_dtype")]
FP8 = ["model.fp8=true", "model.fp8_params=true"]
REFERENCE = "bf16, fp32 master and moments"
MODES = {
    "fp32 parameters and moments": ["trainer.precision=32"],
    REFERENCE: [BF16, f"{OPTIM}master=fp32"],
    "bf16, remainder, fp32 moments": [BF16, f"{OPTIM}master=remainder"],
    "bf16, no master, bf16 moments": [BF16, *NARROW],
    "the same, rounded stochastically": [BF16, *NARROW, f"{OPTIM}stochastic_rounding=true"],
    "bf16, scaled fp16 master and moments": [BF16, *SCALED],
    "bf16, remainder, scaled fp8 m, scaled fp16 v": [
        BF16, f"{OPTIM}master=remainder", f"{OPTIM}exp_avg_dtype=scaled_fp8", f"{OPTIM}exp_avg_sq_dtype=scaled_fp16"
    ],
    "fp8 products, bf16 parameters": [BF16, "model.fp8=true"],
    "fp8 products and parameters": [BF16, *FP8],
    "the same, scaled fp16 master and moments": [BF16, *FP8, *SCALED],
    "fp32, bf16 gradients and parameters on the wire": [
        "trainer.precision=32", f"{OPTIM}grad_sync_dtype=bf16", f"{OPTIM}param_sync_dtype=bf16"
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: the configuration's")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES), help="besides the reference")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    names = [name for name in MODES if name in (*args.modes, REFERENCE)]
    losses: dict[str, float] = {}
    try:
        for name in sorted(names, key=lambda n: n != REFERENCE):
            losses[name] = run(MODES[name], args.steps, args.overrides)
            if args.json:
                args.json.write_text(json.dumps(result(losses, args.steps), indent=2) + "\n")
    except JzeroError as error:
        parser.error(str(error))
    for name in names:
        print(f"{name:52}{losses[name]:9.4f}{losses[name] / losses[REFERENCE]:9.4f}")


def run(mode: list[str], steps: int | None, overrides: list[str], path: pathlib.Path = CONFIG) -> float:
    """The final validation loss of one run, in nats per token."""
    changed = [*overrides, *mode]
    if steps is not None:
        warmup = min(load_config(path, overrides).model.optim.sched.warmup_steps, steps // 4)
        changed += [f"trainer.max_steps={steps}", f"model.optim.sched.warmup_steps={warmup}"]
    config = load_config(path, [*changed, "generate.tokens=0"])
    validate(config)
    loss = finished(config).val_loss
    assert loss is not None
    return loss


def finished(config: Config) -> TrainResult:
    """A run to its end, which has a validation loss; its folder is gone by then."""
    with tempfile.TemporaryDirectory() as folder:
        manager = dataclasses.replace(
            config.exp_manager, exp_dir=folder, create_checkpoint_callback=False, create_tensorboard_logger=False
        )
        result = train(dataclasses.replace(config, exp_manager=manager))
    if result.stopped or result.val_loss is None:
        raise JzeroError("the run was stopped before its last evaluation, so there is nothing to compare; start again")
    return result


def result(losses: dict[str, float], steps: int | None) -> dict[str, Any]:
    """What the JSON file holds."""
    rows = {name: {"loss": loss, "of_reference": loss / losses[REFERENCE]} for name, loss in losses.items()}
    return {"steps": steps or load_config(CONFIG).trainer.max_steps, "reference": REFERENCE, "rows": rows}


if __name__ == "__main__":
    main()
