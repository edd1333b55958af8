"""State between two members: any memory arrives, in pieces, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import FrameRefused, WaitLimit
from slipstream.runtime.exchange import transfer
from slipstream.runtime.exchange.transfer import Arrival, Transfer, places
from slipstream.runtime.members.member import Member
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Fetch, Message, State, checksum
from slipstream.types import Entry

PIECE = 16
WEIGHTS, SENDER = "weights", "rank 0"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", PIECE)


class Ends:
    """Three members that know each other; messages move when the test says so."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        names = ("rank 0", "rank 1", "rank 2")
        self.members = {
            name: Member(name, network.endpoint(name), clock=VirtualClock()) for name in names
        }
        for member in self.members.values():
            for name in names:
                member.transport.connect(name, "")
        self.transfers = {name: Transfer(member) for name, member in self.members.items()}

    def deliver(self) -> None:
        for _ in range(40):
            for member in self.members.values():
                member.pump_once(0.0)

    def post(self, sender: str, body: State | Fetch, *frames: bytes) -> str:
        """Send a message as it is to rank 1; return why it was refused."""
        before = self.members["rank 1"].refused
        self.members[sender].send("rank 1", body, frames)
        self.deliver()
        return (
            self.members["rank 1"].last_refusal if self.members["rank 1"].refused > before else ""
        )


def room(*sizes: int) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    return [np.zeros(size, np.uint8) for size in sizes]


def arrival_into(memory: Sequence[np.ndarray], **options: object) -> Arrival:
    return Arrival(SENDER, WEIGHTS, 3, lambda _: memory, **options)  # type: ignore[arg-type]


def content(size: int) -> bytes:
    return bytes(i % 251 + 1 for i in range(size))


def piece(start: int, frame: bytes, total: int) -> State:
    return State(WEIGHTS, 3, start, total, checksum([frame]))


@given(
    sent=st.lists(st.integers(0, 50), max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=4),
)
def test_bytes_arrive_however_each_end_has_them_cut(sent: list[int], cuts: list[int]) -> None:
    ends, total = Ends(), sum(sent)
    whole = content(total)
    borders = [0, *sorted(min(cut, total) for cut in cuts), total]
    memory = room(*np.diff(borders))
    arrival = arrival_into(memory)
    with ends.transfers["rank 1"].expecting([arrival]):
        offsets = np.cumsum([0, *sent])
        parts = [whole[a:b] for a, b in pairwise(offsets)]
        ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, parts)
        ends.deliver()
        assert arrival.complete
    assert b"".join(part.tobytes() for part in memory) == whole


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 40), st.integers(0, 40))
def test_places_are_a_slice_of_all_memory(sizes: list[int], start: int, stop: int) -> None:
    memory = [content(size) for size in sizes]
    found = places(memory, start, stop)
    assert b"".join(found) == b"".join(memory)[start:stop]
    assert all(found)


def test_no_message_is_larger_than_a_piece() -> None:
    ends, seen = Ends(), []
    ends.members["rank 1"].on(State, seen.append)
    ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, [content(40)], entries=[(0, "a", "b")])
    ends.transfers["rank 0"].send("rank 1", "nothing", 0, [])
    ends.deliver()
    assert [(m.body.start, m.nbytes, len(m.body.entries)) for m in seen] == [
        *[(0, 16, 1), (16, 16, 0), (32, 8, 0)],
        (0, 0, 0),
    ]


FULL = content(PIECE)


