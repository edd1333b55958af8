"""Gathering values at rank 0: who is answered with what, and what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, FrameRefused, WaitLimit
from slipstream.runtime.members import gathering
from slipstream.runtime.members.gathering import (
    KEPT,
    MOST_OPEN,
    URGENT,
    Collector,
    Gathering,
    encoded,
)
from slipstream.runtime.members.member import HUB, Member
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Contribute, Gathered, Rejoin

WORKERS = 3


def answers(collector: Collector, *lost: int) -> list[tuple[str, list[int], dict[int, bytes]]]:
    return [(key, ranks, dict(values)) for key, ranks, values in collector.due(lost)]


def test_everybody_is_answered_when_all_have_given() -> None:
    collector = Collector(WORKERS)
    for rank in (2, 0):
        collector.contribute("model", "all", rank, b"%d" % rank)
        assert answers(collector) == []
    collector.contribute("model", "all", 1, b"1")
    assert answers(collector) == [("model", [0, 1, 2], {0: b"0", 1: b"1", 2: b"2"})]
    assert answers(collector) == []


def test_who_is_lost_is_not_waited_for() -> None:
    collector = Collector(WORKERS)
    for rank in (0, 1):
        collector.contribute("broadcast/1", "all", rank, b"x")
    assert collector.awaited(()) == {"broadcast/1": ["rank 2"]}
    assert answers(collector, 2) == [("broadcast/1", [0, 1], {0: b"x", 1: b"x"})]


def test_one_rank_may_give_and_others_read() -> None:
    collector = Collector(WORKERS)
    collector.contribute("server/0", 1, 0, None)
    assert answers(collector) == []
    collector.contribute("server/0", 1, 1, b"tcp://here")
    assert answers(collector) == [("server/0", [0, 1], {1: b"tcp://here"})]
    collector.contribute("server/0", 1, 2, None)
    assert list(collector.answer("server/0")) == [("server/0", [2], {1: b"tcp://here"})]


def test_whichever_rank_gives_first() -> None:
    collector = Collector(WORKERS)
    collector.contribute("store/a", "any", 2, None)
    collector.contribute("store/a", "any", 0, b"v")
    assert answers(collector) == [("store/a", [0, 2], {0: b"v"})]


def test_who_comes_back_is_told_what_the_others_have_gathered() -> None:
    collector = Collector(WORKERS)
    for rank in range(WORKERS):
        collector.contribute("model", "all", rank, b"%d" % rank)
    answers(collector)
    collector.contribute("model", "all", 1, b"another value of rank 1")
    assert [*collector.answer("model")] == [("model", [1], {0: b"0", 1: b"1", 2: b"2"})]


def test_ranks_that_disagree_on_the_source_are_refused() -> None:
    collector = Collector(WORKERS)
    collector.contribute("key", "all", 0, b"")
    with pytest.raises(FrameRefused, match="rank 1 gathers 'key' from 2, not all"):
        collector.contribute("key", 2, 1, None)


def test_open_gatherings_are_bounded() -> None:
    collector = Collector(WORKERS)
    for number in range(MOST_OPEN):
        collector.contribute(f"key {number}", "all", 1, b"")
    with pytest.raises(FrameRefused, match="gatherings are open"):
        collector.contribute("one more", "all", 1, b"")
    collector.contribute("key 0", "all", 2, b"")


@given(st.lists(st.integers(0, 100), max_size=40))
def test_kept_values_are_bounded_and_the_first_and_last_stay(sizes: list[int]) -> None:
    before = gathering.KEPT_BYTES
    try:
        gathering.KEPT_BYTES = 500
        collector = Collector(1)
        for number, size in enumerate(sizes):
            collector.contribute(str(number), "all", 0, bytes(size))
            answers(collector)
        kept = {int(key): record.nbytes for key, record in collector._records.items()}
        assert sum(kept.values()) <= 2 * 500 + 100
        if sizes:
            assert 0 in kept
            assert len(sizes) - 1 in kept
    finally:
        gathering.KEPT_BYTES = before


def test_the_number_of_kept_values_is_bounded() -> None:
    collector = Collector(1)
    for number in range(2 * KEPT + 100):
        collector.contribute(str(number), "all", 0, b"")
        answers(collector)
    assert len(collector._records) == 2 * KEPT
    assert str(KEPT - 1) in collector._records
    assert str(KEPT) not in collector._records


# ---- over links


class Company:
    """Members whose messages move when somebody waits."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        names = [f"rank {rank}" for rank in range(WORKERS)]
        self.members = {name: Member(name, self.network.endpoint(name)) for name in names}
        for member in self.members.values():
            for name in names:
                member.transport.connect(name, f"memory://{name}")
        self.gatherings = [
            Gathering(member, rank, WORKERS, 0.05)
            for rank, member in enumerate(self.members.values())
        ]

    def move(self) -> None:
        for _ in range(50):
            for member in self.members.values():
                member.pump_once(0.0)


