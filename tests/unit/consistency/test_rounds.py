import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import (
    All,
    Asynchronous,
    Closed,
    Consistency,
    FirstOf,
    Lag,
    Progress,
    StaleSynchronous,
)
from slipstream.consistency.first_of import FirstOfLedger
from slipstream.consistency.ledgers import AllLedger
from slipstream.errors import ConfigError, FrameRefused


@given(st.integers(0, 1 << 40))
def test_a_round_begins_only_when_all_before_it_are_committed(round_: int) -> None:
    assert Consistency().may_start(Progress(round_, committed=round_))
    assert Consistency().may_start(Progress(round_, committed=round_ + 1))
    assert not Consistency().may_start(Progress(round_ + 1, committed=round_))


@pytest.mark.parametrize(
    ("arrived", "admitted"), [(3, False), (4, False), (5, True), (6, True), (7, False)]
)
def test_the_open_round_and_the_one_after_it_are_admitted(arrived: int, admitted: bool) -> None:
    book = Consistency().ledger(2)
    assert isinstance(book, AllLedger)
    book.round = 5
    if admitted:
        assert book.arrive(0, arrived)
        with pytest.raises(FrameRefused, match="twice"):
            book.arrive(0, arrived)
    else:
        with pytest.raises(FrameRefused, match=f"round {arrived} while round 5 is open"):
            book.arrive(0, arrived)


@given(st.permutations(range(7)))
def test_all_workers_close_a_round_and_are_summed_in_rank_order(order: list[int]) -> None:
    book = Consistency().ledger(7)
    for rank in order:
        assert book.close() is None
        book.arrive(rank, 0)
    assert book.close() == Closed(tuple((0, rank) for rank in range(7)), 7)
    assert book.round == 1
    assert book.close() is None


def test_a_worker_follows_every_round_in_lockstep_and_only_later_ones_otherwise() -> None:
    whole, first = Consistency(), Consistency(FirstOf(first=2))
    assert whole.follows(seen=3, begun=4, result=3)
    for result in (2, 4):
        assert not whole.follows(seen=3, begun=5, result=result)
    assert not whole.follows(seen=3, begun=3, result=3)
    assert first.follows(seen=3, begun=4, result=9)
    assert not first.follows(seen=3, begun=4, result=2)


@given(ahead=st.integers(0, 4))
def test_nobody_is_more_rounds_ahead_than_the_gate_allows(ahead: int) -> None:
    book, most = Consistency(gate=Lag(ahead)).ledger(2), 2 * ahead + 2
    for clock in range(most):
        assert book.arrive(0, clock)
    with pytest.raises(FrameRefused, match=f"round {most} while round 0 is open"):
        book.arrive(0, most)
    for clock in range(most):
        assert book.close() is None
        book.arrive(1, clock)
        assert book.close() == Closed(((clock, 0), (clock, 1)), 2)


def test_who_has_left_is_not_waited_for_and_what_it_had_sent_counts() -> None:
    book = Consistency(All(without_lost=True)).ledger(3)
    book.arrive(2, 0)
    book.arrive(0, 0)
    book.retire(1)
    assert book.close() == Closed(((0, 0), (0, 2)), 2)
    with pytest.raises(FrameRefused, match="rank 1 has left"):
        book.arrive(1, 1)


def test_what_follows_from_an_admission_and_a_gate() -> None:
    whole, lost = Consistency(), Consistency(All(without_lost=True))
    first, folded = Consistency(FirstOf(first=1)), Consistency(StaleSynchronous(), Lag(2))
    every = (whole, lost, first, folded, Consistency(Asynchronous()))
    assert [each.lockstep for each in every] == [True, True] + [False] * 3
    assert [each.goes_on for each in every] == [False, True, True, False, True]
    assert [each.agreed for each in every] == [False, False, True] + [False] * 2
    assert [each.alone for each in every] == [False] * 4 + [True]
    assert [each.under_way for each in every] == [1, 1, 1, 3, 1]


def test_agreed_rounds_close_when_they_are_told_who_made_them() -> None:
    book = Consistency(FirstOf(first=2)).ledger(4)
    assert isinstance(book, FirstOfLedger)
    for rank in (3, 0, 2):
        assert book.arrive(rank, 0)
        assert book.close() is None
    book.decide((3, 0))
    assert book.close() == Closed(((0, 0), (0, 3)), 2, (0, 3))
    assert not book.arrive(2, 0), "too late"
    assert book.arrive(2, 1)
    with pytest.raises(FrameRefused, match="round 2 while round 1 is open"):
        book.arrive(0, 2)
    with pytest.raises(FrameRefused, match="twice"):
        book.arrive(2, 1)
    for nobody in ((), (2, 3)):
        with pytest.raises(FrameRefused, match="round 1 decided without"):
            book.decide(nobody)


@pytest.mark.parametrize(
    ("came", "open_s", "closes"),
    [(4, 0.0, True), (3, 0.9, False), (3, 1.0, True), (2, 5.0, True), (1, 5.0, False)],
)
def test_a_round_closes_by_number_or_by_time(came: int, open_s: float, closes: bool) -> None:
    rule = FirstOf(first=4, close_after_s=1.0, min_first=2)
    assert rule.closes(num_arrived=came, members=6, open_s=open_s) is closes


def test_a_round_needs_no_more_than_there_are() -> None:
    assert FirstOf(first=4).closes(num_arrived=2, members=2, open_s=0)


@pytest.mark.parametrize(
    ("rule", "workers", "first"),
    [(FirstOf(first=3), 5, 3), (FirstOf(backup=2), 5, 3), (FirstOf(adapts=True), 5, 5)],
)
def test_what_depends_on_the_number_of_workers_is_filled_in(
    rule: FirstOf, workers: int, first: int
) -> None:
    assert rule.among(workers).first == first
    assert rule.among(1).first == 1
    assert Consistency(rule).agreed
    assert not Consistency().agreed
    assert Consistency(rule).among(workers).admit == rule.among(workers)
    assert All().among(workers) == All()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"first": 0}, "first=0"),
        ({"backup": -1}, "backup=-1"),
        ({"first": 2, "backup": 1}, "not both"),
        ({"first": 2, "close_after_s": 0}, "close_after_s=0"),
        ({"first": 2, "min_first": 3}, "min_first=3"),
        ({"first": 2, "min_first": 0}, "min_first=0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FirstOf(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "said"), [(FirstOf(first=6), "first=6"), (FirstOf(backup=5), "=5")]
)
def test_more_than_there_are_is_refused(rule: FirstOf, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rule.among(5)


def test_a_peer_that_has_closed_more_rounds_may_be_twice_as_far_ahead() -> None:
    """With Lag(2), rank 0 pushes rounds 0 to 2. Rank 1 closes them all, and begins rounds 3 to 5,
    before rank 2's gradient of round 0 gets here."""
    ledger = Consistency(All(), Lag(2)).ledger(3)
    for clock in range(3):
        assert ledger.arrive(0, clock)
    for clock in range(6):
        assert ledger.arrive(1, clock)
    with pytest.raises(FrameRefused, match="round 6 while round 0 is open"):
        ledger.arrive(1, 6)
    assert ledger.close() is None
    assert ledger.arrive(2, 0)
    assert ledger.close() is not None
