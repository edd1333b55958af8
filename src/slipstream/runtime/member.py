"""A member of a job: its transport, its heartbeat, and what it knows of the others.

Rank 0 is the hub: everybody beats to it, and it tells everybody who is where, who is lost and who
failed. A worker pumps messages on a thread of its own; a server pumps on its main thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.errors import (
    ContributionRefused,
    FrameRefused,
    PeerFailed,
    PeerLost,
    RuntimeFault,
    WaitLimit,
)
from slipstream.transports.protocol import CONTROL, Ticket, Transport
from slipstream.transports.wire import (
    AnyBody,
    Beat,
    Fault,
    Final,
    Leave,
    Message,
    Rejoin,
    Retire,
    Return,
)
from slipstream.types import Buffer

HUB = "rank 0"
BEAT_S = 0.5
LOOK_AGAIN_S = 0.001
LAST_WORDS_S = 3.0  # for what is still queued at the end
SILENCE_S = 5.0
PATIENCE = 12  # times longer, while the link itself answers
Handler = Callable[[Message], None]


class Roster:
    """Who is in the job, when each was last heard, how far each is. Pure: time is passed in."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.worker_silence_s: float | None = None  # where nobody waits for a particular worker
        self.heard: dict[str, float] = {}
        self.rounds: dict[str, int] = {}
        self.left: set[str] = set()
        self.finished: dict[str, int] = {}  # by those who left in order: rounds begun

    def expect(self, name: str, now: float) -> None:
        if name not in self.left:
            self.heard.setdefault(name, now)

    def hear(self, name: str, now: float) -> None:
        if name in self.heard:
            self.heard[name] = now

    def leave(self, name: str) -> None:
        self.left.add(name)
        self.heard.pop(name, None)
        self.rounds.pop(name, None)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Members not heard for longer than allowed, and for how long."""
        ages = ((name, now - at) for name, at in list(self.heard.items()))
        return [(name, age) for name, age in ages if age > self._allowed_s(name)]

    def _allowed_s(self, name: str) -> float:
        if self.worker_silence_s is None or not name.startswith("rank "):
            return self.silence_s
        return self.worker_silence_s

    def ahead(self, round_: int) -> list[str]:
        """Workers that have begun a later round."""
        return sorted(name for name, at in self.rounds.items() if at > round_)

    def behind(self, round_: int) -> list[str]:
        """Workers that have not begun a round; servers begin none of their own."""
        late = (name for name, at in self.rounds.items() if at < round_)
        return sorted(name for name in late if name.startswith("rank "))


class Member:
    """See the module's docstring."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.transport = transport
        self.round = 0
        self.changed = threading.Condition()
        self.roster = Roster(silence_s)
        self.summaries: dict[str, bytes] = {}
        self.dismissed = False
        self.lockstep = True  # every worker makes every round, and all end together
        self.lost: list[str] = []  # workers that the others go on without
        self.retired: set[str] = set()  # rank 0 only: workers that have made their last round
        self.final: bool | None = None  # rank 0's word that nobody trains any more
        self.on_lost: Callable[[str], None] | None = None  # None: nobody may be lost
        self.on_return: Callable[[str], None] | None = None  # None: who was lost may come back
        self.finished = False  # rank 0 only: it waits for the others to finish too
        self.told_done: Sequence[str] = ()
        # By key of a gathering: whom rank 0 still waits for, as of its last heartbeat.
        self.told_awaited: Mapping[str, Sequence[str]] = {}
        self.awaited: Callable[[], dict[str, list[str]]] = dict  # rank 0 only: as of now
        self.fault: RuntimeFault | None = None
        self.refused = 0
        self.last_refusal = ""
        self._clock = clock
        self._ticks: list[Callable[[], object]] = []
        self._processes: dict[str, int] = {}  # by name, of those that are known
        self._lives: dict[str, int] = {}  # by name of a worker that was started again: how often
        self._rejoining: set[str] = set()  # of these, who is not let in yet
        self._own: deque[Message] = deque()
        self._handlers: dict[type[Any], Handler] = {}
        self._beat_at = clock()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.on(Beat, self._on_beat)
        self.on(Leave, self._on_leave)
        self.on(Fault, self._on_fault)
        self.on(Retire, self._on_retire)
        self.on(Final, self._on_final)

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def is_hub(self) -> bool:
        return self.name == HUB

    def on(self, kind: type[Any], handler: Handler) -> None:
        """Whom to call, on the pumping thread, for messages of a kind."""
        self._handlers[kind] = handler

    def on_tick(self, call: Callable[[], object]) -> None:
        """What to call, on the pumping thread, about once a heartbeat."""
        self._ticks.append(call)

    def bind(self, processes: Mapping[str, int]) -> None:
        """Which process a name belongs to; from now on, messages of others under it are refused."""
        self._processes |= processes

    def expect(self, *names: str) -> None:
        """Watch these members from now on."""
        now = self._clock()
        for name in names:
            if name != self.name:
                self.roster.expect(name, now)

    def send(
        self, peer: str, body: AnyBody, frames: Sequence[Buffer] = (), *, priority: int = 0
    ) -> Ticket | None:
        """To a peer; or to this member itself, which needs no ticket."""
        if peer != self.name:
            return self.transport.send(peer, body, frames, priority=priority)
        self._own.append(Message(peer, body, frames, self.transport.process))
        self.transport.wake()
        return None

    def handle_again(self, message: Message) -> None:
        """After what this member has told itself."""
        self._own.append(message)

    # ---- waiting (the training thread)

    def check(self) -> None:
        """Raise what has gone wrong, if anything has."""
        if self.fault is not None:
            raise self.fault

    def wait_until(
        self,
        holds: Callable[[], bool],
        *,
        what: str,
        limit_s: float,
        missing: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """Until ``holds()``; raises the job's fault, or WaitLimit naming who is missing."""
        with self.changed:
            self.changed.wait_for(lambda: holds() or self.fault is not None, timeout=limit_s)
            if holds():
                return
        self.check()
        names = missing() if missing else self.roster.behind(self.round)
        raise WaitLimit(what, limit_s, names, self.last_refusal)

    def tend_until(
        self,
        holds: Callable[[], bool],
        tend: Callable[[], object],
        *,
        what: str,
        limit_s: float,
        missing: Callable[[], Sequence[str]],
    ) -> float:
        """The same where others may wait for what ``tend`` does, and where workers make different
        numbers of steps: the limit is on how long nobody makes one. The seconds it took."""
        begun_s = moved_s = time.monotonic()
        rounds = dict(self.roster.rounds)
        while not holds():
            self.check()
            if self.roster.rounds != rounds:
                rounds, moved_s = dict(self.roster.rounds), time.monotonic()
            if time.monotonic() - moved_s > limit_s:
                raise WaitLimit(what, limit_s, missing(), self.last_refusal)
            tend()
            self.pause(LOOK_AGAIN_S)
        return time.monotonic() - begun_s

    def pause(self, seconds: float) -> None:
        """Give what is queued time to leave."""
        time.sleep(seconds)

    def watch_together(self, what: str) -> Callable[[Sequence[str]], None]:
        """To be called while waiting for every rank in ``what``, with those who are missing there:
        raises if one of them has finished, or has begun a later round, and so will never come."""

        def look(missing: Sequence[str]) -> None:
            self.check()
            finished = {*self.roster.finished, *self.told_done}
            ahead = self.roster.ahead(self.round) if self.lockstep else []
            for name in missing:
                if name in finished or name in ahead:
                    doing = "has finished" if name in finished else "trains on"
                    raise RuntimeFault(
                        f"{self.name} is in {what}, but {name} {doing}: every rank must call "
                        f"{what} at the same place"
                    )

        return look

    # ---- pumping

    def start(self) -> None:
        """Pump on a thread of its own."""
        self._thread = threading.Thread(target=self.pump, name=f"slipstream {self.name}")
        self._thread.daemon = True
        self._thread.start()

    def pump(self) -> None:
        """Handle messages and beats until stopped or dismissed."""
        try:
            while not self._stopping:
                self.pump_once(self._until_beat())
        except Exception as error:
            self.fail(error if isinstance(error, RuntimeFault) else internal_fault(error))

    def pump_once(self, timeout_s: float) -> None:
        message = self._own.popleft() if self._own else self.transport.receive(timeout_s)
        if message is not None:
            self._handle(message)
        if self._clock() >= self._beat_at:
            self._beat()

    def _until_beat(self) -> float:
        return max(0.0, self._beat_at - self._clock())

    def _handle(self, message: Message) -> None:
        try:
            self._require_bound(message)
            if message.sender in self.lost and not self._comes_back(message):
                if self.on_return is not None:
                    self.on_return(message.sender)
                    return
                self._welcome_back(message.sender)
            self.roster.hear(message.sender, self._clock())
            handler = self._handlers.get(type(message.body))
            if handler is None:
                raise FrameRefused(f"{self.name} takes no {type(message.body).__name__}")
            handler(message)
        except FrameRefused as error:
            self.refused += 1
            self.last_refusal = f"{message.sender}: {error}"
            if isinstance(error, ContributionRefused) and message.sender in self._processes:
                self.report(message.sender, f"its gradient was refused by {self.name}: {error}")

    def _require_bound(self, message: Message) -> None:
        """A name belongs to one process; a worker that was started again says so first."""
        known = self._processes.get(message.sender)
        if known not in (None, message.process) and not isinstance(message.body, Rejoin):
            raise FrameRefused(f"{message.sender} is another process")

    def _comes_back(self, message: Message) -> bool:
        return isinstance(message.body, Return | Rejoin) or message.sender in self._rejoining

    def _beat(self) -> None:
        now = self._clock()
        late_s, self._beat_at = now - self._beat_at, now + BEAT_S
        for call in self._ticks:
            call()
        if self.is_hub:
            self.roster.rounds[self.name] = self.round
            # Those who have finished wait to be dismissed, and listen.
            done = [*self.roster.finished, *([HUB] if self.finished else [])]
            self.told_awaited = awaited = self.awaited()
            beat = Beat(self.roster.rounds, done, awaited)
            for name in {*self.roster.heard, *self.roster.finished}:
                self.transport.send(name, beat, priority=CONTROL)
            self._miss_the_finished()
        elif HUB in self.roster.heard:
            self.transport.send(HUB, Beat({self.name: self.round}), priority=CONTROL)
        self._miss_the_dead(now)
        if late_s > BEAT_S:
            return  # this member was away itself: what the others sent meanwhile is still unread
        for name, age in self.roster.silent(now):
            # Python may be busy with one long call; then the link still answers.
            if not self.transport.link_alive(name) or age > PATIENCE * self.roster.silence_s:
                self._miss(name, age)

    def _miss_the_dead(self, now: float) -> None:
        """Where the rest go on, they need not wait until one that has died is silent for long."""
        if self.on_lost is None or not self.is_hub:
            return
        for name, heard in list(self.roster.heard.items()):
            if name.startswith("rank ") and self.transport.link_refused(name):
                self._miss(name, now - heard)

    def _miss(self, name: str, age: float) -> None:
        """A member is silent: the others go on without it, or the job has failed."""
        if self.on_lost is None or not self.is_hub or not name.startswith("rank "):
            self._announce(Fault(name, None, age))
            return
        with self.changed:
            self.roster.leave(name)
            self.lost.append(name)
            self.changed.notify_all()
        self.on_lost(name)

    def give_up(self, name: str) -> None:
        """Rank 0: a worker has died, and somebody knows it already."""
        if name in self.roster.heard:
            self._miss(name, 0.0)

    def await_return(self, name: str, body: Rejoin, process: int) -> None:
        """Rank 0: a worker was started again. It may gather what the others have gathered, and ask
        to be let in; until then it stays lost."""
        known = self._lives.get(name, 0)
        if name == HUB or name not in self._processes or body.life <= known:
            raise FrameRefused(f"{name} comes back in life {body.life}, after {known}")
        self.give_up(name)
        if self.fault is None:
            self._lives[name] = body.life
            self._rejoining.add(name)
            self._processes[name] = process
            self.transport.connect(name, body.address)

    def readmit(self, name: str, address: str, process: int) -> None:
        """A worker that was lost is back, somewhere else."""
        self.transport.connect(name, address)
        self._rejoining.discard(name)
        self._processes[name] = process
        if name in self.lost:
            self._welcome_back(name)

    def _welcome_back(self, name: str) -> None:
        with self.changed:
            self.lost.remove(name)
            self.roster.left.discard(name)
            if self.is_hub:
                self.roster.expect(name, self._clock())

    def _miss_the_finished(self) -> None:
        early = [name for name, at in self.roster.finished.items() if at < self.round]
        if early and self.fault is None and self.lockstep:
            reason = "it has finished, but rank 0 still trains: every worker must run the same "
            self.transport.send(early[0], Leave(reason + "number of steps", told=True))
            self.report(early[0], reason + "number of steps")

    def _announce(self, fault: Fault, *, told: bool = False, by: str = "") -> None:
        """Take note of a fault; the hub tells the others, but for the one that said so."""
        if self.is_hub:
            # Those who have finished still wait to be dismissed.
            for name in {*self.roster.heard, *self.roster.finished} - {by or fault.peer}:
                self.transport.send(name, fault, priority=CONTROL)
        self.roster.leave(fault.peer)
        if fault.peer == self.name:
            self.fail(RuntimeFault(f"{self.name}: {fault.reason}"))
        elif fault.reason is None:
            self.fail(PeerLost(fault.peer, fault.silent_s))
        else:
            self.fail(PeerFailed(fault.peer, fault.reason, told=told))

    def report(self, peer: str, reason: str) -> None:
        """This member has seen that another one failed; call it while pumping."""
        if self.fault is not None:
            return
        if self.is_hub:
            self._announce(Fault(peer, reason, 0.0), by=HUB)
        else:
            self.transport.send(HUB, Leave(reason, about=peer))
            self.fail(PeerFailed(peer, reason))

    def fail(self, fault: RuntimeFault) -> None:
        """Remember the first fault and wake whoever waits."""
        with self.changed:
            self.fault = self.fault or fault
            self.changed.notify_all()

    def _on_beat(self, message: Message) -> None:
        assert isinstance(message.body, Beat)
        if self.is_hub:
            if message.sender in self.roster.left:
                return  # it beats until it is dismissed
            if message.sender not in self.roster.heard:
                raise FrameRefused(f"{message.sender} is no member")
            with self.changed:
                self.roster.rounds[message.sender] = message.body.rounds.get(message.sender, 0)
                self.changed.notify_all()
        elif message.sender == HUB:
            with self.changed:
                self.roster.rounds = dict(message.body.rounds)
                self.told_done = message.body.done
                self.told_awaited = message.body.awaited
                self.changed.notify_all()

    def _on_leave(self, message: Message) -> None:
        assert isinstance(message.body, Leave)
        if message.body.reason is not None:
            fault = Fault(message.body.about or message.sender, message.body.reason, 0.0)
            self._announce(fault, told=message.body.told, by=message.sender)
            return
        if message.frames:
            self.summaries[message.sender] = bytes(message.frames[0])
        with self.changed:
            self.roster.leave(message.sender)
            self.roster.finished[message.sender] = message.body.round
            self.dismissed = self.dismissed or message.sender == HUB
            self.changed.notify_all()

    def _on_retire(self, message: Message) -> None:
        with self.changed:
            self.retired.add(message.sender)
            self.changed.notify_all()

    def _on_final(self, message: Message) -> None:
        assert isinstance(message.body, Final)
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not end the training")
        with self.changed:
            self.final = message.body.copied
            self.changed.notify_all()

    def _on_fault(self, message: Message) -> None:
        assert isinstance(message.body, Fault)
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not say who has failed")
        if message.body.peer != self.name or message.body.reason is not None:
            self._announce(message.body)

    # ---- the end

    def abandon(self, reason: str, *, told: bool = False) -> None:
        """Tell the others that this member ends with an error; all that is left is ``stop``."""
        if isinstance(self.fault, PeerLost | PeerFailed):
            return  # they know, or it was they who said so
        if self.is_hub:
            for name in {*self.roster.heard, *self.roster.finished}:
                self.transport.send(name, Leave(reason, told))
        elif not self.dismissed:
            self.transport.send(HUB, Leave(reason))

    def stop(self) -> None:
        """Stop pumping and close the transport after its queue is sent."""
        self._stopping = True
        self.transport.wake()
        if self._thread is not None:
            self._thread.join(timeout=10)
        # Where the job has failed, somebody may never read what is queued for it.
        self.transport.close(LAST_WORDS_S if self.fault is None else LAST_WORDS_S / 10)


def internal_fault(error: Exception) -> RuntimeFault:
    fault = RuntimeFault(f"slipstream's network thread failed: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
