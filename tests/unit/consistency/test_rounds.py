import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.consistency import Closed, Progress, Rounds
from slipstream.consistency.rounds import AgreedRounds
from slipstream.errors import ConfigError, FrameRefused


@given(st.integers(0, 1 << 40))
def test_a_round_begins_only_when_all_before_it_are_committed(round_: int) -> None:
    assert Rounds().may_start(Progress(round_, committed=round_))
    assert Rounds().may_start(Progress(round_, committed=round_ + 1))
    assert not Rounds().may_start(Progress(round_ + 1, committed=round_))


@pytest.mark.parametrize(
    ("arrived", "admitted"), [(3, False), (4, False), (5, True), (6, True), (7, False)]
)
def test_the_open_round_and_the_one_after_it_are_admitted(arrived: int, admitted: bool) -> None:
    book = Rounds().book(2)
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
    book = Rounds().book(7)
    for rank in order:
        assert book.close() is None
        book.arrive(rank, 0)
    assert book.close() == Closed(tuple((0, rank) for rank in range(7)), 7)
    assert book.round == 1
    assert book.close() is None


def test_a_worker_follows_every_round_in_lockstep_and_only_later_ones_otherwise() -> None:
    whole, first = Rounds(), Rounds(first=2)
    assert whole.follows(seen=3, begun=4, result=3)
    for result in (2, 4):
        assert not whole.follows(seen=3, begun=5, result=result)
    assert not whole.follows(seen=3, begun=3, result=3)
    assert first.follows(seen=3, begun=4, result=9)
    assert not first.follows(seen=3, begun=4, result=2)


def test_agreed_rounds_close_when_they_are_told_who_made_them() -> None:
    book = Rounds(first=2).book(4)
    assert isinstance(book, AgreedRounds)
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
    rule = Rounds(first=4, close_after_s=1.0, min_first=2)
    assert rule.closes(came=came, members=6, open_s=open_s) is closes


def test_a_round_needs_no_more_than_there_are() -> None:
    assert Rounds(first=4).closes(came=2, members=2, open_s=0)


@pytest.mark.parametrize(
    ("rule", "workers", "first"),
    [(Rounds(first=3), 5, 3), (Rounds(backup=2), 5, 3), (Rounds(adapts=True), 5, 5)],
)
def test_what_depends_on_the_number_of_workers_is_filled_in(
    rule: Rounds, workers: int, first: int
) -> None:
    assert rule.among(workers).first == first
    assert rule.among(1).first == 1
    assert rule.agreed
    assert Rounds().among(workers) == Rounds()


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
        Rounds(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "said"), [(Rounds(first=6), "first=6"), (Rounds(backup=5), "=5")])
def test_more_than_there_are_is_refused(rule: Rounds, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rule.among(5)
