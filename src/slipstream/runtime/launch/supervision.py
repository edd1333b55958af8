"""The reaction to ends of a job's members: pure, so that tests can try every order of events."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import EXIT_PEER_FAILED

Place = Literal["outside", "inside", "left"]  # of the job: a worker joins it, and leaves it
MOST_NAMED = 4  # ranks in one line
JOB = "the job"  # the name of the failed member if the launcher itself ends the job


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of members: to end by themselves, after signals, and to start."""

    grace_s: float = 8.0
    interrupt_s: float = 30.0  # a script may save its model when it is interrupted
    term_s: float = 3.0
    kill_s: float = 5.0
    server_start_s: float = 60.0


def is_worker(member: str) -> bool:
    """Return whether a member of this name is a worker."""
    return member.startswith("rank")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a member; a negative code is the signal that killed it.

    ``place`` is where a worker was at that time.
    """

    member: str
    code: int
    place: Place = "left"

    @property
    def failed(self) -> bool:
        """True after a failure, also with code 0 in the middle of the job."""
        return self.code != 0 or self.place == "inside"

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + n for signal n."""
        if self.code < 0:
            return 128 - self.code
        return self.code or int(self.failed)

    @property
    def remoteness(self) -> int:
        """The distance of this end from the cause, since one end causes others."""
        if (
            self.member == JOB
            or self.code < 0
            or (self.is_worker and self.code != EXIT_PEER_FAILED)
        ):
            return 0
        return 2 if self.is_worker else 1  # servers end last, after they have seen every end

    @property
    def is_worker(self) -> bool:
        """True if it was a worker."""
        return is_worker(self.member)

    def __str__(self) -> str:
        if self.member == JOB:
            return "the job could not go on"
        if self.code < 0:
            return f"{self.member} was killed by {signal_name(-self.code)}"
        ended = f"{self.member} exited with code {self.code}"
        if self.code == 0 and self.failed:
            return f"{ended} before it had left the job (the end of its `with` block)"
        return ended


@dataclass(frozen=True, slots=True)
class CameBack:
    """The event that a restarted worker trains with the others again."""

    member: str


@dataclass(frozen=True, slots=True)
class Signalled:
    """The event that the launcher itself got a signal to stop."""

    signum: int

    @property
    def exit_code(self) -> int:
        """The exit code as in a shell: 128 + n for signal n."""
        return 128 + self.signum

    def __str__(self) -> str:
        by = "Ctrl-C" if self.signum == signal.SIGINT else signal_name(self.signum)
        return f"stopped by {by}"


Event = Ended | CameBack | Signalled


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the job: the launcher's exit code and, unless it succeeded, the line to print."""

    code: int
    line: str = ""


