"""The timetable of a pipeline: everything once, nothing before what it needs, as little idle time as 1F1B has."""

from fractions import Fraction

import pytest

from jzero import JzeroError
from jzero.parallel.timetable import IDLE, timetable

SIZES = [(1, 1, 1), (1, 1, 5), (2, 1, 1), (2, 1, 5), (4, 1, 2), (4, 1, 9), (8, 1, 16),
         (1, 2, 3), (2, 2, 2), (2, 3, 8), (4, 2, 4), (4, 4, 12), (8, 2, 16)]  # fmt: skip


def passes(work):
    """When and where each pass runs: {(place of the chunk among all, micro-batch): (tick, stage)}, and its slot."""
    found, slots = {}, {}
    ticks, stages = work.micro_batch.shape
    for tick in range(ticks):
        for stage in range(stages):
            micro = int(work.micro_batch[tick, stage])
            if micro != IDLE:
                key = int(work.chunk[tick, stage]) * stages + stage, micro
                assert key not in found, f"{key} runs twice"
                found[key], slots[key] = (tick, stage), int(work.slot[tick, stage])
    return found, slots


@pytest.mark.parametrize("size", SIZES)
def test_every_chunk_of_every_micro_batch_runs_once_each_way_after_what_it_needs(size):
    stages, chunks, micro_batches = size
    table = timetable(*size)
    (forward, _), (backward, _) = passes(table.forward), passes(table.backward)
    wanted = {(place, micro) for place in range(stages * chunks) for micro in range(micro_batches)}
    assert set(forward) == set(backward) == wanted
    for place, micro in wanted:
        assert backward[place, micro][0] >= forward[place, micro][0]
        # what the neighbour makes is sent at the end of its tick, and is not kept: it is used in the very next one
        if place:
            assert forward[place, micro][0] == forward[place - 1, micro][0] + 1
            assert forward[place, micro][1] == (forward[place - 1, micro][1] + 1) % stages
            assert backward[place - 1, micro][0] == backward[place, micro][0] + 1
        else:
            last = stages * chunks - 1, micro
            assert backward[last][0] == forward[last][0], "the head runs backward in the tick that reaches it"


@pytest.mark.parametrize("size", SIZES)
def test_idle_share(size):
    stages, chunks, micro_batches = size
    table = timetable(*size)
    for cost in (1, 2, 3):
        assert table.idle_share(cost) == Fraction(stages - 1, chunks * micro_batches + stages - 1)


@pytest.mark.parametrize("size", SIZES)
def test_no_slot_is_taken_twice_and_their_number_does_not_grow_with_micro_batches(size):
    stages, chunks, _ = size
    table = timetable(*size)
    (forward, put), (backward, taken) = passes(table.forward), passes(table.backward)
    assert put == taken
    assert max(put.values()) == table.slots - 1
    for stage in range(stages):
        mine = [k for k in forward if forward[k][1] == stage]
        for a in mine:
            for b in mine:
                both = a != b and put[a] == put[b]
                assert not both or backward[a][0] < forward[b][0] or backward[b][0] < forward[a][0]
    many = timetable(stages, chunks, 16 * stages)
    assert many.slots == timetable(stages, chunks, 32 * stages).slots <= 2 * stages * chunks - 1
    if chunks == 1:
        assert many.slots == 2 * stages - 1


@pytest.mark.parametrize(
    ("size", "match"),
    [
        ((4, 2, 6), "micro-batches: 6 is not divisible by model.pipeline_model_parallel_size 4"),
        ((0, 1, 1), "expected positive numbers, found 0 stages, 1 chunks per stage and 1 micro-batches"),
    ],
)
def test_bad_sizes_are_refused(size, match):
    with pytest.raises(JzeroError, match=match):
        timetable(*size)
