"""The schedule of micro-batches on each stage of a pipeline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.parallel.pipeline_schedule import Schedule, StageWork, schedule

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 12))


def ticks_of(work: StageWork, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Return the tick of each (stage, chunk, micro-batch); each has exactly one."""
    ticks = np.full((stages, chunks, micro_batches), -1)
    for tick, stage in zip(*np.nonzero(work.micro_batch >= 0)):
        at = stage, work.chunk[tick, stage], work.micro_batch[tick, stage]
        assert ticks[at] == -1
        ticks[at] = tick
    assert (ticks >= 0).all()
    return ticks


def in_turn(ticks: np.ndarray) -> np.ndarray:
    """Return ticks as (parts of the model in layer order, micro-batches)."""
    return ticks.swapaxes(0, 1).reshape(-1, ticks.shape[2])


@given(SHAPES, st.sampled_from(["1f1b", "gpipe"]))
def test_each_part_takes_each_micro_batch_in_the_tick_after_the_part_before(shape, order):
    made = schedule(*shape, order)
    forward, backward = (in_turn(ticks_of(work, *shape)) for work in made.ticks[:2])
    assert (np.diff(forward, axis=0) == 1).all() and (np.diff(backward, axis=0) == -1).all()
    assert (forward[-1] <= backward[-1]).all()
    micro = np.arange(shape[2])
    for ends, ticks in zip(made.ticks[2:], (forward[0], forward[-1], backward[0])):
        assert (ends[ticks] == micro).all() and (ends >= 0).sum() == len(micro)


@given(SHAPES, st.sampled_from(["1f1b", "gpipe"]))
def test_what_a_stage_holds_is_overwritten_by_nothing(shape, order):
    made = schedule(*shape, order)
    for stage in range(shape[0]):
        held: dict[int, tuple[int, int]] = {}
        for forward, backward in zip(zip(*made.ticks.forward), zip(*made.ticks.backward)):
            micro_batch, chunk, slot = (column[stage] for column in forward)
            if micro_batch >= 0:
                assert slot not in held and slot < made.slots
                held[slot] = micro_batch, chunk
            micro_batch, chunk, slot = (column[stage] for column in backward)
            if micro_batch >= 0:
                assert held.pop(slot) == (micro_batch, chunk)
        assert not held


def test_1f1b_holds_no_more_of_more_micro_batches_and_gpipe_holds_all():
    held = [[schedule(4, 1, count, order).slots for count in (8, 64)] for order in ("1f1b", "gpipe")]
    assert held == [[7, 7], [8, 64]]
    assert schedule(4, 2, 64, "1f1b").slots == schedule(4, 2, 16, "1f1b").slots
    assert [schedule(4, 1, 8, order).waiting for order in ("1f1b", "gpipe")] == [1, 8]


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), [(4, 1, 8), (4, 2, 8), (2, 4, 6), (1, 1, 3)])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_stages_wait_as_long_as_published(stages, chunks, micro_batches, order):
    """Narayanan et al. 2021, section 2.2: (p - 1) / m of the used time, divided by v with v chunks."""
    made: Schedule = schedule(stages, chunks, micro_batches, order)
    waits = (stages - 1) / chunks / micro_batches
    assert made.bubble == pytest.approx(waits / (1 + waits))
