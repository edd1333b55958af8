"""What the launcher does for learners that share memory: the paper's watchdog.

It owns the memory, so that it outlives every process that uses it. It introduces learners to each
other's model, has the server started, deals batches, says to all what one has shared, and sees to
it that somebody takes the place of who dies: a learner goes on from the shared weights, a server
from the last checkpoint. All of it happens in the launcher's main thread, one event at a time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.consistency.leases import Batch, Leases
from slipstream.planning.segment import SegmentPlan
from slipstream.runtime.workshop_messages import (
    Account,
    Ask,
    Begin,
    Body,
    Departing,
    Done,
    Farewell,
    Filled,
    Finish,
    Finished,
    Hello,
    Keep,
    Kept,
    Lease,
    Leased,
    Load,
    Note,
    Ready,
    Refused,
    Restore,
    Save,
    Share,
    Shared,
    Start,
    Welcome,
)
from slipstream.transports.shared_memory import SharedMemory

Rank = int
Tell = Callable[..., None]  # a body, and a descriptor with it or None


@dataclass(slots=True)
class Seat:
    """One learner, in the life it has now."""

    tell: Tell
    hello: Hello | None = None
    pushed: int = 0  # by lives before
    settled: int = 0  # batches of this life whose gradients are in
    departing: Departing | None = None


@dataclass(slots=True)
class Progress:
    """Of the server: what moved last, and when."""

    seen: tuple[int, ...] = ()
    since: float = 0.0


@dataclass(slots=True)
class Workshop:
    """``start_server`` starts a process and returns how to tell it something."""

    learners: int
    start_server: Callable[[], Tell]
    end_server: Callable[[], None]
    own_directory: Callable[[], Path]
    say: Callable[[str], None]
    fail: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    silence_s: float = 5.0
    most_deaths: int = 3  # of servers, without an update in between

    memory: SharedMemory | None = None
    rings: Rings | None = None
    restarts: int = 0
    _plan: SegmentPlan | None = None
    _hello: Hello | None = None
    _seats: dict[Rank, Seat] = field(default_factory=dict)
    _server: Tell | None = None
    _serving: bool = False  # it has said that it is ready
    _filler: Rank | None = None
    _filled: bool = False
    _board: dict[str, Any] = field(default_factory=dict)
    _loading: list[Rank] = field(default_factory=list)  # who waits for a checkpoint
    _loaded: dict[str, str] = field(default_factory=dict)  # paths, and what went wrong
    _leases: Leases | None = None
    _history: deque[Batch] = field(default_factory=lambda: deque(maxlen=100_000))
    _asked: deque[tuple[Rank | None, Body]] = field(default_factory=deque)
    _progress: Progress = field(default_factory=Progress)
    _version_at_death: int = -1
    _deaths: int = 0
    _finishing: bool = False
    _account: Account | None = None
    _restarted: int = 0

    # ---- learners come and go

    def seat(self, rank: Rank, tell: Tell) -> None:
        """A learner has been started."""
        pushed = self.rings.pushed(rank) if self.rings is not None else 0
        self._seats[rank] = Seat(tell, pushed=pushed)

    def leave(self, rank: Rank) -> None:
        """A learner has ended, however."""
        seat = self._seats.pop(rank, None)
        if seat is None:
            return
        if self.rings is not None:
            self.rings.bury(rank)
            self._settle(rank, seat)
        if self._leases is not None:
            self._leases.forfeit(rank, keeping=0)
        if self._filler == rank and not self._filled:
            self._filler = None
            self._welcome()

    def hear(self, rank: Rank, body: Body) -> None:
        seat = self._seats.get(rank)
        if seat is None:
            return
        if isinstance(body, Hello):
            self._introduce(rank, seat, body)
        elif isinstance(body, Filled):
            self._ask_server(rank, Keep())
        elif isinstance(body, Share):
            self._tell(rank, Shared(self._board.setdefault(body.key, body.value)))
        elif isinstance(body, Lease):
            self._deal(rank, seat, body)
        elif isinstance(body, Save):
            self._ask_server(rank, Keep(body.path), body)
        elif isinstance(body, Load):
            self._load(rank, body)
        elif isinstance(body, Ask):
            self._ask_server(rank, body)
        elif isinstance(body, Departing):
            seat.departing = body
            self._settle(rank, seat)

    def _tell(self, rank: Rank, body: Body, descriptor: int | None = None) -> None:
        if rank in self._seats:
            self._seats[rank].tell(body, descriptor)

    # ---- what they share

    def _introduce(self, rank: Rank, seat: Seat, hello: Hello) -> None:
        if self._hello is None:
            self._hello = hello
            self._make_memory(hello)
            self._start()
        elif hello.portrait != self._hello.portrait:
            trouble = difference(rank, self._hello.portrait, hello.portrait)
            self.say(trouble)
            self._tell(rank, Refused(trouble))
            return
        seat.hello = hello
        self._welcome()

    def _make_memory(self, hello: Hello) -> None:
        self._plan = SegmentPlan.of(hello.tensors, len(hello.settings))
        shape = (self.learners, hello.slots, self._plan.slot_nbytes, self._plan.weights_nbytes)
        self.memory = SharedMemory.create(segment_nbytes(*shape))
        format_segment(self.memory.memory, *shape)
        self.rings = Rings(self.memory.memory)

    def _welcome(self) -> None:
        """Whoever waits and can go on."""
        if not self._serving or self.memory is None or self._plan is None:
            return
        for rank, seat in self._seats.items():
            if seat.hello is None:
                continue
            if self._filled:
                seat.hello = None
                self._tell(rank, Welcome(self._plan, fill=False), self.memory.descriptor)
                self._tell(rank, Begin())
            elif self._filler is None:
                self._filler, seat.hello = rank, None
                self._tell(rank, Welcome(self._plan, fill=True), self.memory.descriptor)

    # ---- the server

    def _start(self) -> None:
        assert self._hello is not None
        assert self._plan is not None
        assert self.memory is not None
        directory = self._hello.checkpoints or str(self.own_directory())
        self._server = self.start_server()
        self._progress = Progress(since=self.clock())
        start = Start(
            self._plan,
            self._hello.optimizer,
            self._hello.settings,
            self._hello.updates == "direct",
            self._hello.consistent,
            directory,
            self._hello.every_s,
        )
        self._server(start, self.memory.descriptor)

    def _ask_server(self, rank: Rank | None, body: Body, reason: Body | None = None) -> None:
        """It answers in order."""
        self._asked.append((rank, reason or body))
        if self._serving and self._server is not None:
            self._server(body, None)

    def hear_server(self, body: Body) -> None:
        if isinstance(body, Note):
            self.say(body.text)
            return
        if isinstance(body, Ready):
            self._ready(body)
            return
        if isinstance(body, Finished):
            self._account = body.account
            self._bid_farewell()
            return
        rank, about = self._asked.popleft()
        if isinstance(body, Account):
            assert rank is not None
            self._tell(rank, body)
        elif isinstance(body, Kept):
            self._kept(rank, about, body.trouble)

    def _ready(self, ready: Ready) -> None:
        assert self.rings is not None
        for note in ready.notes:
            self.say(f"{note}; the one before is taken")
        self._serving = True
        if self._filled and not ready.restored:
            self.fail("the server died before it could keep a checkpoint")
            return
        if ready.restored and not self._filled:
            self.say(f"goes on from a checkpoint of {ready.version} updates")
        elif self._filled:
            self._undo(self._version_at_death - ready.version + ready.discarded)
        self._filled = self._filled or ready.restored
        for _, body in self._asked:
            assert self._server is not None
            self._server(_as_request(body), None)
        if self._finishing:
            self._tell_to_finish()
        self._welcome()

    def _kept(self, rank: Rank | None, about: Body, trouble: str) -> None:
        if isinstance(about, Load):
            self._loaded[about.path] = trouble
            for each in self._loading:
                self._tell(each, Done(trouble))
            self._loading.clear()
            return
        if isinstance(about, Save):
            assert rank is not None
            self._tell(rank, Done(trouble))
            return
        if trouble:
            self.say(f"{trouble}; if the server dies now, the job ends")
        if not self._filled and rank is not None:
            self._filled = True
            self._tell(rank, Begin())
            self._welcome()

    def _load(self, rank: Rank, body: Load) -> None:
        """All learners ask for the same, and the first one's is done; not where training has begun,
        for one that was started again."""
        assert self.rings is not None
        if body.path in self._loaded or (not self._loading and self.rings.version > 0):
            self._tell(rank, Done(self._loaded.get(body.path, "")))
            return
        self._loading.append(rank)
        if len(self._loading) == 1:
            self._ask_server(rank, Restore(body.path), body)

    def server_ended(self, code: int) -> None:
        """Another takes its place, unless all is done."""
        if self._account is not None:
            return
        self._server, self._serving = None, False
        if self.rings is None or self._hello is None:
            return
        version = self.rings.version
        self._deaths = 1 if version > self._version_at_death else self._deaths + 1
        if not self._filled and code > 0:
            self.fail(f"the server exited with code {code}")
            return
        if self._deaths > self.most_deaths:
            self.fail(f"{self._deaths} servers died one after the other without an update")
            return
        self._version_at_death = version
        self._restarted += 1
        self.say(f"the server was lost at update {version}; another takes its place")
        self.rings.bury(self.learners)
        self._start()

    def look(self) -> None:
        """Called after every event, and now and then. A server that is alive but does nothing is no
        better than a dead one."""
        self._finish_if_done()
        if not self._serving or self.rings is None or self._finishing:
            return
        rings = self.rings
        waiting = [r for r in range(self.learners) if rings.pushed(r) != rings.taken(r)]
        taken = tuple(rings.taken(rank) for rank in waiting)
        seen = (rings.version, *taken) if waiting else (rings.beat,)
        now = self.clock()
        if seen != self._progress.seen:
            self._progress = Progress(seen, now)
        elif now - self._progress.since > self.silence_s:
            self.say(f"the server has done nothing for {self.silence_s:.0f} s, and is ended")
            self._progress = Progress(since=now)
            self.end_server()

    # ---- batches

    def _deal(self, rank: Rank, seat: Seat, body: Lease) -> None:
        if self._leases is None:
            self._leases = Leases(body.batches)
        if self._leases.batches != body.batches:
            self._tell(
                rank,
                Refused(
                    f"rank {rank} asks for batches of another data set: its epochs have "
                    f"{body.batches}, the others' {self._leases.batches}"
                ),
            )
            return
        self._settle(rank, seat)
        self._leases.give_back(rank, body.returned)
        dealt = [self._leases.lease(rank) for _ in range(body.number)]
        self._tell(rank, Leased([(batch.epoch, batch.number) for batch in dealt]))

    def _settle(self, rank: Rank, seat: Seat) -> None:
        """Batches whose gradients have been pushed count."""
        if self._leases is None or self.rings is None:
            return
        new = self.rings.pushed(rank) - seat.pushed - seat.settled
        for batch in self._leases.first_of(rank, new):
            self._leases.settle(rank, counts=True)
            self._history.append(batch)
        seat.settled += new

    def _undo(self, updates: int) -> None:
        """The last so many gradients are lost: their batches are dealt again."""
        for rank, seat in self._seats.items():
            self._settle(rank, seat)
        if self._leases is not None:
            lost = [self._history.pop() for _ in range(min(updates, len(self._history)))]
            self._leases.deal_again(lost)

    # ---- the end

    def _finish_if_done(self) -> None:
        if self._finishing or not self._seats:
            return
        if all(seat.departing is not None for seat in self._seats.values()):
            self._finishing = True
            self._tell_to_finish()

    def _tell_to_finish(self) -> None:
        if self.rings is None or self._server is None or not self._serving:
            if self.rings is None:
                self._bid_farewell()
            return
        self.rings.close()
        self._server(Finish(), None)

    def _bid_farewell(self) -> None:
        leaving = {r: s.departing for r, s in sorted(self._seats.items()) if s.departing}
        ages = Counter(self._account.staleness if self._account else {})
        for departing in leaving.values():
            ages.update(departing.ages)
        account = self._account or Account({})
        whole = Account(dict(ages), account.refused, account.checkpoints)
        figures = [departing.figures for departing in leaving.values()]
        for number, rank in enumerate(leaving):
            told = Farewell(figures, whole, self.restarts + self._restarted)
            self._tell(rank, told if number == 0 else Farewell([]))


def _as_request(body: Body) -> Body:
    """What the server is told for what a learner has asked."""
    if isinstance(body, Save):
        return Keep(body.path)
    if isinstance(body, Load):
        return Restore(body.path)
    return body


def difference(rank: Rank, first: list[str], other: list[str]) -> str:
    """The first thing in which a learner's model or strategy differs from the others'."""
    for theirs, its in zip(first, other, strict=False):
        if theirs != its:
            return f"rank {rank} differs from the others: it has {its}; they have {theirs}"
    longer, who = (other, f"rank {rank}") if len(other) > len(first) else (first, "the others")
    return (
        f"rank {rank} differs from the others: only {who} has {longer[min(len(first), len(other))]}"
    )
