"""The timetable of a pipeline: which stage runs what in which tick. Pure data, without JAX.

The layers are cut into S · V chunks; chunk c of stage s holds the layers at place c · S + s, so an activation that
leaves the last stage enters the next chunk of the first (Narayanan et al., https://arxiv.org/abs/2104.04473). In a tick
a stage does at most one forward and one backward pass of a chunk; what they make is sent on between two ticks. With one
chunk per stage this is 1F1B, with V it is interleaved 1F1B: V times as many, V times shorter ticks, and the same S - 1
of them idle in each direction.

    S = 2, V = 1, M = 3                 tick 0    1       2       3       4
                             stage 0    f0        f1      f2 b0   b1      b2
                             stage 1              f0 b0   f1 b1   f2 b2           (b0 of stage 1 follows its own f0)

Letters: S stages, V chunks per stage, M micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from jzero.errors import JzeroError

IDLE = -1


class Work(NamedTuple):
    """What stages do in one direction: int32 each, [ticks, S] in a timetable, [] in what one stage reads of it."""

    micro_batch: Any  # IDLE: nothing
    chunk: Any  # of this stage's own chunks
    slot: Any  # where the forward pass leaves what the backward pass needs


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
    """All ticks of a step.

    Attributes:
        stages, chunks, micro_batches: S, V and M.
        forward, backward: the work of every tick and stage. In a tick the forward pass comes first.
        slots: how many forward passes wait for their backward pass at a time, at most, on any stage.
    """

    stages: int
    chunks: int
    micro_batches: int
    forward: Work
    backward: Work
    slots: int

    @property
    def ticks(self) -> int:
        """Number of ticks."""
        return len(self.forward.chunk)

    def idle_share(self, backward_cost: int = 2) -> Fraction:
        """Share of the time in which a stage waits: (S - 1) / (V M + S - 1). A tick is as long as its busiest stage.

        Args:
            backward_cost: time of a backward pass, where a forward pass takes 1.
        """
        busy = (self.forward.micro_batch != IDLE) + backward_cost * (self.backward.micro_batch != IDLE)
        return 1 - Fraction(int(busy.sum()), int(self.stages * busy.max(1).sum()))


@functools.cache
def timetable(stages: int, chunks: int, micro_batches: int) -> Timetable:
    """1F1B for one chunk per stage, interleaved 1F1B for several.

    Args:
        stages: S.
        chunks: V, chunks of layers per stage.
        micro_batches: M; a multiple of S where V > 1, as S micro-batches go through a chunk one after the other.

    Raises:
        JzeroError: a number is not positive, or S does not divide M; names the two numbers.

    Example:
        >>> table = timetable(2, 1, 3)
        >>> table.ticks, table.slots, table.idle_share()
        (5, 3, Fraction(1, 4))
        >>> table.forward.micro_batch.T.tolist()
        [[0, 1, 2, -1, -1], [-1, 0, 1, 2, -1]]
    """
    if min(stages, chunks, micro_batches) < 1:
        raise JzeroError(
            f"pipeline: expected positive numbers, found {stages} stages, {chunks} chunks per stage and "
            f"{micro_batches} micro-batches"
        )
    check_micro_batches(stages, chunks, micro_batches)
    units = np.arange(chunks * micro_batches)  # the forward passes of a stage, in order
    # S micro-batches go through one chunk, then the same S through the next one
    group, within = np.divmod(units, stages * chunks)
    chunk, place = np.divmod(within, stages)
    micro, chunk = (group * stages + place, chunk) if chunks > 1 else (units, np.zeros_like(units))
    first_backward = stages * chunks - 1  # the last stage has run its last chunk of micro-batch 0 in this tick
    ticks = chunks * micro_batches + stages * chunks + stages - 2
    forward, backward = ([np.full((ticks, stages), fill) for fill in (IDLE, 0, 0)] for _ in range(2))
    for stage in range(stages):
        at = units + stage
        forward[0][at, stage], forward[1][at, stage] = micro, chunk
        at = units + first_backward + stages - 1 - stage
        backward[0][at, stage], backward[1][at, stage] = micro, chunks - 1 - chunk
    slots = max(_assign_slots(forward, backward, stage) for stage in range(stages))
    forwards, backwards = (Work(*(x.astype(np.int32) for x in work)) for work in (forward, backward))
    return Timetable(stages, chunks, micro_batches, forwards, backwards, slots)


def forward_passes(stages: int, chunks: int, micro_batches: int) -> Work:
    """The forward passes alone, for any number of micro-batches: what an evaluation runs, its slots of no meaning.

    Example:
        >>> forward_passes(2, 2, 1).chunk.T.tolist(), forward_passes(2, 2, 1).micro_batch.T.tolist()
        ([[0, 0, 1, 0], [0, 0, 0, 1]], [[0, -1, 0, -1], [-1, 0, -1, 0]])
    """
    work = timetable(stages, chunks, -(-micro_batches // stages) * stages).forward
    micro_batch = np.where(work.micro_batch < micro_batches, work.micro_batch, IDLE)
    ticks = np.flatnonzero((micro_batch != IDLE).any(1))[-1] + 1
    idle = micro_batch == IDLE
    return Work(micro_batch[:ticks], np.where(idle, 0, work.chunk)[:ticks], np.where(idle, 0, work.slot)[:ticks])


def check_micro_batches(stages: int, chunks: int, micro_batches: int) -> None:
    """Refuse a number of micro-batches that does not divide into groups of S where stages have several chunks.

    Raises:
        JzeroError: names the two numbers.
    """
    if chunks > 1 and micro_batches % stages:
        raise JzeroError(
            f"micro-batches: {micro_batches} is not divisible by model.pipeline_model_parallel_size {stages}, as "
            "model.virtual_pipeline_model_parallel_size needs; change global_batch_size or micro_batch_size, or set "
            "virtual_pipeline_model_parallel_size to null"
        )


def _assign_slots(forward: list[np.ndarray], backward: list[np.ndarray], stage: int) -> int:
    """Gives each forward pass of a stage the lowest free slot until its backward pass is done; how many there are."""
    waiting: dict[tuple[int, int], int] = {}
    count = 0
    for tick in range(len(forward[0])):
        micro, chunk = forward[0][tick, stage], forward[1][tick, stage]
        if micro != IDLE:
            slot = next(n for n in range(count + 1) if n not in waiting.values())
            waiting[micro, chunk] = forward[2][tick, stage] = slot
            count = max(count, slot + 1)
        micro, chunk = backward[0][tick, stage], backward[1][tick, stage]
        if micro != IDLE:
            backward[2][tick, stage] = waiting.pop((micro, chunk))
    return count