@pytest.mark.parametrize(
    ("sender", "body", "frames", "why"),
    [
        ("rank 2", piece(0, FULL, 20), [FULL], "weights 3 from rank 2 is not expected"),
        ("rank 0", State("weights", 4, 0, 20, 0), [FULL], "weights 4 from rank 0 is not expected"),
        ("rank 0", State("mean", 3, 0, 20, 0), [FULL], "mean 3 from rank 0 is not expected"),
        ("rank 0", State("weights", 3, 0, 20, 7), [FULL], "wrong checksum of the piece at byte 0"),
        ("rank 0", piece(4, FULL, 20), [FULL], "from byte 4 on, which is not the next: 0 have"),
        ("rank 0", piece(0, FULL, 16), [FULL], "bytes 0 to 16 of 16, expected 20 in all"),
        ("rank 0", piece(0, FULL, 1 << 60), [FULL], f"of {1 << 60}, expected 20 in all"),
        (
            "rank 0",
            piece(0, FULL + b".", 20),
            [FULL + b"."],
            "[17] bytes, expected one of at most 16",
        ),
        ("rank 0", piece(0, b"", 20), [], "0 frames of [] bytes, expected one"),
        ("rank 0", piece(0, FULL, 20), [FULL, FULL], "2 frames of [16, 16] bytes, expected one"),
    ],
)
def test_misfit_is_refused_with_what_was_expected_and_the_rest_still_arrives(
    sender: str, body: State, frames: list[bytes], why: str
) -> None:
    ends, memory = Ends(), room(20)
    arrival = arrival_into(memory)
    with ends.transfers["rank 1"].expecting([arrival]):
        assert why in ends.post(sender, body, *frames)
        assert memory[0].tobytes() == bytes(20), "nothing is written"
        ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, [content(20)])
        ends.deliver()
    assert arrival.complete
    assert memory[0].tobytes() == content(20)


def test_second_piece_that_ends_too_late_or_comes_twice_is_refused() -> None:
    ends, memory = Ends(), room(20)
    arrival = arrival_into(memory)
    with ends.transfers["rank 1"].expecting([arrival]):
        assert ends.post(SENDER, piece(0, FULL, 20), FULL) == ""
        assert "not the next: 16 have arrived" in ends.post(SENDER, piece(0, FULL, 20), FULL)
        assert "bytes 16 to 21 of 20" in ends.post(SENDER, piece(16, b"12345", 20), b"12345")
        assert "of 24, expected 20" in ends.post(SENDER, piece(16, b"1234", 24), b"1234")
        assert ends.post(SENDER, piece(16, b"1234", 20), b"1234") == ""
        assert "not the next: 20 have arrived" in ends.post(SENDER, piece(20, b"", 20), b"")
    assert memory[0].tobytes() == FULL + b"1234"


def test_state_is_refused_after_the_block_that_expects_it() -> None:
    ends, arrival = Ends(), arrival_into(room(4))
    with ends.transfers["rank 1"].expecting([arrival]):
        assert not arrival.complete
    assert "is not expected" in ends.post(SENDER, piece(0, b"1234", 4), b"1234")
    assert not arrival.complete


def test_room_is_made_for_checked_entries_only_and_once() -> None:
    asked: list[Sequence[Entry]] = []

    def rooms(entries: Sequence[Entry]) -> list[np.ndarray]:
        asked.append(entries)
        if entries != [(0, "a", "float32")]:
            raise FrameRefused("expected a")
        return room(20)

    ends, arrival = Ends(), Arrival(SENDER, WEIGHTS, 3, rooms)
    with ends.transfers["rank 1"].expecting([arrival]):
        for name in "ba":
            entries = [(0, name, "float32")]
            ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, [content(20)], entries=entries)
        ends.deliver()
    assert asked[0] == [(0, "b", "float32")]
    assert arrival.entries == [(0, "a", "float32")]
    assert arrival.memory[0].tobytes() == content(20)


def test_arrival_that_is_done_may_come_again_also_if_it_was_refused() -> None:
    taken: list[bytes] = []

    def done(arrival: Arrival) -> None:
        taken.append(arrival.memory[0].tobytes())
        if len(taken) == 1:
            raise FrameRefused("not today")

    ends = Ends()
    ends.transfers["rank 1"].expect(arrival_into(room(20), done=done))
    for _ in range(3):
        ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, [content(20)])
    ends.deliver()
    assert taken == [content(20)] * 3
    assert ends.members["rank 1"].last_refusal == "rank 0: not today"


