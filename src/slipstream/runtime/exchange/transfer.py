"""Sends named state between two members, in pieces that are bounded, numbered and checked.

A member takes state only where an ``Arrival`` expects it: from one sender, under one name and
number, into memory of a known size. A chain is an arrival that forwards each piece; a star is an
arrival for each of several senders. Both ends list the same memory, or the first piece has a list
of entries, for which the receiver makes memory after it has checked them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slipstream.errors import FrameRefused
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.transports.wire import Fetch, Message, State, checksum
from slipstream.types import Buffer, Entry

PIECE_BYTES = 4 * 1024 * 1024
Array = np.ndarray[Any, np.dtype[np.uint8]]
Key = tuple[str, str, int]  # sender, name, number


@dataclass(slots=True, eq=False)
class Arrival:
    """State that one member may send, as far as it has arrived.

    Attributes:
        sender: The only member from which it is taken.
        name: Of the state.
        number: Tells states of this name apart.
        room: Returns memory for these entries, or refuses them.
        forward: A member that gets every piece as it arrives.
        done: Called when all of it is here; then it may come again.
        first: The first piece that was taken: it has the entries.
        memory: All of its bytes, if it is complete.
        taken: The number of bytes that have arrived.
    """

    sender: str
    name: str
    number: int
    room: Callable[[Sequence[Entry]], Sequence[Array]]
    forward: str | None = None
    done: Callable[[Arrival], None] | None = None
    first: State | None = field(default=None, init=False)
    memory: Sequence[Array] = field(default=(), init=False)
    taken: int = field(default=0, init=False)

    @property
    def key(self) -> Key:
        return self.sender, self.name, self.number

    @property
    def complete(self) -> bool:
        return self.first is not None and self.taken == self.first.total

    @property
    def entries(self) -> Sequence[Entry]:
        """Segment, name and dtype of what the memory holds, if the sender says so."""
        return () if self.first is None else self.first.entries

    def take(self, body: State, frames: Sequence[Buffer]) -> None:
        """Check a piece, and put it in its place.

        Raises:
            FrameRefused: It is damaged, too large, not the next one, or has no place here.
        """
        what, sizes = f"{body.name} {body.number}", [memoryview(frame).nbytes for frame in frames]
        stop = body.start + sum(sizes)
        if len(sizes) != 1 or sizes[0] > PIECE_BYTES:
            raise FrameRefused(
                f"{what}: {len(sizes)} frames of {sizes[:8]} bytes, expected one of at most "
                f"{PIECE_BYTES}"
            )
        if body.start != self.taken or self.complete:
            raise FrameRefused(
                f"{what}: a piece from byte {body.start} on, which is not the next: {self.taken} "
                "have arrived"
            )
        if checksum(frames) != body.crc:
            raise FrameRefused(f"{what}: wrong checksum of the piece at byte {body.start}")
        memory = self.room(body.entries) if self.first is None else self.memory
        total = sum(each.nbytes for each in memory)
        if body.total != total or stop > total:
            raise FrameRefused(
                f"{what}: bytes {body.start} to {stop} of {body.total}, expected {total} in all"
            )
        source = memoryview(frames[0])
        for place in places(memory, body.start, stop):
            place[:] = source[: len(place)]
            source = source[len(place) :]
        self.first, self.memory, self.taken = self.first or body, memory, stop


class Transfer:
    """One pair's end of all transfers of state: sends it, answers requests, takes arrivals.

    Attributes:
        member: Sends and receives the messages.
    """

    def __init__(self, member: Endpoint) -> None:
        self.member = member
        self._answers: dict[str, Callable[[Message[Fetch]], None]] = {}  # by name
        self._expected: dict[Key, Arrival] = {}
        self._may_come_early: dict[str, Callable[[Message[State]], bool]] = {}  # by name
        self._early: list[Message[State]] = []
        member.on(Fetch, self._on_fetch)
        member.on(State, self._on_state)

    # ---- sending

    def send(
        self,
        peer: str,
        name: str,
        number: int,
        memory: Sequence[Buffer],
        *,
        entries: Sequence[Entry] = (),
        round_: int = 0,
        priority: int = 0,
    ) -> None:
        """Send bytes that lie in several places, end to end; they must not change meanwhile."""
        total = sum(memoryview(each).nbytes for each in memory)
        for start in range(0, max(total, 1), PIECE_BYTES):
            parts = places(memory, start, start + PIECE_BYTES)
            piece = parts[0] if len(parts) == 1 else b"".join(parts)
            named = [] if start else list(entries)
            body = State(name, number, start, total, checksum([piece]), named, round_)
            self.member.send(peer, body, [piece], priority=priority)

    def serve(self, name: str, answer: Callable[[Message[Fetch]], None]) -> None:
        """Let peers ask for the state of a name; ``answer`` runs on the pump's thread."""
        self._answers[name] = answer

    def stop_serving(self, name: str) -> None:
        """Refuse requests from now on, and forget who answered them."""
        self._answers.pop(name, None)

    def _on_fetch(self, message: Message[Fetch]) -> None:
        name = message.body.name
        if name not in self._answers:
            raise FrameRefused(f"{self.member.name} has no {name!r}, only {sorted(self._answers)}")
        self._answers[name](message)

    # ---- receiving

    def ask(self, peer: str, name: str, number: int = 0) -> None:
        """Ask a peer for its state of a name, which must be expected."""
        self.member.send(peer, Fetch(name, number))

    def receive(
        self, arrivals: Sequence[Arrival], asked: Mapping[str, str], *, what: str, limit_s: float
    ) -> list[Arrival]:
        """Ask members for state, by name, and wait for all of it.

        Args:
            asked: By member, the name of its state.
            what: Names the state if the wait reaches its limit.
            limit_s: The limit.

        Returns:
            The arrivals that are complete: all but those from lost members.
        """
        left = list(arrivals)

        def all_are_here() -> bool:
            while left and (left[-1].complete or left[-1].sender in self.member.lost):
                left.pop()
            return not left

        with self.expecting(arrivals):
            for peer, name in asked.items():
                self.ask(peer, name)
            self.member.wait_until(
                all_are_here,
                what=what,
                limit_s=limit_s,
                missing=lambda: sorted({each.sender for each in left if not each.complete}),
            )
        return [arrival for arrival in arrivals if arrival.complete]

    def expect(self, arrival: Arrival) -> None:
        """Take this state from now on, and first what of it has come early."""
        with self.member.lock:
            self._expected[arrival.key] = arrival
            early, self._early = self._early, []
            for message in early:
                with suppress(FrameRefused):  # some may not come any more
                    self._on_state(message)

    @contextmanager
    def expecting(self, arrivals: Sequence[Arrival]) -> Iterator[None]:
        """Take this state inside the block only."""
        for arrival in arrivals:
            self.expect(arrival)
        try:
            yield
        finally:
            with self.member.lock:
                for arrival in arrivals:
                    del self._expected[arrival.key]

    def keep_early(self, name: str, may_come: Callable[[Message[State]], bool]) -> None:
        """Keep pieces that nobody expects yet until somebody does, if ``may_come``."""
        self._may_come_early[name] = may_come

    def _on_state(self, message: Message[State]) -> None:
        sender, name, number = message.sender, message.body.name, message.body.number
        with self.member.updating():
            if arrival := self._expected.get((sender, name, number)):
                self._take(arrival, message)
            elif name in self._may_come_early and self._may_come_early[name](message):
                self._early.append(message)
            else:
                raise FrameRefused(f"{name} {number} from {sender} is not expected")

    def _take(self, arrival: Arrival, message: Message[State]) -> None:
        arrival.take(message.body, message.frames)
        if arrival.forward is not None:
            self.member.send(arrival.forward, message.body, message.frames)
        if arrival.complete and arrival.done is not None:
            self._expected[arrival.key] = replace(arrival)
            arrival.done(arrival)


def places(memory: Sequence[Buffer], start: int, stop: int) -> list[memoryview]:
    """Return the places of bytes ``start`` to ``stop`` of memory that counts as end to end.

    >>> [bytes(place) for place in places([b"abc", b"", b"defg", b"h"], 2, 5)]
    [b'c', b'de']
    """
    found: list[memoryview] = []
    for each in memory:
        view = memoryview(each)
        if place := view[max(start, 0) : max(stop, 0)]:
            found.append(place)
        start, stop = start - len(view), stop - len(view)
    return found
