"""What the launcher does for learners that share memory: the paper's watchdog.

It owns the memory, so that it outlives every process that uses it. It introduces learners to each
other's model, has the server started, deals batches, says to all what one has shared, and sees to
it that somebody takes the place of who dies: a learner goes on from the shared weights, a server
from the last checkpoint. All of it happens in the launcher's main thread, one event at a time.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.consistency.leases import Batch, Leases
from slipstream.errors import LaunchError
from slipstream.planning.segment import SegmentPlan
from slipstream.runtime.portraits import difference
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
    Told,
    Welcome,
)
from slipstream.transports.shared_memory import SharedMemory

Rank = int
Tell = Callable[..., None]  # a body, and a descriptor with it or None


@dataclass(slots=True)
class Seat:
    """One learner, in the life it has now."""

    tell: Tell
    pushed: int = 0  # by lives before
    settled: int = 0  # batches of this life whose gradients are in
    waits: bool = False  # to be welcomed
    departing: Departing | None = None


@dataclass(slots=True)
class Progress:
    """Of the server: what moved last, and when."""

    seen: tuple[int, ...] = ()
    since: float = 0.0


@dataclass(slots=True)
class Workshop:
    """``start_server`` starts a process and returns how to tell it something. ``directory_for``
    gives the directory for checkpoints, if this job may have the one that its learners name."""

    learners: int
    start_server: Callable[[], Tell]
    end_server: Callable[[], None]
    end_learner: Callable[[Rank], None]
    directory_for: Callable[[str | None], Path]
    say: Callable[[str], None]
    fail: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    silence_s: float = 5.0
    start_s: float = 120.0
    most_deaths: int = 3  # of servers, without an update in between
    remembered: int = 1_000_000  # batches of a learner that a checkpoint may bring back
    job: str = field(default_factory=lambda: secrets.token_hex(8))  # in its checkpoints

    memory: SharedMemory | None = None
    rings: Rings | None = None
    restarts: int = 0
    finishing: bool = False
    lacks_checkpoint: bool = False  # the last one, in a directory that outlives the job
    _directory: Path | None = None
    _plan: SegmentPlan | None = None
    _hello: Hello | None = None
    _seats: dict[Rank, Seat] = field(default_factory=dict)
    _absent: list[Rank] = field(default_factory=list)
    _server: Tell | None = None
    _serving: bool = False  # it has said that it is ready
    _filler: Rank | None = None
    _filled: bool = False
    _board: dict[str, Any] = field(default_factory=dict)
    _loading: list[Rank] = field(default_factory=list)  # who waits for a checkpoint
    _loaded: dict[str, str] = field(default_factory=dict)  # paths, and what went wrong
    _leases: Leases | None = None
    _learnt: dict[Rank, dict[int, Batch]] = field(default_factory=dict)  # by number of the push
    _requests: int = 0
    _asked: dict[int, tuple[Rank | None, Body]] = field(default_factory=dict)
    _progress: Progress = field(default_factory=Progress)
    _began_at: int = 0  # the version that the server of now found
    _deaths: int = 0
    _account: Account | None = None
    _replaced: int = 0  # servers

    @property
    def has_weights(self) -> bool:
        """Whether the memory holds somebody's model."""
        return self._filled

    # ---- learners come and go

    def seat(self, rank: Rank, tell: Tell) -> None:
        """A learner has been started."""
        pushed = self.rings.pushed(rank) if self.rings is not None else 0
        self._seats[rank] = Seat(tell, pushed)

    def stayed_away(self, rank: Rank) -> None:
        """A learner has ended with code 0, and never joined. A job of fewer learners than were
        asked for is none; a script that does not use slipstream may do what it likes."""
        self._absent.append(rank)
        if self._hello is not None:
            self._refuse_absence()

    def _refuse_absence(self) -> None:
        names = ", ".join(f"rank {rank}" for rank in self._absent)
        self.fail(f"{names} exited with code 0 without joining the job (slipstream.init)")

    def leave(self, rank: Rank) -> None:
        """A learner has ended, however; what it asked for is nobody's."""
        seat = self._seats.pop(rank, None)
        if seat is None:
            return
        self._asked = {
            number: (None if who == rank else who, body)
            for number, (who, body) in self._asked.items()
        }
        self._loading = [each for each in self._loading if each != rank]
        if self.rings is not None:
            self.rings.bury(rank)
            if self._direct:  # it was about to take its own slot back, and nobody else does
                self.rings.discard(rank, self.rings.pushed(rank))
            self._settle(rank, seat)
        if self._leases is not None:
            self._leases.forfeit(rank, keeping=0)
        if self._filler == rank:
            self._filler = None
            self._welcome()

    def hear(self, rank: Rank, body: Body) -> None:
        seat = self._seats.get(rank)
        if seat is None:
            return
        if isinstance(body, Hello):
            self._introduce(rank, seat, body)
        elif isinstance(body, Filled | Save | Ask):
            self._ask_server(rank, body)
        elif isinstance(body, Share):
            self._tell(rank, Shared(self._board.setdefault(body.key, body.value)))
        elif isinstance(body, Lease):
            self._deal(rank, seat, body)
        elif isinstance(body, Load):
            self._load(rank, body)
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
            if not self._may_begin(hello):
                return
            self._make_memory(hello)
            self._start()
        elif hello.portrait != self._hello.portrait:
            trouble = difference(rank, self._hello.portrait, hello.portrait, "who came first")
            self.say(trouble)
            self._tell(rank, Refused(trouble))
            return
        seat.waits = True
        self._welcome()

    def _may_begin(self, hello: Hello) -> bool:
        """Nothing is shared yet, and nothing has been read or written."""
        try:
            self._directory = self.directory_for(hello.checkpoints)
        except LaunchError as error:
            self.fail(str(error))
        if self._absent:
            self._refuse_absence()
        return self._directory is not None and not self._absent

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
            if not seat.waits or not (self._filled or self._filler is None):
                continue
            seat.waits = False
            self._tell(rank, Welcome(self._plan, not self._filled), self.memory.descriptor)
            if self._filled:
                self._tell(rank, Begin())
            else:
                self._filler = rank

    # ---- the server

    @property
    def _direct(self) -> bool:
        return self._hello is not None and self._hello.updates == "direct"

    def _start(self) -> None:
        assert self._hello is not None
        assert self._plan is not None
        assert self.memory is not None
        self._server = self.start_server()
        self._progress = Progress(since=self.clock())
        start = Start(
            self.job,
            self._plan,
            self._hello.optimizer,
            self._hello.settings,
            self._direct,
            self._hello.consistent,
            str(self._directory),
            self._hello.every_s,
            as_they_are=self._direct and self._filled,
        )
        self._server(start, self.memory.descriptor)

    def _ask_server(self, rank: Rank, body: Body) -> None:
        self._requests += 1
        self._asked[self._requests] = (rank, body)
        if self._serving:
            self._pass_on(self._requests, body)

    def _pass_on(self, number: int, body: Body) -> None:
        assert self._server is not None
        request: Body = Ask(number)
        if isinstance(body, Filled | Save):
            request = Keep(number, body.path if isinstance(body, Save) else None)
        elif isinstance(body, Load):
            request = Restore(number, body.path)
        self._server(request, None)

    def hear_server(self, body: Body) -> None:
        if isinstance(body, Note):
            self.say(body.text)
        elif isinstance(body, Ready):
            self._ready(body)
        elif isinstance(body, Finished):
            self._account = body.account
            if body.trouble and self._hello is not None and self._hello.checkpoints is not None:
                self.say(body.trouble)
                self.lacks_checkpoint = True
            self._bid_farewell()
        elif isinstance(body, Told):
            rank, _ = self._asked.pop(body.number)
            if rank is not None:
                self._tell(rank, body.account)
        elif isinstance(body, Kept):
            self._kept(*self._asked.pop(body.number), body.trouble)

    def _ready(self, ready: Ready) -> None:
        for note in ready.notes:
            self.say(f"{note}; the one before is taken")
        self._serving = True
        self._began_at = ready.version
        if self._filled and not ready.restored and not self._direct:
            self.end_server()
            self.fail("the server died before it could keep a checkpoint")
            return
        if ready.restored and not self._filled:
            self.say(f"goes on from a checkpoint of {ready.version} updates")
        elif ready.restored:
            self.say(f"training goes on from update {ready.version}, the last checkpoint")
            self._undo(ready.taken, ready.let_go)
        self._filled = self._filled or ready.restored
        for number, (_, body) in self._asked.items():
            self._pass_on(number, body)
        if self.finishing:
            self._tell_to_finish()
        self._welcome()

    def _kept(self, rank: Rank | None, about: Body, trouble: str) -> None:
        if isinstance(about, Load):
            self._loaded[about.path] = trouble
            for each in self._loading:
                self._tell(each, Done(trouble))
            self._loading.clear()
        elif isinstance(about, Save) and rank is not None:
            self._tell(rank, Done(trouble))
        elif isinstance(about, Filled) and rank is not None:
            if trouble:
                self.say(f"{trouble}; until one is kept, the job ends if the server dies")
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
        if not any(isinstance(asked, Load) for _, asked in self._asked.values()):
            self._ask_server(rank, body)

    def server_ended(self, code: int) -> None:
        """Another takes its place, unless all is done."""
        if self._account is not None or self.rings is None:
            return
        was_ready, self._server, self._serving = self._serving, None, False
        version = self.rings.version
        moved = was_ready and version > self._began_at
        self._deaths = 1 if moved else self._deaths + 1
        if code > 0:  # an error of its own: another server would come to the same
            self.fail(f"the server exited with code {code}; what it wrote above says why")
            return
        if self._deaths > self.most_deaths:
            self.fail(f"{self._deaths} servers died one after the other without an update")
            return
        self._replaced += 1
        self.say(f"the server was lost at update {version}; another takes its place")
        if self._direct:
            self.rings.bury(self.learners)
        # Else, if it died within an update, its successor has the weights until they are whole.
        self._start()

    def look(self) -> None:
        """Called after every event, and now and then."""
        self._finish_if_done()
        if self.rings is None or self._server is None or self._account is not None:
            return
        now, rings = self.clock(), self.rings
        if not self._serving:
            if now - self._progress.since > self.start_s:
                self._progress = Progress(since=now)
                self.end_server()
                self.fail(
                    f"the server was not ready after {self.start_s:.0f} s; can the checkpoints in "
                    f"{self._directory} be read?"
                )
            return
        waiting = [r for r in range(self.learners) if rings.pushed(r) != rings.taken(r)]
        # One that does what it was told may be at it for long.
        busy = self.finishing or any(isinstance(body, Load) for _, body in self._asked.values())
        seen = (rings.version, *(rings.taken(r) for r in waiting))
        if busy or not waiting:
            seen = (*seen, rings.beat)
        allowed_s = self.start_s if busy else self.silence_s
        if seen != self._progress.seen:
            self._progress = Progress(seen, now)
        elif now - self._progress.since > allowed_s:
            self._unblock(now, allowed_s)

    def _unblock(self, now: float, allowed_s: float) -> None:
        """A server that is alive but does nothing is no better than a dead one; nor is a learner
        that holds on to the weights."""
        assert self.rings is not None
        reading = [rank for rank in self._seats if self.rings.reading(rank)]
        if not reading:
            self._give_up_on_server(f"has done nothing for {allowed_s:.0f} s", now)
        for rank in reading:
            self.say(f"rank {rank} has held the weights for {allowed_s:.0f} s, and is ended")
            self.end_learner(rank)
        self._progress = Progress(since=now)

    def _give_up_on_server(self, why: str, now: float) -> None:
        self.say(f"the server {why}, and is ended")
        self._progress = Progress(since=now)
        self.end_server()

    # ---- batches

    def _deal(self, rank: Rank, seat: Seat, body: Lease) -> None:
        if self._leases is None:
            self._leases = Leases(body.batches)
        if self._leases.batches != body.batches:
            trouble = (
                f"rank {rank} asks for batches of another data set: its epochs have "
                f"{body.batches}, the others' {self._leases.batches}"
            )
            self._tell(rank, Refused(trouble))
            return
        self._settle(rank, seat)
        self._leases.give_back(rank, body.returned)
        dealt = [self._leases.lease(rank) for _ in range(body.number)]
        self._tell(rank, Leased([(batch.epoch, batch.number) for batch in dealt]))

    def _settle(self, rank: Rank, seat: Seat) -> None:
        """Batches whose gradients have been pushed count."""
        if self._leases is None or self.rings is None:
            return
        first = seat.pushed + seat.settled
        new = self._leases.first_of(rank, self.rings.pushed(rank) - first)
        for _ in new:
            self._leases.settle(rank, counts=True)
        learnt = self._learnt.setdefault(rank, {})
        learnt.update(enumerate(new, first))
        while len(learnt) > self.remembered:
            del learnt[next(iter(learnt))]
        seat.settled = self.rings.pushed(rank) - seat.pushed

    def _undo(self, taken: Sequence[int], let_go: Sequence[int]) -> None:
        """Gradients after the ``taken`` ones of the checkpoint, and before those pushed since the
        server let go of what it found, are lost: their batches are dealt again."""
        for rank, seat in self._seats.items():
            self._settle(rank, seat)
        lost = []
        for rank, learnt in self._learnt.items():
            numbers = [number for number in learnt if taken[rank] <= number < let_go[rank]]
            lost += [learnt.pop(number) for number in numbers]
        if self._leases is not None:
            self._leases.deal_again(lost)
        if self.finishing and lost:
            self.say(f"the last {len(lost)} updates are lost: all learners had finished")

    # ---- the end

    def _finish_if_done(self) -> None:
        if self.finishing or not self._seats:
            return
        if all(seat.departing is not None for seat in self._seats.values()):
            self.finishing = True
            self._tell_to_finish()

    def _tell_to_finish(self) -> None:
        if self.rings is not None and self._server is not None and self._serving:
            self.rings.close()
            self._server(Finish(), None)

    def _bid_farewell(self) -> None:
        leaving = {r: s.departing for r, s in sorted(self._seats.items()) if s.departing}
        account = self._account or Account({})
        ages = Counter(account.staleness)
        for departing in leaving.values():
            ages.update(departing.ages)
        whole = Account(dict(ages), account.refused, account.checkpoints)
        figures = [departing.figures for departing in leaving.values()]
        for number, rank in enumerate(leaving):
            told = Farewell(figures, whole, self.restarts + self._replaced)
            self._tell(rank, told if number == 0 else Farewell([]))

    def close(self) -> None:
        self.rings = None
        if self.memory is not None:
            self.memory.close()