def test_forwarded_pieces_are_those_that_were_taken() -> None:
    ends, memory = Ends(), room(20)
    first, last = (
        arrival_into(room(20), forward="rank 2"),
        Arrival("rank 1", WEIGHTS, 3, lambda _: memory),
    )
    with ends.transfers["rank 1"].expecting([first]), ends.transfers["rank 2"].expecting([last]):
        assert ends.post(SENDER, State(WEIGHTS, 3, 0, 20, 7), FULL)
        ends.transfers["rank 0"].send("rank 1", WEIGHTS, 3, [content(20)])
        ends.deliver()
        assert last.complete
    assert ends.members["rank 2"].refused == 0
    assert memory[0].tobytes() == content(20)


def test_early_pieces_are_kept_only_if_they_may_come_and_not_longer_than_needed() -> None:
    ends, memory = Ends(), room(4)
    receiver = ends.transfers["rank 1"]
    wanted = {1, 3, 5}
    receiver.keep_early(WEIGHTS, lambda message: message.body.number in wanted)
    for number in (1, 3, 5):
        ends.transfers["rank 0"].send("rank 1", WEIGHTS, number, [b"%04d" % number])
    ends.deliver()
    assert ends.members["rank 1"].refused == 0
    assert "is not expected" in ends.post(SENDER, State(WEIGHTS, 9, 0, 4, 0), b"1234")
    wanted.remove(1)
    with receiver.expecting([arrival_into(memory)]):
        assert memory[0].tobytes() == b"0003"
    assert [message.body.number for message in receiver._early] == [5]


def test_requests_are_answered_by_name() -> None:
    ends, asked = Ends(), []
    ends.transfers["rank 1"].serve(WEIGHTS, lambda message: asked.append(message))
    ends.transfers["rank 0"].ask("rank 1", WEIGHTS, 4)
    ends.deliver()
    assert asked == [Message("rank 0", Fetch(WEIGHTS, 4), ())]
    assert ends.post(SENDER, Fetch("mean")) == "rank 0: rank 1 has no 'mean', only ['weights']"
    ends.transfers["rank 1"].stop_serving(WEIGHTS)
    assert "has no 'weights'" in ends.post(SENDER, Fetch(WEIGHTS))


def test_star_asks_every_member_and_names_those_that_are_missing() -> None:
    ends = Ends()
    memory = {name: room(20) for name in ("rank 0", "rank 2")}
    arrivals = [
        Arrival(name, WEIGHTS, 0, lambda _, name=name: memory[name])  # type: ignore[misc]
        for name in memory
    ]
    receiver, member = ends.transfers["rank 1"], ends.members["rank 1"]
    asked = dict.fromkeys(memory, WEIGHTS)
    with pytest.raises(WaitLimit, match="the weights; missing: rank 0, rank 2"):
        receiver.receive(arrivals, asked, what="the weights", limit_s=0.0)
    for name in memory:

        def answer(message: Message[Fetch], name: str = name) -> None:
            ends.transfers[name].send("rank 1", WEIGHTS, 0, [content(20)])

        ends.transfers[name].serve(WEIGHTS, answer)
    waits = member.wait_until

    def wait_until(holds, **options):  # type: ignore[no-untyped-def]
        ends.deliver()
        waits(holds, **options)

    member.wait_until = wait_until  # type: ignore[method-assign]
    assert receiver.receive(arrivals, asked, what="the weights", limit_s=0.0) == arrivals
    assert all(memory[name][0].tobytes() == content(20) for name in memory)
    member.lost.append("rank 2")
    again = [Arrival(each.sender, WEIGHTS, 0, lambda _: room(20)) for each in arrivals]
    ends.transfers["rank 2"].stop_serving(WEIGHTS)
    assert receiver.receive(again, asked, what="the weights", limit_s=0.0) == again[:1]