@dataclass(slots=True)
class Supervision:
    """The decision, from events, which signal to send to the remaining workers, and when.

    After a failure the other workers have ``grace_s`` to end by themselves; then SIGTERM follows,
    then SIGKILL. A signal to the launcher starts with SIGTERM, and Ctrl-C with SIGINT, so that a
    script's ``except KeyboardInterrupt`` runs; a second one is followed by SIGKILL at once.

    Args:
        may_lose: The number of workers that may be killed while the rest continue.
        restarts: The number of killed workers that are started again.
        leader: The worker without which the job ends; None: there is none.

    Attributes:
        running: Workers that have not ended.
        deadline: The time of the next ``escalate``.
        lost: Ends of workers without which the rest continue.
        replaced: Ends of workers to be started again.
        over: True if the leader has ended, so that no worker can rejoin.
    """

    limits: Limits
    clock: Callable[[], float]
    may_lose: int = 0
    restarts: int = 0
    leader: str | None = "rank 0"
    running: set[str] = field(default_factory=set)
    deadline: float = math.inf
    lost: list[Ended] = field(default_factory=list)
    replaced: list[Ended] = field(default_factory=list)
    over: bool = False
    _back: set[str] = field(default_factory=set)  # workers that were started again, and rejoined
    _late_returns: set[str] = field(default_factory=set)  # not back when the leader ended
    _failures: list[Ended] = field(default_factory=list)
    _stop_signal: Signalled | None = None
    _sent: list[signal.Signals] = field(default_factory=list)
    _stuck: tuple[str, ...] = ()  # workers that were still there at the deadline

    @property
    def ending(self) -> bool:
        """True if the job ends: something has failed, or a signal has arrived."""
        return self.signalled or bool(self._failures)

    @property
    def signalled(self) -> bool:
        """True if a signal has requested the end."""
        return self._stop_signal is not None

    @property
    def to_signal(self) -> set[str]:
        """The workers to which a signal is sent."""
        return self.running if self.ending else self._late_returns

    def started(self, worker: str) -> None:
        """Enter a worker that was started."""
        self.running.add(worker)

    def take(self, event: Event) -> signal.Signals | None:
        """Enter an event; return the signal to send to ``to_signal``, if any."""
        if isinstance(event, Signalled):
            again, self._stop_signal = self._stop_signal is not None, self._stop_signal or event
            return self._send(signal.SIGKILL) if again else self._send(self._first_signal())
        if isinstance(event, CameBack):
            self._back.add(event.member)
            return None
        self.running.discard(event.member)
        self._back.discard(event.member)
        if event.member in self._late_returns and not self.ending:
            self._late_returns.discard(event.member)
            if not self._late_returns:
                self.deadline = math.inf
                self._sent.clear()
            return None
        if self._tolerated(event):
            again = event.code < 0 and self._restartable(event)
            (self.replaced if again else self.lost).append(event)
            return None
        if event.member == self.leader and not self.ending:
            # The job is over; a restarted worker might search for it for long.
            self.over = True
            self._late_returns = {e.member for e in self.replaced} & self.running - self._back
            if self._late_returns:
                self.deadline = self.clock() + self.limits.grace_s
        # A server may end before the workers: rank 0 dismisses it at the end.
        if event.failed and not self._sent:
            self._failures.append(event)
            self.deadline = min(self.deadline, self.clock() + self.limits.grace_s)
        return None

    def _tolerated(self, event: Ended) -> bool:
        """Return whether the job continues: the worker was killed, or left behind by the others."""
        return (
            (event.code < 0 or event.code == EXIT_PEER_FAILED)
            and event.is_worker
            and event.member != self.leader
            and (self._can_lose_one() or self._restartable(event))
            and not self.ending
        )

    def _can_lose_one(self) -> bool:
        """Return whether the job can continue without one more: at least one worker must remain."""
        leader_remains = self.leader is not None or any(is_worker(name) for name in self.running)
        return leader_remains and len(self.lost) < self.may_lose

    def _restartable(self, event: Ended) -> bool:
        """Return whether to start a worker again: it was killed, and restarts are left; or it was
        started again before, and ended because the others had finished."""
        if event.code < 0:
            return len(self.replaced) < self.restarts and not self.over
        return event.member in {ended.member for ended in self.replaced}

    def escalate(self) -> signal.Signals | None:
        """Return the next harder signal, as the deadline has passed."""
        if signal.SIGKILL in self._sent:
            self.running -= set(self.to_signal)  # stuck in the kernel: cannot be killed
            return None
        return self._send(signal.SIGKILL if signal.SIGTERM in self._sent else signal.SIGTERM)

    def _first_signal(self) -> signal.Signals:
        """Return the signal that follows one to the launcher."""
        assert self._stop_signal is not None
        by_hand = self._stop_signal.signum == signal.SIGINT and not self._sent
        if by_hand:
            return signal.SIGINT
        return signal.SIGKILL if signal.SIGTERM in self._sent else signal.SIGTERM

    def _send(self, signum: signal.Signals) -> signal.Signals:
        if not self._sent:
            self._stuck = tuple(sorted(self.running))
        limits = {signal.SIGINT: self.limits.interrupt_s, signal.SIGTERM: self.limits.term_s}
        self._sent.append(signum)
        self.deadline = self.clock() + limits.get(signum, self.limits.kill_s)
        return signum

    def verdict(self) -> Verdict:
        """Return how the job ended, once no worker runs any more."""
        if not self._failures:
            return (
                Verdict(self._stop_signal.exit_code, str(self._stop_signal))
                if self._stop_signal
                else Verdict(0)
            )
        cause = min(self._failures, key=lambda failure: failure.remoteness)
        if cause.remoteness and self._stuck:
            names = ", ".join(self._stuck)
            return Verdict(cause.exit_code, f"{names} hung and had to be stopped; the rest gave up")
        if cause.remoteness == 2 and len(self._failures) > 1:
            ended = sorted((failure.member for failure in self._failures), key=by_number)
            names = ", ".join(ended) if len(ended) <= MOST_NAMED else f"{len(ended)} ranks"
            return Verdict(cause.exit_code, f"{names} ended with the error above")
        return Verdict(cause.exit_code, f"{cause}{self._fate_of_others(cause)}")

    def _fate_of_others(self, cause: Ended) -> str:
        rest = "the other ranks" if cause.is_worker else "the ranks"
        if self._sent:
            return f"; {rest} were stopped"
        return f"; {rest} ended with it" if len(self._failures) > 1 else ""


def by_number(member: str) -> tuple[int, str]:
    """Return a key that sorts ``rank 10`` after ``rank 9``."""
    return len(member), member


def signal_name(signum: int) -> str:
    """Return a signal's name, such as SIGTERM; a number for an unknown one."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