def test_every_rank_gets_every_value() -> None:
    company = Company()
    for rank, each in enumerate(company.gatherings):
        each._send(Contribute("model", "all", asks=True), encoded([rank]))
    company.move()
    for each in company.gatherings:
        assert each.gather("model", None, list[int]) == [[0], [1], [2]]


def test_one_of_them_is_first() -> None:
    company = Company()
    for each in (company.gatherings[2], company.gatherings[0]):
        each._send(Contribute("warned", "any", asks=True), b"")
        company.move()
    assert company.gatherings[2].is_first("warned")
    assert not company.gatherings[0].is_first("warned")


def test_what_was_posted_is_not_sent_back_to_who_did_not_ask() -> None:
    company = Company()
    company.gatherings[1].post("server/0", "here")
    company.gatherings[2]._send(Contribute("server/0", 1, asks=True))
    company.move()
    assert company.gatherings[2].read("server/0", 1, str) == "here"
    assert company.gatherings[1]._results == {}


def test_a_wait_names_who_is_missing() -> None:
    company = Company()
    for rank in (0, 1):
        company.gatherings[rank]._send(Contribute("broadcast/1", "all", asks=True), encoded(rank))
    company.move()
    for rank in (0, 1):
        company.members[f"rank {rank}"].heartbeat.last_awaited = {"broadcast/1": ["rank 2"]}
    with pytest.raises(WaitLimit, match=r"all ranks in job\.broadcast.*missing: rank 2"):
        company.gatherings[0]._wait("broadcast/1")
    with pytest.raises(WaitLimit, match=r"all ranks in job\.broadcast.*missing: rank 2"):
        company.gatherings[1]._wait("broadcast/1")


def test_values_that_nobody_asked_for_are_refused() -> None:
    company = Company()
    company.members[HUB].send("rank 1", Gathered("key", [0]), [b"x"])
    company.members["rank 2"].send("rank 1", Gathered("key", [0]), [b"x"])
    company.move()
    assert company.members["rank 1"].refused == 2
    assert company.gatherings[1]._results == {}


def test_a_value_that_is_too_large_is_refused_before_it_is_sent() -> None:
    company = Company()
    with pytest.raises(ConfigError, match="share a path or a checksum"):
        company.gatherings[1].post("key", bytes(gathering.LARGEST_VALUE_BYTES + 1))


def test_only_ranks_contribute() -> None:
    company = Company()
    company.network.endpoint("somebody").connect(HUB, f"memory://{HUB}")
    company.network.endpoint("somebody").send(HUB, Contribute("key", "all", asks=True), [b"x"])
    company.move()
    assert company.members[HUB].refused == 1


# ---- a name belongs to one process


def bound() -> Company:
    company = Company()
    for rank, member in enumerate(company.members.values()):
        member.transport.process = 10 + rank  # type: ignore[misc]
        member.bind({f"rank {r}": 10 + r for r in range(WORKERS)})
    return company


def test_messages_of_another_process_under_a_name_are_refused() -> None:
    company = bound()
    hub = company.members[HUB]
    company.network.endpoint("rank 1").process = 99
    company.members["rank 1"].send(HUB, Contribute("key", "all", asks=True), [b"x"])
    company.move()
    assert hub.refused == 1
    assert hub.last_refusal == "rank 1: rank 1 is another process"
    company.network.endpoint("rank 1").process = 11
    company.members["rank 1"].send(HUB, Contribute("key", "all", asks=True), [b"x"])
    company.move()
    assert hub.refused == 1


def test_a_worker_that_was_started_again_says_so_first() -> None:
    company = bound()
    hub = company.members[HUB]
    hub.on_lost = lambda name: None
    hub.on_return = lambda name: pytest.fail("it is not the process that was lost")
    hub.lost.append("rank 1")
    for rank in (0, 2):
        company.gatherings[rank]._send(Contribute("model", "all", asks=True), encoded(rank))
    company.network.endpoint("rank 1").process = 99
    company.members["rank 1"].bind({"rank 1": 99})
    company.members["rank 1"].send(HUB, Rejoin("memory://rank 1", 1), priority=URGENT)
    company.gatherings[1]._send(Contribute("model", "all", asks=True), encoded(1))
    company.move()
    assert company.gatherings[1].gather("model", 1, int) in ([0, 2], [0, 1, 2])
    assert "rank 1" in hub.lost, "until it is let in"


def test_nobody_rejoins_twice_in_one_life_or_for_rank_0() -> None:
    company = bound()
    hub = company.members[HUB]
    hub.on_lost = lambda name: None
    for name, incarnation, refused in (
        ("rank 1", 1, 0),
        ("rank 1", 1, 1),
        (HUB, 1, 2),
        ("rank 1", 2, 2),
    ):
        company.members[name].send(HUB, Rejoin("memory://rank 1", incarnation))
        company.move()
        assert hub.refused == refused
