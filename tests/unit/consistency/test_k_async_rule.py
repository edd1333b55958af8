"""Updates of K gradients of any age: the rule, its ledger, and its decisions."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import (
    All,
    Asynchronous,
    Closed,
    Consistency,
    FirstOf,
    KAsync,
    StaleSynchronous,
)
from slipstream.consistency.decisions import Decision, Made
from slipstream.consistency.k_async import KAsyncDecider
from slipstream.consistency.ledgers import DecidedLedger
from slipstream.errors import ConfigError, FrameRefused


def decider(k: int, workers: int, holders: int = 1) -> KAsyncDecider:
    return KAsync(k).decider(workers, holders)


def ledger() -> DecidedLedger:
    made = Consistency(KAsync(2)).ledger(4)
    assert isinstance(made, DecidedLedger)
    return made


def test_a_rule_decides_for_all_holders_exactly_if_it_says_so() -> None:
    for rule in (All(), StaleSynchronous(), Asynchronous(), FirstOf(2), KAsync(2)):
        assert (rule.decider(3, 2) is not None) is rule.decided
        assert isinstance(rule.ledger(3, 0), DecidedLedger) is rule.decided


def test_late_gradients_count_and_a_lost_worker_is_no_error() -> None:
    consistency = Consistency(KAsync(2))
    assert consistency.agreed
    assert consistency.goes_on
    assert not consistency.drops_late
    assert not consistency.lockstep
    assert not consistency.alone
    assert consistency.follows(seen=1, begun=1, result=7)
    assert not consistency.follows(seen=8, begun=9, result=7)


@pytest.mark.parametrize("k", [0, -1, True, 1.0, "2", None])
def test_k_that_is_no_number_of_gradients_is_refused(k: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of gradients, 1 or more"):
        KAsync(k)


def test_k_of_more_than_there_are_is_refused_but_not_where_the_script_runs_alone() -> None:
    with pytest.raises(ConfigError, match="k=6 with 5 workers: choose from 1 to 5"):
        KAsync(6).among(5)
    assert KAsync(5).among(5) == KAsync(5)
    assert KAsync(6).among(1) == KAsync(1)


@pytest.mark.parametrize(("k", "instead"), [(1, ()), (2, ("k=3", "k=1")), (3, ())])
def test_only_updates_of_some_workers_may_wait_for_absent_ones(
    k: int, instead: tuple[str, ...]
) -> None:
    assert KAsync(k).instead_if_absent(3) == instead


# ---- a holder's ledger


def test_a_gradient_waits_until_an_update_contains_it() -> None:
    book = ledger()
    for rank in (3, 0, 2):
        assert book.arrive(rank, 0)
        assert book.close() is None
    book.decide((3, 0))
    assert book.close() == Closed(((0, 0), (0, 3)), 2, (0, 3))
    assert book.close() is None
    assert book.arrive(3, 1)
    book.decide((2, 3))
    assert book.close() == Closed(((1, 3), (0, 2)), 2, (2, 3)), "newest first"
    assert book.round == 2


def test_gradients_out_of_turn_are_refused() -> None:
    book = ledger()
    with pytest.raises(FrameRefused, match="round 1 while round 0 is open"):
        book.arrive(0, 1)
    book.arrive(0, 0)
    book.arrive(1, 0)
    with pytest.raises(FrameRefused, match="rank 0 contributed twice to round 0"):
        book.arrive(0, 0)
    book.decide((1,))
    book.close()
    with pytest.raises(FrameRefused, match="rank 0 contributed twice to round 1"):
        book.arrive(0, 1)  # its last one is in no update yet
    for nobody in ((), (1,), (0, 2)):
        with pytest.raises(FrameRefused, match="round 1 decided without gradients of"):
            book.decide(nobody)


# ---- decisions


def test_an_update_is_of_the_first_k_whole_gradients_whatever_their_ages() -> None:
    state = decider(2, workers=3, holders=2)
    for holder, rank in ((0, 2), (0, 1), (1, 1)):
        assert state.arrived(holder, rank, 0, 0.0) == []
    assert state.is_in(1)
    assert not state.is_in(2)  # not at holder 1
    assert state.arrived(1, 2, 0, 0.1) == [Made(0, (1, 2))]
    assert not state.is_in(1)
    assert state.arrived(0, 1, 1, 0.2) == state.arrived(1, 1, 1, 0.2) == []
    assert state.arrived(0, 0, 0, 0.3) == []
    assert state.arrived(1, 0, 0, 0.3) == [Made(1, (0, 1))]
    assert state.record.made == {0: 1, 1: 2, 2: 1}
    assert state.record.dropped == {}
    assert state.record.first == [(0, 2)]


def test_two_reports_of_one_holder_are_one() -> None:
    state = decider(1, workers=2, holders=2)
    assert state.arrived(0, 1, 0, 0.0) == state.arrived(0, 1, 0, 0.0) == []
    assert state.arrived(1, 1, 0, 0.0) == [Made(0, (1,))]
    assert state.arrived(1, 1, 0, 0.0) == state.arrived(0, 1, 0, 0.0) == []


def test_what_cannot_have_been_made_yet_is_refused() -> None:
    with pytest.raises(FrameRefused, match="rank 1 is in round 1, but 0 is open"):
        decider(2, workers=2).arrived(0, 1, 1, 0.0)
    with pytest.raises(FrameRefused, match="rank 2 is in round 0"):
        decider(2, workers=2).arrived(0, 2, 0, 0.0)


@pytest.mark.parametrize("lost", [False, True])
def test_an_update_needs_no_more_than_the_workers_that_are_left(lost: bool) -> None:
    state = decider(3, workers=3)
    state.arrived(0, 0, 0, 0.0)
    state.arrived(0, 1, 0, 0.0)
    assert state.retire(2, 0.1, lost=lost) == [Made(0, (0, 1))]
    state.arrived(0, 0, 1, 0.2)
    assert state.retire(1, 0.3, lost=lost) == [Made(1, (0,))]
    assert state.retire(0, 0.4, lost=lost) == []
    assert state.tick(99.0) == []


def test_a_gradient_of_a_worker_that_has_left_counts_if_it_is_whole() -> None:
    state = decider(3, workers=3)
    assert state.arrived(0, 2, 0, 0.0) == []
    assert state.retire(2, 0.1) == []
    assert state.is_in(2)
    assert state.arrived(0, 0, 0, 0.2) == []
    assert state.arrived(0, 1, 0, 0.2) == [Made(0, (0, 1, 2))]
    assert state.arrived(0, 2, 1, 0.3) == []  # it has left
    assert not state.is_in(2)


def test_half_a_gradient_of_a_lost_worker_counts_once_it_is_whole() -> None:
    state = decider(2, workers=3, holders=2)
    state.arrived(0, 2, 0, 0.0)
    state.retire(2, 0.1, lost=True)
    for holder in (0, 1):
        assert state.arrived(holder, 0, 0, 0.2) == []
    assert state.arrived(1, 2, 0, 0.3) == [Made(0, (0, 2))]
    assert state.members == {0, 1, 2}


def test_arrivals_and_durations_are_recorded() -> None:
    state = decider(1, workers=2)
    state.arrived(0, 0, 0, 1.0)
    state.arrived(0, 0, 1, 3.0)
    state.arrived(0, 1, 0, 3.5)  # late: it is the first of the update that is open
    arrivals = state.record.arrivals
    assert list(arrivals.durations[0]) == [2.0]
    assert arrivals.kth.keys() == {1}
    assert arrivals.kth[1].counts.total() == 3


class Play:
    """Workers and holders that exchange what their rules ask for, in a random order."""

    def __init__(self, k: int, workers: int, holders: int, seed: int) -> None:
        self.state = decider(k, workers, holders)
        self.books = [ledger() for _ in range(holders)]
        self.chance = random.Random(seed)
        self.workers, self.holders = workers, holders
        self.given: Counter[tuple[int, int]] = Counter()  # by worker and clock
        self.counted: list[Counter[tuple[int, int]]] = [Counter() for _ in range(holders)]
        self.sizes: list[int] = []
        # By holder: decisions are taken in the order in which they were made.
        self.commits: list[list[Made]] = [[] for _ in range(holders)]
        self.waits: dict[int, dict[int, int]] = {}  # by worker: clocks of answers, by holder
        self.actions: list[tuple[str, int, int, int]] = []
        for rank in range(workers):
            self.push(rank, 0)

    def push(self, rank: int, clock: int) -> None:
        self.given[rank, clock] += 1
        self.waits[rank] = {}
        self.actions += [("push", holder, rank, clock) for holder in range(self.holders)]

    def act(self, more: bool) -> bool:
        """One thing happens; False if nothing is left to happen."""
        able: list[tuple[str, int, int, int]] = list(self.actions)
        able += [("commit", holder, 0, 0) for holder in range(self.holders) if self.commits[holder]]
        if not able:
            return False
        kind, holder, rank, clock = self.chance.choice(able)
        if kind == "push":
            self.actions.remove((kind, holder, rank, clock))
            assert self.books[holder].arrive(rank, clock)
            self.decided(self.state.arrived(holder, rank, clock, 0.0))
        else:
            self.commit(holder, more)
        return True

    def decided(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert isinstance(decision, Made)
            self.sizes.append(len(decision.ranks))
            for commits in self.commits:
                commits.append(decision)

    def commit(self, holder: int, more: bool) -> None:
        decision, book = self.commits[holder].pop(0), self.books[holder]
        assert book.round == decision.round
        book.decide(decision.ranks)
        closed = book.close()
        assert closed is not None
        assert closed.audience == decision.ranks
        assert closed.divisor == len(decision.ranks)
        for clock, rank in closed.contributions:
            self.counted[holder][rank, clock] += 1
            self.waits[rank][holder] = decision.round + 1
            if len(self.waits[rank]) == self.holders:
                (version,) = set(self.waits[rank].values())  # the same at all holders
                if more:
                    self.push(rank, version)
                else:
                    self.decided(self.state.retire(rank, 0.0))


@given(
    workers=st.integers(1, 6),
    k=st.integers(1, 6),
    holders=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_gradient_is_in_one_update_and_no_worker_waits_for_ever(
    workers: int, k: int, holders: int, seed: int
) -> None:
    k = min(k, workers)
    play = Play(k, workers, holders, seed)
    for _ in range(60 * holders):
        assert play.act(more=True), "workers wait for each other"
    assert set(play.sizes) <= {k}
    while play.act(more=False):
        pass
    assert set(play.given.values()) == {1}
    assert play.counted == [play.given] * holders
    assert play.state.record.made == Counter(rank for rank, _ in play.given)
