"""Several pairs share a member: each takes its own messages, and makes rounds of its own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from slipstream.errors import PeerLost, WaitLimit
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.members.message_pump import TICK_S
from slipstream.testing.clock import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Beat, Echo, Inquire, Leave, Message

Seen = list[tuple[int, int]]  # of each message: its pair, and which chunk it asks for


class Two:
    """Rank 0 and rank 1, on virtual time."""

    def __init__(self) -> None:
        self.clock, self.network = VirtualClock(), MemoryNetwork()
        self.hub, self.other = (self._member(name) for name in (HUB, "rank 1"))
        self.hub.transport.connect("rank 1", "")
        self.other.transport.connect(HUB, "")
        self.hub.expect("rank 1")
        self.other.expect(HUB)

    def _member(self, name: str) -> Member:
        return Member(name, self.network.endpoint(name), silence_s=1e9, clock=self.clock)

    def talk(self) -> None:
        for _ in range(10):
            self.hub.pump_once(0.0)
            self.other.pump_once(0.0)

    def beat(self) -> None:
        for _ in range(3):
            self.clock.advance(TICK_S)
            self.talk()


@pytest.fixture
def two() -> Two:
    return Two()


def noting(seen: Seen) -> Any:
    def note(message: Message[Echo]) -> None:
        seen.append((message.pair, message.body.number))

    return note


class Holder:
    """Something large that takes messages."""

    def __init__(self, member: Endpoint) -> None:
        self.taken = 0
        member.on(Echo, self.take)

    def take(self, message: Message[Echo]) -> None:
        self.taken += 1


def test_an_owner_that_closes_is_forgotten_and_late_messages_are_dropped(two: Two) -> None:
    endpoint, kept = two.hub.for_pair(0).owned(), Holder(two.hub.for_pair(1))
    holder = Holder(endpoint)
    known = weakref.ref(holder)
    for pair in (0, 1):
        two.other.for_pair(pair).send(HUB, Echo(1))
    two.talk()
    assert (holder.taken, kept.taken) == (1, 1)
    endpoint.close()
    del holder
    gc.collect()
    assert known() is None
    for pair in (0, 1):
        two.other.for_pair(pair).send(HUB, Echo(2))
    two.talk()
    assert kept.taken == 2
    assert two.hub.refused == 0


def test_an_owner_that_closes_leaves_its_successors_handlers(two: Two) -> None:
    first, second = two.hub.owned(), two.hub.owned()
    old, new = Holder(first), Holder(second)
    first.close()
    two.other.send(HUB, Echo(1))
    two.talk()
    assert (old.taken, new.taken) == (0, 1)


def test_pair_0_is_the_member_itself(two: Two) -> None:
    assert two.hub.for_pair(0) is two.hub
    assert two.hub.pair == 0
    assert two.hub.for_pair(3).pair == 3


def test_every_pair_takes_its_own_messages(two: Two) -> None:
    zero, one, two_ = [], [], []
    for number, seen in enumerate((zero, one, two_)):
        two.hub.for_pair(number).on(Echo, noting(seen))
    for number in (2, 0, 1, 2):
        two.other.for_pair(number).send(HUB, Echo(10 + number))
    two.talk()
    assert (zero, one, two_) == ([(0, 10)], [(1, 11)], [(2, 12), (2, 12)])
    assert two.hub.refused == 0


def test_a_message_to_oneself_stays_in_its_pair(two: Two) -> None:
    seen: Seen = []
    view = two.hub.for_pair(1)
    two.hub.on(Echo, noting([]))
    view.on(Echo, noting(seen))
    view.send(HUB, Echo(5))
    two.talk()
    assert seen == [(1, 5)]


def test_a_message_of_an_unknown_pair_is_refused(two: Two) -> None:
    seen: Seen = []
    two.hub.on(Echo, noting(seen))
    two.other.for_pair(1).send(HUB, Echo(0))
    two.talk()
    assert seen == []
    assert two.hub.refused == two.hub.for_pair(1).refused == 1
    assert two.hub.last_refusal == "rank 1: rank 0 takes no Echo for pair 1"


@pytest.mark.parametrize("body", [Beat({"rank 1": 5}), Leave(round=5)])
def test_the_life_of_the_job_is_pair_0s_alone(two: Two, body: Any) -> None:
    two.other.for_pair(1).send(HUB, body)
    two.talk()
    assert two.hub.refused == 1
    assert two.hub.roster.finished == {}
    assert two.hub.roster.rounds.get("rank 1", 0) == 0


def test_a_handler_of_any_pair_takes_what_no_pair_has_one_for(two: Two) -> None:
    any_pair, own = [], []
    two.hub.on_any_pair(Echo, noting(any_pair))
    two.hub.for_pair(1).on(Echo, noting(own))
    for number in (0, 1, 2):
        two.other.for_pair(number).send(HUB, Echo(number))
    two.other.for_pair(2).send(HUB, Inquire())
    two.talk()
    assert (any_pair, own) == ([(0, 0), (2, 2)], [(1, 1)])
    assert two.hub.refused == 1


def test_rounds_of_pairs_add_up(two: Two) -> None:
    first, second = two.hub, two.hub.for_pair(1)
    first.round = 3
    second.round = 5
    second.round = 7
    assert (first.round, second.round, two.hub.roster.round) == (3, 7, 10)


def test_others_learn_the_sum(two: Two) -> None:
    two.other.round, two.other.for_pair(1).round = 2, 4
    two.beat()
    assert two.hub.roster.rounds["rank 1"] == 6


def test_a_wait_of_any_pair_names_who_is_behind_in_the_sum(two: Two) -> None:
    view = two.hub.for_pair(1)
    two.hub.round, view.round = 2, 3
    two.other.round, two.other.for_pair(1).round = 2, 2
    two.beat()
    with pytest.raises(WaitLimit, match="missing: rank 1"):
        view.wait_until(lambda: False, what="the results", limit_s=0)


def test_a_fault_ends_the_waits_of_all_pairs(two: Two) -> None:
    view = two.hub.for_pair(1)
    two.hub.fail(PeerLost("rank 1", 6.0))
    assert view.fault is two.hub.fault
    with pytest.raises(PeerLost):
        view.wait_until(lambda: False, what="results", limit_s=1000)
