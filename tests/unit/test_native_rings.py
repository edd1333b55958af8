"""Rings in one process: counts, turns, limits and locks. Two processes are in tests/process."""

from __future__ import annotations

import itertools
import math
import mmap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream._native import Rings, format_segment, segment_nbytes

SHAPE = (3, 2, 100, 5000)


def segment(*shape: int) -> mmap.mmap:
    memory = mmap.mmap(-1, segment_nbytes(*shape))
    format_segment(memory, *shape)
    return memory


@pytest.fixture
def rings() -> Rings:
    return Rings(segment(*SHAPE))


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
@settings(deadline=None)
def test_a_ring_gives_back_what_was_pushed_in_order(moves: list[tuple[int, bool]]) -> None:
    memory = segment(*SHAPE)
    rings = Rings(memory)
    waiting: list[list[int]] = [[], [], []]
    pushed, last = 0, 2
    for learner, pushes in moves:
        if pushes:
            slot = rings.reserve(learner, 0.0)
            assert (slot is None) == (len(waiting[learner]) == SHAPE[1])
            if slot is not None:
                pushed += 1
                memory[rings.slot_at(learner, slot)] = pushed
                rings.publish(learner)
                waiting[learner].append(pushed)
            continue
        ready = rings.next(last, 0.0)
        assert (ready is None) == (not any(waiting))
        if ready is not None:
            # The first in turn after the last that was served.
            turn = [(last + step) % 3 for step in (1, 2, 3)]
            assert ready[0] == next(each for each in turn if waiting[each])
            last = ready[0]
            assert memory[rings.slot_at(*ready)] == waiting[last].pop(0)
            rings.release(last)


def test_slots_and_weights_lie_apart() -> None:
    memory = segment(*SHAPE)
    rings = Rings(memory)
    spans = [(rings.weights_at, rings.weights_at + SHAPE[3])]
    spans += [
        (rings.slot_at(learner, slot), rings.slot_at(learner, slot) + SHAPE[2])
        for learner in range(3)
        for slot in range(2)
    ]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= len(memory)
    assert all(begin % 64 == 0 for begin, _ in spans)


def test_what_is_discarded_makes_room(rings: Rings) -> None:
    for _ in range(2):
        rings.reserve(1, 0.0)
        rings.publish(1)
    assert rings.reserve(1, 0.0) is None
    for wrong in (0, 2, 5):
        with pytest.raises(ValueError, match="has not published"):
            rings.discard(0 if wrong < 5 else 1, max(wrong, 1))
    rings.discard(1, 2)
    rings.discard(0, 0)
    assert rings.next(2, 0.0) is None
    assert rings.reserve(1, 0.0) == 0
    assert (rings.pushed(1), rings.taken(1)) == (2, 2)


def test_sleepers_are_woken(rings: Rings) -> None:
    """With limits so long that only being woken ends the sleep within the test's own."""
    found: list[object] = []
    server = threading.Thread(target=lambda: found.append(rings.next(2, 100.0)))
    server.start()
    time.sleep(0.1)
    rings.reserve(0, 0.0)
    rings.publish(0)
    server.join(60.0)
    assert found == [(0, 0)]
    rings.reserve(0, 0.0)
    rings.publish(0)
    learner = threading.Thread(target=lambda: found.append(rings.reserve(0, 100.0)))
    learner.start()
    time.sleep(0.1)
    rings.release(0)
    learner.join(60.0)
    assert found[1:] == [0]
    resting = threading.Thread(target=lambda: rings.rest(100.0))
    resting.start()
    time.sleep(0.1)
    rings.close()
    resting.join(60.0)
    assert not resting.is_alive()


def test_who_waits_takes_no_time_of_the_processor(rings: Rings) -> None:
    for _ in range(2):
        rings.reserve(0, 0.0)
        rings.publish(0)
    least_s = math.inf
    for _ in range(5):  # a virtual machine may count what its host took
        begun, used = time.monotonic(), time.thread_time()
        assert rings.reserve(0, 0.5) is None
        assert time.monotonic() - begun >= 0.5
        least_s = min(least_s, time.thread_time() - used)
        if least_s < 0.05:
            break
    assert least_s < 0.05


def test_versions_and_beats(rings: Rings) -> None:
    assert rings.version == 0
    assert [rings.advance(), rings.advance(), rings.version] == [1, 2, 2]
    rings.version = 70
    assert rings.advance() == 71
    before = rings.beat
    rings.next(0, 0.0)
    rings.rest(0.0)
    assert rings.beat == before + 2
    assert not rings.closing


# ---- weights that hold still


def test_readers_and_a_writer_keep_each_other_out(rings: Rings) -> None:
    assert rings.begin_reading(0, 0.0)
    assert rings.begin_reading(1, 0.0)
    assert not rings.begin_writing(3, 0.01)
    rings.end_reading(0)
    rings.end_reading(1)
    assert rings.begin_writing(3, 0.0)
    assert not rings.begin_reading(2, 0.01)
    assert not rings.begin_writing(1, 0.01)
    rings.end_writing()
    assert rings.begin_reading(2, 0.0)


