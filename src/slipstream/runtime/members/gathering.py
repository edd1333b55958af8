"""Gather values of all ranks on all ranks, over the job's own links.

Rank 0 collects them. It answers a rank when all requested values have arrived. It does not wait for
workers without which the job continues. It keeps answered values for a while, because a restarted
worker asks for the values that the others gathered before it came back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeVar

import msgspec

from slipstream.errors import ConfigError, FrameRefused, RuntimeFault, WaitLimit
from slipstream.runtime.members.member import HUB, Member
from slipstream.transports.wire import Contribute, Gathered, Message, Rejoin
from slipstream.types import Rank, rank_of

LARGEST_VALUE_BYTES = 16 << 20
MOST_OPEN = 4096  # open gatherings
SHOWN_OPEN = 8  # how many of these a heartbeat lists
KEPT, KEPT_BYTES = 1024, 64 << 20  # limits for the first gatherings, and again for the last
# Before all gradients; not with control priority, which is blocked while a peer is stopped.
URGENT = -1000
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
Source = Literal["all", "any"] | Rank
Values = Mapping[Rank, bytes]
T = TypeVar("T")
# By the first part of a key: the collective call to which it belongs.
CALLS = {
    "model": "job.distribute",
    "broadcast": "job.broadcast",
    "gather": "job.gather",
    "mean": "job.mean",
    "flushed": "job.flush",
    "ended": "the end of the `with` block",
    "save": "job.save",
    "load": "job.load",
    "load_state_dict": "load_state_dict, where servers update",
}


@dataclass(slots=True)
class Record:
    """One gathering: the expected ranks, the values that have arrived, and the waiting ranks."""

    source: Source
    values: dict[Rank, bytes] = field(default_factory=dict)
    waiting: set[Rank] = field(default_factory=set)

    def missing(self, live: Collection[Rank]) -> list[Rank]:
        """Return the live ranks whose values have not arrived."""
        if self.source == "any":
            return [] if self.values else sorted(live)
        senders = live if self.source == "all" else {self.source}
        return sorted(set(senders) - self.values.keys())

    @property
    def nbytes(self) -> int:
        """The size of all values."""
        return sum(len(value) for value in self.values.values())


class Kept:
    """Keys of ended gatherings that may still be requested: the first ones and the last ones."""

    def __init__(self) -> None:
        self._first, self._first_bytes = 0, 0
        self._last: deque[tuple[str, int]] = deque()
        self._last_bytes = 0

    def add(self, key: str, nbytes: int) -> list[str]:
        """Keep one more key; return the keys that are no longer kept."""
        if self._first < KEPT and self._first_bytes + nbytes <= KEPT_BYTES:
            self._first += 1
            self._first_bytes += nbytes
            return []
        self._last.append((key, nbytes))
        self._last_bytes += nbytes
        dropped = []
        while len(self._last) > 1 and (len(self._last) > KEPT or self._last_bytes > KEPT_BYTES):
            old, old_bytes = self._last.popleft()
            self._last_bytes -= old_bytes
            dropped.append(old)
        return dropped


class Collector:
    """The state of rank 0, pure: takes contributions, decides which ranks get which values."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._records: dict[str, Record] = {}
        self._open: dict[str, None] = {}  # keys, oldest first
        self._ended_keys = Kept()

    def contribute(
        self, key: str, source: Source, rank: Rank, value: bytes | None, *, asks: bool = True
    ) -> None:
        """Take a contribution; raise FrameRefused if it is invalid."""
        record = self._records.get(key)
        if record is None:
            if len(self._open) >= MOST_OPEN:
                raise FrameRefused(f"{MOST_OPEN} gatherings are open, which is the limit")
            record = self._records[key] = Record(source)
            self._open[key] = None
        if record.source != source:
            raise FrameRefused(f"rank {rank} gathers {key!r} from {source}, not {record.source}")
        # An ended gathering does not change: a restarted worker repeats its contributions.
        if value is not None and key in self._open:
            record.values.setdefault(rank, value)
        if asks:
            record.waiting.add(rank)

    def due(self, lost: Collection[Rank]) -> Iterator[tuple[str, list[Rank], Values]]:
        """Yield complete keys, the ranks that wait for them, and the values."""
        live = set(range(self._workers)) - set(lost)
        for key in list(self._open):
            if not self._records[key].missing(live):
                del self._open[key]
                yield from self.answer(key)
                for old in self._ended_keys.add(key, self._records[key].nbytes):
                    self._records.pop(old, None)

    def answer(self, key: str) -> Iterator[tuple[str, list[Rank], Values]]:
        """Yield the same for one key whose gathering has ended."""
        record = self._records.get(key)
        if record is not None and key not in self._open and record.waiting:
            waiting, record.waiting = sorted(record.waiting), set()
            yield key, waiting, dict(sorted(record.values.items()))

    def awaited(self, lost: Collection[Rank]) -> dict[str, list[str]]:
        """Return, by key of the oldest gatherings, the ranks whose values have not arrived."""
        live = set(range(self._workers)) - set(lost)
        return {
            key: [f"rank {rank}" for rank in self._records[key].missing(live)]
            for key in islice(self._open, SHOWN_OPEN)
        }


