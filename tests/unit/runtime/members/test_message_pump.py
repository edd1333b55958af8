"""A pump calls one handler a message, in order, and survives what it refuses."""

from typing import Any

import pytest

from slipstream.errors import FrameRefused
from slipstream.runtime.members.message_pump import TICK_S, MessagePump
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import AnyBody, Beat, Echo, Lost, Message


class Notes:
    """A trace: what was sent and handled."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, AnyBody]] = []

    def sent(self, peer: str, body: AnyBody, priority: int) -> None:
        self.events.append(("sent", peer, body))

    def handled(self, message: Message[Any]) -> None:
        self.events.append(("handled", message.sender, message.body))


class Desk:
    """One pump, and a peer that sends to it."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.clock, self.notes = VirtualClock(), Notes()
        self.pump = MessagePump("rank 0", network.endpoint("rank 0"), self.clock, self.notes)
        self.peer = network.endpoint("rank 1")
        self.peer.connect("rank 0", "")
        self.chunks: list[int] = []
        self.pump.on(Echo, lambda message: self.chunks.append(message.body.number))

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.pump.run_once(0.0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_what_a_member_sends_itself_is_handled_before_what_arrives(desk: Desk) -> None:
    desk.peer.send("rank 0", Echo(1), ())
    desk.pump.send("rank 0", Echo(2))
    desk.pump.handle_later(Message("rank 0", Echo(3)))
    assert desk.pump.own_queue == 2
    desk.run(3)
    assert desk.chunks == [2, 3, 1]


def test_admission_comes_before_the_handler(desk: Desk) -> None:
    def admit(message: Message[Any]) -> bool:
        if message.body == Echo(9):
            raise FrameRefused("no chunk 9")
        return message.body != Echo(5)

    refused: list[str] = []
    desk.pump.admit = admit
    desk.pump.on_refused = lambda message, error: refused.append(str(error))
    for chunk in (4, 5, 9, 6):
        desk.peer.send("rank 0", Echo(chunk), ())
    desk.run(4)
    assert desk.chunks == [4, 6]
    assert refused == ["no chunk 9"]
    assert (desk.pump.refused, desk.pump.last_refusal) == (1, "rank 1: no chunk 9")


def test_a_message_without_a_handler_is_refused(desk: Desk) -> None:
    desk.peer.send("rank 0", Lost(1), ())
    desk.run(1)
    assert desk.pump.last_refusal == "rank 1: rank 0 takes no Lost"


def test_the_heartbeat_follows_the_ticks_and_knows_how_late_it_is(desk: Desk) -> None:
    calls: list[object] = []
    desk.pump.on_tick(lambda: calls.append("tick"))
    desk.pump.beat = calls.append
    desk.run(2)
    assert calls == ["tick", 0.0]
    desk.clock.advance(TICK_S + 0.25)
    desk.run(2)
    assert calls == ["tick", 0.0, "tick", 0.25]


def test_the_trace_has_every_message_sent_and_handled(desk: Desk) -> None:
    desk.pump.transport.connect("rank 1", "")
    desk.pump.send("rank 1", Beat({}))
    desk.pump.send("rank 0", Echo(1))
    desk.run(1)
    assert desk.notes.events == [
        ("sent", "rank 1", Beat({})),
        ("sent", "rank 0", Echo(1)),
        ("handled", "rank 0", Echo(1)),
    ]


def test_an_error_of_a_handler_ends_the_thread_and_is_handed_over(desk: Desk) -> None:
    def broken(message: Message[Echo]) -> None:
        raise IndexError("oops")

    errors: list[Exception] = []
    desk.pump.on(Echo, broken)
    desk.pump.send("rank 0", Echo(0))
    desk.pump.run(errors.append)
    assert [str(error) for error in errors] == ["oops"]
