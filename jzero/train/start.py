"""What a run opens before its first step, and what it checks and says then."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jzero.errors import JzeroError
from jzero.train.checkpoint import Checkpoints
from jzero.train.config import Config, ExpManager
from jzero.train.files import RunFolder, disk_errors
from jzero.train.identity import changed_keys
from jzero.train.metrics import Metrics
from jzero.train.record import Record
from jzero.train.schedule import schedule


def validation(config: Config, dataset: Any) -> tuple[Any, int]:
    """The validation dataset and how many batches of it an evaluation takes.

    No sample comes twice, unless there are fewer than one batch takes.

    Raises:
        JzeroError: there is none, and evaluations are asked for.
    """
    limit = config.trainer.limit_val_batches
    if limit and dataset is None:
        raise JzeroError(
            f"model.data.splits_string: expected documents for validation, found none with "
            f"{config.model.data.splits_string}; change it, or set trainer.limit_val_batches=0 to evaluate never"
        )
    whole = dataset.distinct // config.model.global_batch_size if limit else 0
    return dataset, min(limit, max(whole, 1))


def check_old_files(manager: ExpManager, path: Path) -> None:
    """Raises where a run folder holds files of an earlier run that this one may not continue, or could not.

    Raises:
        JzeroError: names the folder and what to set.

    Example:
        >>> check_old_files(ExpManager(resume_if_exists=False), Path("/no-such-run"))
    """
    old = [name for name in ("metrics.jsonl", "checkpoints") if (path / name).exists()]
    if old and not manager.resume_if_exists:
        raise JzeroError(
            f"run folder {path}: expected a new folder, found {old[0]} of an earlier run; "
            "set exp_manager.resume_if_exists=true to continue it, or another exp_manager.name"
        )
    if "checkpoints" in old and not manager.create_checkpoint_callback:
        raise JzeroError(
            f"run folder {path}: expected no checkpoints with exp_manager.create_checkpoint_callback=false, found "
            "those of an earlier run; set it to true to continue that run, or another exp_manager.name"
        )


def open_checkpoints(config: Config, path: Path, note: Callable[[str], None], plan: Any) -> Checkpoints | None:
    """The checkpoints of a run folder as the configuration wants them; None where it wants none."""
    manager, keep = config.exp_manager, config.exp_manager.checkpoint
    if not manager.create_checkpoint_callback:
        return None
    return Checkpoints(
        path,
        top_k=keep.save_top_k,
        last_k=keep.save_last_k,
        async_save=keep.async_save,
        note=note,
        plan=plan,
    )


def open_metrics(config: Config, folder: RunFolder, step: int) -> Metrics | None:
    """The metrics of a run that continues from `step`; None on processes that do not write."""
    if not folder.writer:
        return None
    with disk_errors(f"run {folder.path}"):
        return Metrics(
            folder.path,
            after_step=step,
            tensorboard=config.exp_manager.create_tensorboard_logger,
            tensorboard_every=config.trainer.log_every_n_steps,
        )


def plain(section: Any) -> Record:
    """A section of the configuration as JSON values.

    Example:
        >>> from jzero.train.config import Trainer
        >>> plain(Trainer())["precision"]
        'bf16'
    """
    return json.loads(json.dumps(dataclasses.asdict(section)))


def to_resume(config: Config, step: int) -> Record:
    """What a checkpoint says of the configuration that made it, for `what_changed`."""
    return {
        "model": plain(config.model),
        "mesh": config.mesh_shape,
        "max_steps": config.trainer.max_steps,
        "next_lr": _next_lr(config, step),
    }


def what_changed(record: Record, config: Config) -> list[str]:
    """Lines about settings that are not those of the checkpoint a run continues from.

    Args:
        record: that of the checkpoint, with what `to_resume` gave.
        config: now.

    Returns:
        At most two lines: where the run continues and which keys of the model changed; and, where it is another one,
        the learning rate of the next step.

    Raises:
        JzeroError: the batch has another size.
    """
    step, batch_size = record["step"], config.model.global_batch_size
    if record["samples"] != step * batch_size:
        raise JzeroError(
            f"model.global_batch_size: expected {record['samples'] // step} as in checkpoint {step}, found "
            f"{batch_size}; the position in the data is a number of batches"
        )
    changed = [f"model.{key}" for key in changed_keys(record["model"], plain(config.model))]
    meshes = zip(record["mesh"].items(), config.mesh_shape.values(), strict=True)
    changed += [f"mesh ({axis} {size}, now {now})" for (axis, size), now in meshes if size != now]
    lines = [f"continuing from step {step}" + (f"; changed since: {', '.join(changed)}" if changed else "")]
    before, now = record["next_lr"], _next_lr(config, step)
    if abs(now - before) > 1e-6 * abs(before):
        line = f"learning rate of step {step + 1}: {now:.3g}, before the change {before:.3g}"
        old, new = record["max_steps"], config.trainer.max_steps
        if old != new and config.model.optim.sched.max_steps is None:
            line += (
                f" (the schedule follows trainer.max_steps, {old} and now {new}; model.optim.sched.max_steps={old} "
                "keeps the old one)"
            )
        lines.append(line)
    return lines


def _next_lr(config: Config, step: int) -> float:
    return float(np.asarray(schedule(config)(step)))
