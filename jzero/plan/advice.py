"""What to change where something does not fit or is exposed, with the number that the change would give.

Here the numbers are formulas over the report (bytes that would go, collectives that would be shorter or hidden), and
say so; `jzero plan` compiles each changed step, puts its numbers in their place, and leaves out what does not help.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from jzero.plan.result import Advice, CollectiveUse, Report

if TYPE_CHECKING:
    from jzero.train.config import Config

GIB, MIB = 2**30, 2**20
EXPOSED_SHARE = 0.01  # of the step, from which on it is worth a line


def advise(report: Report) -> list[Advice]:
    """Advice for any step."""
    return [*_donate(report), *_too_large(report), *_exposed(report)]


def advise_config(report: Report, config: Config, abstract: Any) -> list[Advice]:
    """Advice for a step of the trainer: which keys to set.

    Args:
        report: without advice.
        config: the run.
        abstract: the parameters' tree of shapes.
    """
    found = list(_shrink(report, config, abstract)) if not report.memory.fits else []
    found += _hide(report, config)
    return found or [*_too_large(report), *_exposed(report)]


# --- any step --------------------------------------------------------------------------------------------------------


def _donate(report: Report) -> Iterator[Advice]:
    memory = report.memory
    if memory.outputs > max(0.05 * memory.peak, MIB):
        text = f"{memory.outputs / GIB:,.2f} GiB of results get memory of their own"
        text += "; donate the arguments that they replace (donate_argnums of jax.jit)"
        yield Advice(text, (), _peak(report, memory.outputs))


def _too_large(report: Report) -> Iterator[Advice]:
    memory = report.memory
    if memory.fits or not memory.largest:
        return
    first = memory.largest[0]
    text = (
        f"the step needs {(memory.peak - memory.limit) / GIB:,.2f} GiB too much; its largest temporary is {first.array}"
    )
    yield Advice(f"{text} ({first.name}): recompute or split it", (), _peak(report, first.bytes))


def _exposed(report: Report) -> Iterator[Advice]:
    """The worst collective, if it matters."""
    if report.exposed_ms <= EXPOSED_SHARE * report.step_ms:
        return
    worst = max(report.collectives, key=lambda use: use.exposed_ms)
    where = f" in {worst.loop}" if worst.loop else ""
    how = "is waited for at once: start it before independent compute" if not worst.between else (
        f"hides only {100 * worst.hidden:.0f}%: start it earlier or make it smaller (a lower combine threshold)"
    )  # fmt: skip
    yield Advice(f"{_named(worst)}{where} {how}", (), _faster(report, worst.exposed_ms))


# --- memory of the trainer's step ------------------------------------------------------------------------------------


def _shrink(report: Report, config: Config, abstract: Any) -> Iterator[Advice]:
    """Ways to need less memory, the cheapest in time first."""
    m, data = config.model, config.data_parallel_size
    size = lambda tree: sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
    width = config.param_dtype.itemsize
    if m.grad_accumulation == "local" and config.num_micro_batches > 1 and config.zero and data > 1:
        saved = 4 * size(abstract) * (data - 1) // data
        text = "the summed gradient is kept whole in float32; reduce every micro-batch into this rank's shard"
        yield Advice(text, ("model.grad_accumulation=sharded",), _peak(report, saved))
    if config.zero and data > 1 and config.policy != "gather_twice":
        kept = size(abstract) * (data - 1) // data if config.policy == "replicated" else size(abstract["blocks"])
        text = "whole weights are kept; keep shards and gather layer by layer, in forward and backward"
        keys = ("model.optim.policy=gather_twice", "model.optim.overlap_param_sync=true")
        yield Advice(text, keys, _peak(report, width * kept))
    stacked = _stacked(report, config)
    if stacked and m.activations_checkpoint_granularity != "full":
        inputs = width * m.num_layers * m.micro_batch_size * m.encoder_seq_length * m.hidden_size
        text = f"{stacked / GIB:,.2f} GiB of activations are kept for the backward pass; keep only the layers' inputs"
        yield Advice(text, ("model.activations_checkpoint_granularity=full",), _peak(report, stacked - inputs))
    if m.micro_batch_size % 2 == 0:
        text = "activations grow with the micro-batch; halve it"
        yield Advice(text, (f"model.micro_batch_size={m.micro_batch_size // 2}",), _peak(report, stacked // 2))


def _stacked(report: Report, config: Config) -> int:
    """Bytes of temporaries that hold one piece per layer and micro-batch row: activations."""
    m = config.model
    lead = (m.num_layers, m.micro_batch_size)
    return sum(t.bytes for t in report.memory.largest if t.array.dims[:2] == lead)


# --- communication of the trainer's step -----------------------------------------------------------------------------


def _hide(report: Report, config: Config) -> Iterator[Advice]:
    """Ways to hide communication."""
    if report.exposed_ms <= EXPOSED_SHARE * report.step_ms:
        return
    totals, m = report.totals(), config.model
    gathers = sum(use.exposed_ms for (kind, _), use in totals.items() if kind == "all-gather")
    scatters = sum(use.exposed_ms for (kind, _), use in totals.items() if kind == "reduce-scatter")
    if config.policy == "replicated" and gathers > 0.5 * EXPOSED_SHARE * report.step_ms:
        text = (
            f"{gathers:,.2f} ms of the gather after the update are exposed; gather layer by layer in the next forward"
        )
        yield Advice(text, ("model.optim.overlap_param_sync=true",), _faster(report, gathers))
    if config.trainer.num_nodes > 1 and m.replica_parallel_size == 1:
        text = "the data axis crosses the network; keep shards inside a machine and repeat them on every machine"
        saved = (gathers + scatters) * (1 - 1 / config.trainer.num_nodes)
        yield Advice(text, (f"model.replica_parallel_size={config.trainer.num_nodes}",), _faster(report, saved))
    if scatters > 0.5 * EXPOSED_SHARE * report.step_ms and config.model.optim.grad_sync_dtype is None:
        text = (
            f"{scatters:,.2f} ms of float32 reduce-scatter are exposed; bfloat16 on the wire halves them (and rounds)"
        )
        yield Advice(text, ("model.optim.grad_sync_dtype=bf16",), _faster(report, scatters / 2))
    if config.num_micro_batches > 1 and report.memory.fits and (
        m.grad_accumulation == "sharded" or config.policy == "gather_twice"
    ):  # fmt: skip
        text = "every micro-batch communicates; twice as large ones do it half as often"
        yield Advice(
            text, (f"model.micro_batch_size={2 * m.micro_batch_size}",), _faster(report, report.exposed_ms / 2)
        )
    if config.num_micro_batches == 1:
        text = "one micro-batch per step; with twice the global batch the step communicates as much and computes twice"
        longer = 2 * (report.step_ms - report.exposed_ms) + report.exposed_ms
        effect = f"exposed {100 * report.exposed_ms / longer:.1f}% of the step instead of {_share(report)}"
        yield Advice(text, (f"model.global_batch_size={2 * m.global_batch_size}",), effect)


def measured(advice: Advice, before: Report, after: Report) -> Advice:
    """Advice with the numbers of the changed step, compiled."""
    rows = [
        ("peak", "GiB", before.memory.peak / GIB, after.memory.peak / GIB),
        ("step", "ms", before.step_ms, after.step_ms),
        ("exposed", "%", 100 * before.exposed_ms / before.step_ms, 100 * after.exposed_ms / after.step_ms),
    ]
    effect = "; ".join(f"{name} {new:,.2f} {unit} instead of {old:,.2f}" for name, unit, old, new in rows)
    effect += f"; tokens/s {after.tokens_per_second or 0:,.0f} instead of {before.tokens_per_second or 0:,.0f}"
    if not before.memory.fits:
        effect += "; fits" if after.memory.fits else "; still too much"
    return dataclasses.replace(advice, effect=effect, how="compiled")


def helps(before: Report, after: Report) -> bool:
    """Whether a changed step is better: smaller where the first does not fit, else one that fits and is faster."""
    if not before.memory.fits:
        return after.memory.peak < before.memory.peak
    return after.memory.fits and (after.tokens_per_second or 0) > (before.tokens_per_second or 0)


# --- words -----------------------------------------------------------------------------------------------------------


def _peak(report: Report, saved: int) -> str:
    memory = report.memory
    fits = "fits" if memory.peak - saved <= memory.limit else "still too much"
    return f"peak about {(memory.peak - saved) / GIB:,.2f} GiB instead of {memory.peak / GIB:,.2f}, {fits}"


def _faster(report: Report, saved_ms: float) -> str:
    return f"step about {report.step_ms - saved_ms:,.2f} ms instead of {report.step_ms:,.2f}"


def _share(report: Report) -> str:
    return f"{100 * report.exposed_ms / report.step_ms:.1f}%"


def _named(use: CollectiveUse) -> str:
    return f"{use.kind} of {use.bytes / use.count / MIB:,.1f} MiB over {use.axis} ({use.count} calls)"
