"""The board of a host in one process: what is published, who sleeps, what is refused."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream._native import HostBoard, board_nbytes

WORKERS, TENSORS = 3, 5


def board() -> HostBoard:
    return HostBoard(mmap.mmap(-1, board_nbytes(WORKERS, TENSORS)), WORKERS, TENSORS)


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4), st.booleans()), max_size=40))
@settings(deadline=None)
def test_a_tensor_has_arrived_when_all_but_the_first_have_published_it(
    moves: list[tuple[int, int, bool]],
) -> None:
    told, rounds = board(), dict.fromkeys(((w, t) for w in (1, 2) for t in range(5)), 0)
    present: dict[tuple[int, int], bool] = {}
    for worker, tensor, has in moves:
        told.publish(worker, tensor, rounds[worker, tensor], has)
        rounds[worker, tensor] += 1
        present[worker, tensor] = has
    for round_ in range(3):
        arrived = [t for t in range(5) if min(rounds[1, t], rounds[2, t]) > round_]
        assert told.arrived(round_, [4, 3, 2, 1, 0]) == arrived[::-1]
    for (worker, tensor), made in rounds.items():
        last = told.published(worker, tensor, made - 1) if made else None
        assert last == present.get((worker, tensor))
        assert told.published(worker, tensor, made) is None


def test_results_have_a_row_of_their_own() -> None:
    told = board()
    told.publish_result(3, 0, True)
    assert (told.result(3, 0), told.result(3, 1), told.result(2, 0)) == (True, None, None)
    assert told.arrived(0, [3]) == []
    told.publish_result(3, 1, False)
    assert told.result(3, 1) is False


def test_notes_are_a_workers_own_and_of_two_rounds() -> None:
    told = board()
    told.note(2, 7, 99)
    told.note(2, 8, 1 << 63)
    assert (told.noted(1, 7), told.noted(2, 7), told.noted(2, 8)) == (0, 99, 1 << 63)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 60), st.booleans())
@settings(deadline=None)
def test_a_word_tells_the_step_and_nothing_else_of_it(round_: int, step: int, has: bool) -> None:
    told = board()
    told.publish(1, 3, round_, has, step)
    assert told.step(1, 3) == step % (1 << 15)
    assert (told.published(1, 3, round_), told.published(1, 3, round_ + 1)) == (has, None)


def test_who_sleeps_is_woken_by_what_is_published_and_never_misses_it() -> None:
    """Thousands of turns. Each sleep is measured, not all of them: a busy machine takes long for
    the turns, but a sleep that lasts to its limit has missed a wake-up."""
    told, turns, limit_s = board(), 2000, 30.0
    slept_s = [0.0]

    def sleep(follows: bool, seen: int) -> None:
        begun = time.monotonic()
        told.sleep(follows, seen, limit_s)
        slept_s.append(time.monotonic() - begun)

    def follow() -> None:
        for round_ in range(turns):
            told.publish(1, 0, round_, True)
            while told.result(0, round_) is None:
                seen = told.bell(True)
                if told.result(0, round_) is None:
                    sleep(True, seen)

    follower = threading.Thread(target=follow)
    follower.start()
    for round_ in range(turns):
        while not (told.published(1, 0, round_)):
            seen = told.bell(False)
            if not told.published(1, 0, round_):
                sleep(False, seen)
        told.publish_result(0, round_, True)
    follower.join()
    assert max(slept_s) < limit_s


def test_what_is_not_on_the_board_is_refused() -> None:
    told = board()
    for act in (
        lambda: told.publish(3, 0, 0, True),
        lambda: told.publish(0, 5, 0, True),
        lambda: told.arrived(0, [5]),
        lambda: told.noted(3, 0),
        lambda: told.step(3, 0),
        lambda: board_nbytes(0, 1),
        lambda: HostBoard(mmap.mmap(-1, 64), 3, 5),
    ):
        with pytest.raises(ValueError, match=r"no worker|no tensor|no board|bytes"):
            act()