class Gathering:
    """One rank's side; readers wait, within a limit.

    Args:
        member: This rank's member, which sends the values.
        rank: This rank.
        workers: The number of ranks.
        limit_s: The longest wait for a value.
    """

    def __init__(self, member: Member, rank: Rank, workers: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._member, self._rank = member, rank
        self._requested: set[str] = set()
        self._results: dict[str, Values] = {}
        self._watch: Callable[[Sequence[str]], None] = lambda missing: member.check()
        member.on(Gathered, self._on_gathered)
        if member.is_hub:
            self._collector = Collector(workers)
            member.on(Contribute, self._on_contribute)
            member.on(Rejoin, self._on_rejoin)
            member.heartbeat.awaited = lambda: self._collector.awaited(self._lost())
            member.on_tick(lambda: self._answer(self._collector.due(self._lost())))

    @contextmanager
    def watched(self, watch: Callable[[Sequence[str]], None]) -> Iterator[None]:
        """Call ``watch`` while waiting within the block, with the names of the missing ranks."""
        before, self._watch = self._watch, watch
        try:
            yield
        finally:
            self._watch = before

    # ---- what ranks call

    def gather(self, key: str, value: object, kind: type[T]) -> list[T]:
        """Return every rank's value, by rank; every rank must call it with the same key.

        Workers without which the others continue are left out.
        """
        self._send(Contribute(key, "all", asks=True), encoded(value))
        return [decoded(content, kind) for content in self._result(key).values()]

    def post(self, key: str, value: object) -> None:
        """Send this rank's value to every rank that reads the key."""
        self._send(Contribute(key, self._rank, asks=False), encoded(value))

    def read(self, key: str, rank: Rank, kind: type[T]) -> T:
        """Return the value that a rank has posted under a key."""
        self._send(Contribute(key, rank, asks=True))
        return decoded(self._result(key)[rank], kind)

    def put(self, key: str, content: bytes) -> None:
        """Set the value of a key that any one rank sets."""
        self._send(Contribute(key, "any", asks=False), content)

    def get(self, key: str) -> bytes:
        """Return the value of a key that any one rank sets."""
        self._send(Contribute(key, "any", asks=True))
        return next(iter(self._result(key).values()))

    def is_first(self, key: str) -> bool:
        """Return whether this rank is the first to call it; each rank calls it once per key."""
        self._send(Contribute(key, "any", asks=True), b"")
        return self._rank in self._result(key)

    def _send(self, body: Contribute, *contents: bytes) -> None:
        if any(len(content) > LARGEST_VALUE_BYTES for content in contents):
            raise ConfigError(
                f"a value of {len(contents[0])} bytes cannot be shared: at most "
                f"{LARGEST_VALUE_BYTES} are; share a path or a checksum instead"
            )
        if body.asks:
            self._requested.add(body.key)
        self._member.send(HUB, body, contents, priority=URGENT)

    def _result(self, key: str) -> Values:
        self._wait(key)
        with self._member.lock:
            self._requested.discard(key)
            return self._results.pop(key)

    def _wait(self, key: str) -> None:
        deadline, pause_s = time.monotonic() + self.limit_s, SHORTEST_PAUSE_S
        while key not in self._results:
            missing = self._member.heartbeat.last_awaited.get(key, ())
            try:
                self._watch(missing)
            except RuntimeFault:
                if key not in self._results:  # otherwise the values arrived meanwhile
                    raise
            if time.monotonic() > deadline:
                raise WaitLimit(waiting_for(key), self.limit_s, missing or [HUB])
            self._member.waiter.wait(lambda: key in self._results, pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    # ---- messages

    def _on_gathered(self, message: Message[Gathered]) -> None:
        body = message.body
        if message.sender != HUB or body.key not in self._requested:
            raise FrameRefused(f"{message.sender} sent values of {body.key!r} without a request")
        if len(body.ranks) != len(message.frames):
            raise FrameRefused(f"{len(message.frames)} values for {len(body.ranks)} ranks")
        with self._member.updating():
            self._results[body.key] = {
                rank: bytes(frame) for rank, frame in zip(body.ranks, message.frames, strict=True)
            }

    def _lost(self) -> set[Rank]:
        return {rank_of(name) for name in self._member.lost}

    def _on_contribute(self, message: Message[Contribute]) -> None:
        body, rank = message.body, rank_of(message.sender)
        nbytes = sum(memoryview(frame).nbytes for frame in message.frames)
        if rank < 0 or len(message.frames) > 1 or nbytes > LARGEST_VALUE_BYTES:
            raise FrameRefused(f"a value of {nbytes} bytes from {message.sender}")
        value = bytes(message.frames[0]) if message.frames else None
        self._collector.contribute(body.key, body.source, rank, value, asks=body.asks)
        self._answer(self._collector.answer(body.key))
        self._answer(self._collector.due(self._lost()))

    def _answer(self, due: Iterator[tuple[str, list[Rank], Values]]) -> None:
        for key, ranks, values in due:
            for rank in ranks:
                body, frames = Gathered(key, list(values)), list(values.values())
                self._member.send(f"rank {rank}", body, frames, priority=URGENT)

    def _on_rejoin(self, message: Message[Rejoin]) -> None:
        self._member.coordination.await_return(message.sender, message.body, message.process)


def encoded(value: object) -> bytes:
    """Return a value as bytes; raise ConfigError if it is not plain data."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"a {type(value).__name__} cannot be shared ({error}): give numbers, text, lists, "
            "dicts or None"
        ) from error


def decoded(content: bytes, kind: type[T]) -> T:
    """Return the value of these bytes; raise FrameRefused if they hold no such value."""
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise FrameRefused(f"a gathered value that cannot be read: {error}") from error


def waiting_for(key: str) -> str:
    """Return the object of a wait for a key, for error messages."""
    first = key.partition("/")[0]
    if first == "joined":
        return "all ranks to join"
    if first in CALLS:
        return f"all ranks in {CALLS[first]}, which every rank comes to at the same step"
    return f"all ranks to send their {first!r}"
