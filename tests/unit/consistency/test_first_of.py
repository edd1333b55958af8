"""Who makes a round, decided in one place."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import FirstOf
from slipstream.consistency.decisions import Decision, Late, Made
from slipstream.consistency.first_of import Agreement
from slipstream.errors import FrameRefused


def agreement(
    workers: int, first: int, holders: int = 1, close_after_s: float | None = None
) -> Agreement:
    rule = FirstOf(first=first, close_after_s=close_after_s).among(workers)
    return Agreement(rule, workers, holders)


def test_a_worker_is_in_when_every_holder_has_its_whole_gradient() -> None:
    state = agreement(3, first=2, holders=2)
    assert state.arrived(0, 2, 0, 0.1) == []
    assert state.arrived(0, 1, 0, 0.2) == []
    assert state.arrived(0, 0, 0, 0.3) == []
    assert state.arrived(1, 1, 0, 0.4) == []
    assert state.arrived(1, 0, 0, 0.5) == [Made(0, (0, 1))]
    assert state.arrived(1, 2, 0, 0.6) == [Late(1, 2)]
    assert (state.record.made, state.record.dropped) == (Counter({0: 1, 1: 1}), Counter({2: 1}))


def test_two_reports_of_one_holder_are_one() -> None:
    state = agreement(2, first=1, holders=2)
    assert state.arrived(0, 1, 0, 0.0) == state.arrived(0, 1, 0, 0.0) == []
    assert state.arrived(1, 1, 0, 0.0) == [Made(0, (1,))]


def test_a_gradient_that_was_late_is_answered_once_however_often_it_is_reported() -> None:
    state = agreement(2, first=1, holders=2)
    for holder in (0, 1):
        decided = state.arrived(holder, 0, 0, 0.0)
    assert decided == [Made(0, (0,))]
    assert state.arrived(0, 1, 0, 0.1) == []
    assert state.arrived(1, 1, 0, 0.1) == [Late(1, 1)]
    for holder in (0, 1, 0, 1):
        assert state.arrived(holder, 1, 0, 0.2) == []
    assert state.record.dropped == Counter({1: 1})


def test_reports_that_never_become_whole_take_no_memory() -> None:
    state = agreement(2, first=1, holders=2)
    for round_ in range(50):
        for holder in (0, 1):
            state.arrived(holder, 0, round_, float(round_))
        assert state.arrived(0, 1, round_, float(round_)) == []  # never at the other holder
    assert sum(map(len, state._reports._last.values())) == 3


def test_a_round_that_is_not_open_yet_is_refused() -> None:
    with pytest.raises(FrameRefused, match="rank 1 is in round 1, but 0 is open"):
        agreement(2, first=2).arrived(0, 1, 1, 0.0)


def test_who_leaves_is_not_waited_for_and_what_comes_after_does_not_count() -> None:
    state = agreement(3, first=3, holders=2)
    for rank in (0, 1):
        state.arrived(0, rank, 0, 0.0)
        assert state.arrived(1, rank, 0, 0.0) == []
    state.arrived(0, 2, 0, 0.1)
    assert state.retire(2, 0.2) == [Made(0, (0, 1))]
    assert state.arrived(1, 2, 0, 0.3) == []
    assert not state.record.dropped
    assert state.members == {0, 1}


def test_a_gradient_that_is_in_counts_though_its_worker_is_lost() -> None:
    state = agreement(3, first=3)
    assert state.arrived(0, 2, 0, 0.0) == []
    assert state.retire(2, 0.1, lost=True) == []
    assert state.arrived(0, 0, 0, 0.2) == []
    assert state.arrived(0, 1, 0, 0.3) == [Made(0, (0, 1, 2))]


def test_who_was_lost_and_comes_back_is_waited_for_again() -> None:
    state = agreement(2, first=2)
    state.retire(1, 0.0, lost=True)
    assert state.arrived(0, 0, 0, 0.1) == [Made(0, (0,))]
    assert state.arrived(0, 1, 0, 0.2) == [Late(1, 1)]
    assert state.arrived(0, 0, 1, 0.3) == []
    assert state.arrived(0, 1, 1, 0.4) == [Made(1, (0, 1))]


def test_who_is_lost_with_half_a_gradient_delivered_is_served_when_the_rest_comes() -> None:
    state = agreement(3, first=1, holders=2)
    assert state.arrived(0, 2, 0, 0.0) == []
    state.retire(2, 0.1, lost=True)
    state.arrived(0, 0, 0, 0.2)
    assert state.arrived(1, 0, 0, 0.2) == [Made(0, (0,))]
    assert state.arrived(1, 2, 0, 0.3) == [Late(1, 2)]


def test_who_is_lost_while_it_waits_for_the_next_round_is_served_when_that_opens() -> None:
    state = agreement(3, first=1)
    state.arrived(0, 0, 0, 0.0)
    assert state.arrived(0, 2, 0, 0.1) == [Late(1, 2)]
    state.arrived(0, 0, 1, 0.2)
    assert state.arrived(0, 2, 1, 0.3) == []  # late twice running
    state.retire(2, 0.4, lost=True)
    assert state.arrived(0, 0, 2, 0.5) == [Made(2, (0,)), Late(3, 2)]


def test_held_worker_that_leaves_is_not_served() -> None:
    state = agreement(3, first=1)
    for round_ in (0, 1):
        state.arrived(0, 0, round_, 0.0)
        state.arrived(0, 2, round_, 0.1)  # late twice running
    assert state.retire(2, 0.2) == []
    assert state.arrived(0, 0, 2, 0.3) == [Made(2, (0,))]


def test_nobody_makes_a_round_of_nobody() -> None:
    state = agreement(2, first=1, close_after_s=1.0)
    assert state.tick(100.0) == []
    assert state.retire(0, 100.0) == state.retire(1, 100.0) == []


def test_time_closes_a_round_from_its_own_opening() -> None:
    """The first opens with its first gradient: when steps began, nobody has said."""
    state = agreement(3, first=3, close_after_s=1.0)
    assert state.tick(50.0) == []
    state.arrived(0, 0, 0, 100.5)
    assert state.tick(101.4) == []
    assert state.tick(101.5) == [Made(0, (0,))]
    assert state.arrived(0, 0, 1, 102.0) == []
    assert state.tick(102.4) == []
    assert state.tick(102.5) == [Made(1, (0,))]


def test_the_rule_of_the_next_round_may_be_another() -> None:
    rule = FirstOf(first=3, adapts=True)
    state = rule.decider(3, 1, reconsider=lambda rounds, durations, first: max(1, 3 - rounds))
    for rank in range(3):
        made = state.arrived(0, rank, 0, 0.0)
    assert made == [Made(0, (0, 1, 2))]
    assert state.arrived(0, 2, 1, 0.0) == []
    assert state.arrived(0, 1, 1, 0.0) == [Made(1, (1, 2))]
    assert state.arrived(0, 0, 2, 0.0) == [Made(2, (0,))]


def test_who_is_late_twice_running_begins_the_next_round_with_the_others() -> None:
    state = agreement(3, first=2)
    state.arrived(0, 0, 0, 0.0)
    state.arrived(0, 1, 0, 1.0)
    assert state.arrived(0, 2, 0, 1.5) == [Late(1, 2)]
    state.arrived(0, 0, 1, 2.0)
    assert state.arrived(0, 1, 1, 2.0) == [Made(1, (0, 1))]
    assert state.arrived(0, 2, 1, 2.5) == []
    state.arrived(0, 0, 2, 3.0)
    assert state.arrived(0, 1, 2, 3.0) == [Made(2, (0, 1)), Late(3, 2)]
    assert state.arrived(0, 2, 3, 4.0) == []
    assert state.arrived(0, 0, 3, 4.0) == [Made(3, (0, 2))]
    assert state.arrived(0, 1, 3, 4.1) == [Late(4, 1)]


def test_nobody_is_held_for_longer_than_rounds_take() -> None:
    """The others may be evaluating, or wait for this very worker."""
    state = agreement(3, first=2)
    for round_ in (0, 1):
        for rank in (0, 1):
            state.arrived(0, rank, round_, float(round_))
        state.arrived(0, 2, round_, round_ + 0.5)
    assert state.tick(3.4) == []
    assert state.tick(3.6) == [Late(2, 2)]
    assert state.tick(9.0) == []


@pytest.mark.parametrize("lost", [False, True])
def test_nobody_waits_for_a_round_that_cannot_be_made_without_them(lost: bool) -> None:
    state = agreement(3, first=2)
    for round_ in (0, 1):
        for rank in (0, 1):
            state.arrived(0, rank, round_, float(round_))
        state.arrived(0, 2, round_, round_ + 0.5)
    assert state.retire(1, 2.0, lost=lost) == [Late(2, 2)]
    assert state.arrived(0, 2, 2, 3.0) == []
    assert state.arrived(0, 0, 2, 3.0) == [Made(2, (0, 2))]


@given(
    workers=st.integers(1, 6),
    first=st.integers(1, 6),
    holders=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_gradient_is_decided_on_once(
    workers: int, first: int, holders: int, seed: int
) -> None:
    """Workers that go on with what they are told, and reports that come in any order."""
    state, chance = agreement(workers, min(first, workers), holders), random.Random(seed)
    pending = [(h, rank, 0) for h in range(holders) for rank in range(workers)]
    gave = Counter(range(workers))
    decided: list[Decision] = []
    for at in range(60):
        holder, rank, round_ = pending.pop(chance.randrange(len(pending)))
        new = state.arrived(holder, rank, round_, float(at))
        for decision in new:
            ranks = decision.ranks if isinstance(decision, Made) else (decision.rank,)
            for told in ranks:
                gave[told] += 1
                pending += [(h, told, state.round) for h in range(holders)]
        decided += new
    made = [decision for decision in decided if isinstance(decision, Made)]
    assert [decision.round for decision in made] == list(range(len(made)))
    assert all(len(decision.ranks) == min(first, workers) for decision in made)
    answered = Counter(
        rank for d in decided for rank in (d.ranks if isinstance(d, Made) else (d.rank,))
    )
    waiting = Counter(state._held.keys())  # for the next round to open
    assert state.record.made + state.record.dropped == answered + waiting
    assert all(gave[rank] == answered[rank] + 1 for rank in range(workers)), "one is under way"
