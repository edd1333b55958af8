"""The launcher's work for learners that share memory: the paper's watchdog.

It owns the memory, which therefore outlives every process that uses it. It compares the learners'
models, starts the server, deals batches, forwards shared values, and replaces processes that die: a
new learner continues with the shared weights, a new server from the last checkpoint. All of it
happens in the launcher's main thread, one event at a time.
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
from slipstream.errors import LaunchError
from slipstream.planning.segment import SegmentPlan
from slipstream.runtime.process.config_fingerprint import difference
from slipstream.runtime.shared_memory import messages
from slipstream.runtime.shared_memory.batches import BatchDealer, Rank
from slipstream.runtime.shared_memory.server_requests import Send, ServerRequests
from slipstream.runtime.shared_memory.server_watchdog import START_S, ServerWatchdog
from slipstream.transports.shared_memory import SharedMemory

MOST_DEATHS = 3  # of servers, without an update in between
SECOND_JOB = (
    "the learners that shared this memory have finished: start another job with another "
    "`slipstream run`"
)


@dataclass(slots=True)
class LearnerRecord:
    """One learner, in its current incarnation."""

    send: Send
    joined: bool = False  # its Hello was accepted
    waits: bool = False  # for a Welcome
    trained: bool = False  # it has made its last step
    departing: messages.Departing | None = None
    awaited: messages.Awaited | None = None  # what it was told last


@dataclass(slots=True)
class SharedMemoryCoordinator:
    """The launcher's state of a job of learners; the caller owns processes and sockets.

    Args:
        learners: how many there are.
        start_server: starts a server process; returns how to send to it.
        end_server: kills the server.
        end_learner: kills a learner.
        directory_for: returns the directory for checkpoints, given the one that learners request,
            if any; raises LaunchError if this job may not use it.
        log: prints a line of the launcher.
        fail: ends the job, with a reason.

    Attributes:
        memory: the shared memory, once a learner has joined.
        rings: the learners' slots in it.
        restarts: how many learners were started again.
        finishing: all learners have made their last steps.
        lacks_checkpoint: the last checkpoint is missing, in a directory that outlives the job.
    """

    learners: int
    start_server: Callable[[], Send]
    end_server: Callable[[], None]
    end_learner: Callable[[Rank], None]
    directory_for: Callable[[str | None], Path]
    log: Callable[[str], None]
    fail: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    memory: SharedMemory | None = None
    rings: Rings | None = None
    restarts: int = 0
    finishing: bool = False
    lacks_checkpoint: bool = False
    _job: str = field(default_factory=lambda: secrets.token_hex(8))  # in its checkpoints
    _directory: Path | None = None
    _plan: SegmentPlan | None = None
    _hello: messages.Hello | None = None
    _first: Rank = -1  # who has sent it
    _records: dict[Rank, LearnerRecord] = field(default_factory=dict)
    _absent: list[Rank] = field(default_factory=list)
    _networked: dict[Rank, str] = field(default_factory=dict)  # non-learners, and why
    _mixed: bool = False  # some workers are learners and some are not
    _server: Send | None = None
    _serving: bool = False  # its Ready has arrived
    _filler: Rank | None = None
    _filled: bool = False
    _shared: dict[str, Any] = field(default_factory=dict)
    _loading: list[Rank] = field(default_factory=list)  # learners that wait for a checkpoint
    _loaded: dict[messages.Load, str] = field(default_factory=dict)  # the error, or empty
    _batches: BatchDealer = field(default_factory=BatchDealer)
    _requests: ServerRequests = field(default_factory=ServerRequests)
    _began_at: int = 0  # the version at which the current server began
    _deaths: int = 0
    _account: messages.Account | None = None
    _over: bool = False  # farewells are sent
    _replaced: int = 0  # number of replaced servers
    _watchdog: ServerWatchdog = field(init=False)

    def __post_init__(self) -> None:
        self._watchdog = ServerWatchdog(self.clock)

    @property
    def has_weights(self) -> bool:
        """Whether the memory holds a model's weights."""
        return self._filled

    @property
    def joined(self) -> set[Rank]:
        """Workers that have joined the job, as learners or over the network."""
        learners = {rank for rank, record in self._records.items() if record.joined}
        return learners | self._networked.keys()

    # ---- learners that start and end

    def add_learner(self, rank: Rank, send: Send) -> None:
        """A worker was started, which may become a learner."""
        self._batches.begin(rank, self.rings.pushed(rank) if self.rings is not None else 0)
        self._records[rank] = LearnerRecord(send)

    def never_joined(self, rank: Rank) -> None:
        """A worker has ended with code 0 without joining.

        That ends a job of learners, which needs all learners that were requested. A script that
        does not use slipstream may end so.
        """
        self._absent.append(rank)
        if self._hello is not None:
            self._refuse_absence()

    def _refuse_absence(self) -> None:
        names = ", ".join(f"rank {rank}" for rank in self._absent)
        self.fail(f"{names} exited with code 0 without joining the job (slipstream.init)")

    def remove_learner(self, rank: Rank) -> None:
        """A worker has ended for any reason; answers to its requests are dropped."""
        if self._records.pop(rank, None) is None:
            return
        self._requests.forget(rank)
        self._loading = [each for each in self._loading if each != rank]
        if self.rings is not None:
            self.rings.release_dead(rank)
            if self._direct:  # only the learner itself would have taken its slot back
                self.rings.discard(rank, self.rings.pushed(rank))
            self._batches.count(rank, self.rings.pushed(rank))
        self._batches.forfeit(rank)
        if self._filler == rank:
            self._filler = None
            self._welcome()

    def on_message(self, rank: Rank, body: messages.Body) -> None:
        """Handle a message of a worker."""
        if rank not in self._records:
            return
        match body:
            case messages.Hello():
                self._on_hello(rank, body)
            case messages.Networked():
                self._networked[rank] = body.doing
                if self._hello is not None:
                    self._refuse_mixture(rank)
            case messages.Filled() | messages.Save() | messages.Ask():
                self._requests.ask(rank, body)
            case messages.Share():
                self._send(rank, messages.Shared(self._shared.setdefault(body.key, body.value)))
            case messages.Lease():
                self._on_lease(rank, body)
            case messages.Load():
                self._on_load(rank, body)
            case messages.Trained():
                self._records[rank].trained = True
                self._count_batches(rank)
            case messages.Departing():
                self._records[rank].departing = body

    def _send(self, rank: Rank, body: messages.Body, descriptor: int | None = None) -> None:
        if rank in self._records:
            self._records[rank].send(body, descriptor)

    # ---- shared values

    def _on_hello(self, rank: Rank, hello: messages.Hello) -> None:
        if self._networked:
            self._refuse_mixture(rank)
            return
        if self.finishing:
            self._send(rank, messages.Refused(SECOND_JOB))
            return
        if self._hello is None:
            self._hello, self._first = hello, rank
            if not self._may_begin(hello):
                return
            self._make_memory(hello)
            self._start_server()
        elif hello.config_fingerprint != self._hello.config_fingerprint:
            # The first one may be this rank, before it was started again.
            other = f"rank {self._first}" if rank != self._first else "its first start"
            known = self._hello.config_fingerprint
            trouble = difference(rank, known, hello.config_fingerprint, other)
            self.log(trouble)
            self._send(rank, messages.Refused(trouble))
            return
        self._records[rank].joined = self._records[rank].waits = True
        self._welcome()

    def _refuse_mixture(self, rank: Rank) -> None:
        """Fail once, and name one of the workers that request something else."""
        other, doing = next(iter(self._networked.items()))
        who = "another rank" if rank == other else f"rank {rank}"
        trouble = (
            f"rank {other} {doing}, but {who} asks for learners that share memory: every rank must "
            "name the same strategy in job.distribute, before it shares anything"
        )
        if not self._mixed:
            self._mixed = True
            self.fail(trouble)
        self._send(rank, messages.Refused(trouble))

    def _may_begin(self, hello: messages.Hello) -> bool:
        """Whether the job may begin; called before anything is read, written or shared."""
        try:
            self._directory = self.directory_for(hello.checkpoints)
        except LaunchError as error:
            self.fail(str(error))
        if self._absent:
            self._refuse_absence()
        return self._directory is not None and not self._absent

    def _make_memory(self, hello: messages.Hello) -> None:
        self._plan = SegmentPlan.of(hello.tensors, len(hello.settings))
        shape = (self.learners, hello.slots, self._plan.slot_nbytes, self._plan.weights_nbytes)
        self.memory = SharedMemory.create(segment_nbytes(*shape))
        format_segment(self.memory.memory, *shape)
        self.rings = Rings(self.memory.memory)

    def _welcome(self) -> None:
        """Admit waiting learners: the first one fills the memory, the others wait for that."""
        if not self._serving or self.memory is None or self._plan is None:
            return
        for rank, record in self._records.items():
            if not record.waits or not (self._filled or self._filler is None):
                continue
            record.waits = False
            self._send(rank, messages.Welcome(self._plan, not self._filled), self.memory.descriptor)
            if self._filled:
                self._send(rank, messages.Begin())
            else:
                self._filler = rank

    # ---- the server

    @property
    def _direct(self) -> bool:
        return self._hello is not None and self._hello.updates == "direct"

    def _start_server(self) -> None:
        assert self._hello is not None
        assert self._plan is not None
        assert self.memory is not None
        self._server = self.start_server()
        self._watchdog.restart()
        start = messages.Start(
            self._job,
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

    def on_server_message(self, body: messages.Body) -> None:
        """Handle a message of the server."""
        match body:
            case messages.Note():
                self.log(body.text)
            case messages.Ready():
                self._on_ready(body)
            case messages.Finished():
                self._account = body.account
                if body.trouble and self._hello is not None and self._hello.checkpoints is not None:
                    self.log(body.trouble)
                    self.lacks_checkpoint = True
                for learner in self._records:
                    self._send(learner, messages.Final())
            case messages.AccountReply():
                rank, _ = self._requests.answered(body.number)
                if rank is not None:
                    self._send(rank, body.account)
            case messages.Kept():
                self._on_kept(*self._requests.answered(body.number), body.trouble)

    def _on_ready(self, ready: messages.Ready) -> None:
        for note in ready.notes:
            self.log(f"{note}; the one before is taken")
        self._serving = True
        self._began_at = ready.version
        if self._filled and not ready.restored and not self._direct:
            self.end_server()
            self.fail("the server died before it could keep a checkpoint")
            return
        if ready.restored and not self._filled:
            self.log(f"goes on from a checkpoint of {ready.version} updates")
        elif ready.restored:
            self.log(f"training goes on from update {ready.version}, the last checkpoint")
            self._undo(ready.taken, ready.let_go)
        self._filled = self._filled or ready.restored
        self._requests.connect(self._server)
        if self.finishing:
            self._send_finish()
        self._welcome()

    def _on_kept(self, rank: Rank | None, request: messages.Body, trouble: str) -> None:
        match request:
            case messages.Load():
                self._loaded[request] = trouble
                for each in self._loading:
                    self._send(each, messages.Done(trouble))
                self._loading.clear()
            case messages.Save() if rank is not None:
                self._send(rank, messages.Done(trouble))
            case messages.Filled() if rank is not None:
                if trouble:
                    self.log(f"{trouble}; until one is kept, the job ends if the server dies")
                self._filled = True
                self._send(rank, messages.Begin())
                self._welcome()

    def _on_load(self, rank: Rank, body: messages.Load) -> None:
        """All learners request the same checkpoint; the first request is forwarded.

        A restarted learner sends its request after training has begun: nothing is loaded then.
        """
        assert self.rings is not None
        if body in self._loaded or (not self._loading and self.rings.version > 0):
            self._send(rank, messages.Done(self._loaded.get(body, "")))
            return
        self._loading.append(rank)
        if not self._requests.loading:
            self._requests.ask(rank, body)

    def server_ended(self, code: int) -> None:
        """The server has ended: start another, unless it was done."""
        if self._account is not None or self.rings is None:
            return
        was_ready, self._server, self._serving = self._serving, None, False
        self._requests.connect(None)
        version = self.rings.version
        moved = was_ready and version > self._began_at
        self._deaths = 1 if moved else self._deaths + 1
        if code > 0:  # its own error: another server would fail the same way
            self.fail(f"the server exited with code {code}; what it wrote above says why")
            return
        if self._deaths > MOST_DEATHS:
            self.fail(f"{self._deaths} servers died one after the other without an update")
            return
        self._replaced += 1
        self.log(f"the server was lost at update {version}; another takes its place")
        if self._direct:
            self.rings.release_dead(self.learners)
        # If it died during an update, the next server keeps the lock of the weights until they are
        # valid.
        self._start_server()

    def tick(self) -> None:
        """Called after every event, and at intervals."""
        self._finish_if_done()
        self._name_awaited()
        if self.rings is None or self._server is None or self._account is not None:
            return
        if not self._serving:
            if self._watchdog.is_late():
                self._watchdog.restart()
                self.end_server()
                self.fail(
                    f"the server was not ready after {START_S:.0f} s; can the checkpoints in "
                    f"{self._directory} be read?"
                )
            return
        busy = self.finishing or self._requests.loading
        stalled_s = self._watchdog.stalled_s(self.rings, busy=busy)
        if stalled_s is not None:
            self._unblock(self.rings, stalled_s)

    def _unblock(self, rings: Rings, stalled_s: float) -> None:
        """Kill the learners that hold the lock for too long, or else the server."""
        reading = [rank for rank in self._records if rings.reading(rank)]
        if not reading:
            self.log(f"the server has done nothing for {stalled_s:.0f} s, and is ended")
            self.end_server()
        for rank in reading:
            self.log(f"rank {rank} has held the weights for {stalled_s:.0f} s, and is ended")
            self.end_learner(rank)
        self._watchdog.restart()

    # ---- batches

    def _on_lease(self, rank: Rank, body: messages.Lease) -> None:
        if obstacle := self._batches.obstacle(rank, body.batches):
            self._send(rank, messages.Refused(obstacle))
            return
        self._count_batches(rank)
        dealt = self._batches.deal(rank, body.number, body.returned)
        self._send(rank, messages.Leased([(batch.epoch, batch.number) for batch in dealt]))

    def _count_batches(self, rank: Rank) -> None:
        if self.rings is not None:
            self._batches.count(rank, self.rings.pushed(rank))

    def _undo(self, taken: Sequence[int], let_go: Sequence[int]) -> None:
        """Deal batches again whose updates were lost."""
        for rank in self._records:
            self._count_batches(rank)
        lost = self._batches.undo(taken, let_go)
        if self.finishing and lost:
            self.log(f"the last {lost} updates are lost: all learners had finished")

    # ---- the end

    def _finish_if_done(self) -> None:
        """All learners that there are have made their last steps, or have the last weights."""
        records = self._records.values()
        if not self.finishing and records and all(record.trained for record in records):
            self.finishing = True
            self._send_finish()
        left = [record.departing is not None for record in records]
        if self._account is not None and not self._over and left and all(left):
            self._over = True
            self._send_farewells()

    def _name_awaited(self) -> None:
        """Tell learners that wait at the end for whom they do, when that has changed."""
        if self._over:
            return
        if self._account is None:
            behind = [r for r, record in self._records.items() if not record.trained]
        else:
            behind = [r for r, record in self._records.items() if record.departing is None]
        awaited = messages.Awaited(sorted(behind))
        for waiting, record in self._records.items():
            if waiting not in behind and record.awaited != awaited:
                record.awaited = awaited
                self._send(waiting, awaited)

    def _send_finish(self) -> None:
        if self.rings is not None and self._server is not None and self._serving:
            self.rings.close()
            self._server(messages.Finish(), None)

    def _send_farewells(self) -> None:
        leaving = {r: each.departing for r, each in sorted(self._records.items()) if each.departing}
        account = self._account or messages.Account({})
        ages = Counter(account.staleness)
        for departing in leaving.values():
            ages.update(departing.ages)
        whole = messages.Account(dict(ages), account.refused, account.checkpoints)
        figures = [departing.figures for departing in leaving.values()]
        for number, rank in enumerate(leaving):
            farewell = messages.Farewell(figures, whole, self.restarts + self._replaced)
            self._send(rank, farewell if number == 0 else messages.Farewell([]))

    def close(self) -> None:
        """Close the memory; processes that have mapped it keep it."""
        self.rings = None
        if self.memory is not None:
            self.memory.close()