def test_writer_that_gives_up_leaves_no_lock(rings: Rings) -> None:
    assert rings.begin_reading(0, 0.0)
    assert not rings.begin_writing(3, 0.01)
    assert rings.begin_reading(1, 0.0), "the writer that gave up still keeps readers out"
    rings.end_reading(0)
    rings.end_reading(1)
    assert rings.begin_writing(2, 0.0), "the writer that gave up still keeps writers out"


def test_last_reader_wakes_the_writer(rings: Rings) -> None:
    """With a limit so long that only being woken ends the sleep within the test's own."""
    assert rings.begin_reading(0, 0.0)
    written: list[bool] = []
    writer = threading.Thread(
        target=lambda: written.append(rings.begin_writing(3, 1e6)), daemon=True
    )
    writer.start()
    while rings.begin_reading(1, 0.0):  # until the writer keeps new readers out
        rings.end_reading(1)
    time.sleep(0.1)  # it now sleeps until the first reader has finished
    rings.end_reading(0)
    writer.join(20.0)
    assert written == [True]


def test_writer_wakes_readers_and_writers(rings: Rings) -> None:
    assert rings.begin_writing(3, 0.0)
    let_in: list[bool] = []
    reader = threading.Thread(
        target=lambda: let_in.append(rings.begin_reading(0, 1e6)), daemon=True
    )
    reader.start()
    time.sleep(0.1)
    rings.end_writing()
    reader.join(20.0)
    assert let_in == [True]


def test_the_dead_hold_nothing(rings: Rings) -> None:
    assert rings.begin_reading(0, 0.0)
    rings.release_dead(0)
    assert rings.begin_writing(1, 0.0)
    rings.release_dead(0)
    assert not rings.begin_reading(2, 0.01)
    rings.release_dead(1)
    assert rings.begin_reading(2, 0.0)
    rings.release_dead(3)  # the server


def test_who_comes_back_still_writes(rings: Rings) -> None:
    assert rings.begin_writing(3, 0.0)
    assert rings.begin_writing(3, 0.0)  # in its next incarnation
    assert not rings.begin_reading(0, 0.01)
    rings.end_writing()
    assert rings.begin_reading(0, 0.0)


def test_a_header_that_is_overwritten_leads_nobody_astray() -> None:
    memory = segment(*SHAPE)
    rings = Rings(memory)
    words = np.frombuffer(memory, np.uint64, 5)
    assert words[1:].tolist() == list(SHAPE)
    words[1:] = 1 << 30
    assert (rings.learners, rings.slots) == SHAPE[:2]
    with pytest.raises(ValueError, match="there is no learner 1000"):
        rings.pushed(1000)


def test_a_copy_is_of_one_moment() -> None:
    memory = segment(2, 1, 64, 8 * 4096)
    rings = Rings(memory)
    at = rings.weights_at
    values = np.frombuffer(memory, np.int64, 4096, at)
    stop = threading.Event()

    def write(who: int) -> None:
        while not stop.is_set():
            if rings.begin_writing(who, 1.0):
                values[:2048] += 1
                values[2048:] += 1
                rings.end_writing()

    writers = [threading.Thread(target=write, args=(who,)) for who in (1, 2)]
    for writer in writers:
        writer.start()
    copies = []
    for _ in range(200):
        assert rings.begin_reading(0, 60.0)
        copies.append(values.copy())
        rings.end_reading(0)
    stop.set()
    for writer in writers:
        writer.join()
    assert all((copy == copy[0]).all() for copy in copies)
    assert (values == values[0]).all()


# ---- what is no segment


@pytest.mark.parametrize(
    "shape",
    [
        (0, 1, 1, 1),
        (1, 0, 1, 1),
        (1, 1, 0, 1),
        (1, 1, 1, 0),
        (5000, 1, 1, 1),
        (4000, 4000, 1 << 40, 1),
        (1, 1, 1 << 41, 1),
        (1, 1, 1, (1 << 64) - 1),
    ],
)
def test_shapes_that_no_memory_has(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no segment has"):
        segment_nbytes(*shape)


def test_other_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="does not begin as a segment does"):
        Rings(mmap.mmap(-1, 1 << 16))
    with pytest.raises(ValueError, match="shorter than a segment's header"):
        Rings(mmap.mmap(-1, 64))
    memory = segment(*SHAPE)
    with pytest.raises(ValueError, match="another size than its header says"):
        Rings(memoryview(memory)[:-4096])
    with pytest.raises(ValueError, match="where a segment takes"):
        format_segment(memory, 4, 2, 100, 5000)
    with pytest.raises(ValueError, match="writable"):
        Rings(bytes(memory))


def test_learners_and_slots_that_are_not_there(rings: Rings) -> None:
    for call in (rings.publish, rings.release, rings.pushed, rings.end_reading):
        with pytest.raises(ValueError, match="there is no learner 3"):
            call(3)
    with pytest.raises(ValueError, match="there is no slot 2"):
        rings.slot_at(0, 2)
