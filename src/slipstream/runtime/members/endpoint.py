"""One pair's view of a member: messages, rounds and waits of a model and its optimizer.

A job may train several pairs. Each has its own rounds, and its messages carry its number. All share
the member's thread, its lock, and its view of other members. Every wait has a limit; the error of a
wait that reaches it names the missing members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from slipstream.errors import RuntimeFault, WaitLimit
from slipstream.runtime.members.coordination import Coordination
from slipstream.runtime.members.failure_detector import Roster
from slipstream.runtime.members.message_pump import MessagePump
from slipstream.runtime.members.waiting import Holds, Waiter
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import AnyBody, Message
from slipstream.types import Buffer

POLL_S = 0.001
Missing = Callable[[], Sequence[str]]
B = TypeVar("B")


class Endpoint:
    """One pair's view of a member.

    Args:
        pair: The number that the pair's messages carry.
        pump: Receives messages and calls their handlers.
        roster: The time of each member's last message, and its progress.
        waiter: The lock that the pump's thread and the training thread share, and the job's
            fault. Provides ``lock``, ``changed``, ``updating``, ``fail``, ``check``, ``pause``.
        coordination: Failed, lost and returning members. Provides ``lost`` and ``report``.
    """

    def __init__(
        self,
        pair: int,
        pump: MessagePump,
        roster: Roster,
        waiter: Waiter,
        coordination: Coordination,
    ) -> None:
        self.pair = pair
        self.name, self.transport = pump.name, pump.transport
        self.pump, self.roster, self.waiter = pump, roster, waiter
        self.coordination, self.is_hub = coordination, coordination.is_hub
        self.lost, self.report = coordination.lost, coordination.report
        self.lock: AbstractContextManager[object] = waiter.changed
        self.changed, self.updating = waiter.changed, waiter.updating
        self.fail, self.check, self.pause = waiter.fail, waiter.check, waiter.pause
        self._round = 0
        self._handlers: dict[type[object], Callable[[Message[Any]], None]] = {}

    def owned(self) -> Endpoint:
        """Return another endpoint of the same pair, for parts that close before the job ends."""
        return Endpoint(self.pair, self.pump, self.roster, self.waiter, self.coordination)

    def close(self) -> None:
        """Remove the handlers that were set through this endpoint."""
        for kind, handler in self._handlers.items():
            self.pump.stop_handling(kind, handler, pair=self.pair)
        self._handlers.clear()

    @property
    def now(self) -> float:
        """The time of the member's clock."""
        return self.pump.clock()

    @property
    def fault(self) -> RuntimeFault | None:
        """The job's fault, if there is one."""
        return self.waiter.fault

    @property
    def round(self) -> int:
        """The number of rounds that this member has begun for this pair.

        The roster has the sum over pairs. All workers make the rounds of all pairs in the same
        order, so their sums can be compared.
        """
        return self._round

    @round.setter  # noqa: A003 - the property, not the builtin
    def round(self, round_: int) -> None:
        self.roster.round += round_ - self._round
        self._round = round_

    # ---- messages

    def on(self, kind: type[B], handler: Callable[[Message[B]], None]) -> None:
        """Set the handler of this pair's messages of one type; it runs on the pump's thread."""
        self.pump.on(kind, handler, pair=self.pair)
        self._handlers[kind] = handler

    def send(
        self, peer: str, body: AnyBody, frames: Sequence[Buffer] = (), *, priority: int = 0
    ) -> Ticket | None:
        """Send to a peer, or to this member itself, which needs no ticket."""
        return self.pump.send(peer, body, frames, priority=priority, pair=self.pair)

    @property
    def refused(self) -> int:
        """The number of messages that the member refused, of all pairs."""
        return self.pump.refused

    @property
    def last_refusal(self) -> str:
        """The sender of the last refused message, and the reason."""
        return self.pump.last_refusal

    # ---- waits of the training thread

    def wait_until(
        self, holds: Holds, *, what: str, limit_s: float, missing: Missing | None = None
    ) -> None:
        """Wait until ``holds()``.

        Args:
            what: The object of the wait, for error messages.
            missing: Returns the missing members; by default, workers that have not begun this
                round.

        Raises:
            RuntimeFault: The job has a fault.
            WaitLimit: ``limit_s`` have passed.
        """
        if self.waiter.wait(holds, limit_s):
            return
        self.check()
        names = missing() if missing else self.roster.behind(self.roster.round)
        raise WaitLimit(what, limit_s, names, self.last_refusal)

    def wait_for_end(self, holds: Holds, *, what: str, limit_s: float, missing: Missing) -> None:
        """Wait until ``holds()`` at the end of training: where workers are not in lockstep, each
        round that a worker begins resets the limit."""
        while True:
            before = dict(self.roster.rounds)
            try:
                return self.wait_until(holds, what=what, limit_s=limit_s, missing=missing)
            except WaitLimit:
                if self.roster.lockstep or self.roster.rounds == before:
                    raise

    def poll_until(
        self,
        holds: Holds,
        poll: Callable[[], object],
        *,
        what: str,
        limit_s: float,
        missing: Missing,
    ) -> float:
        """Poll while waiting; any worker's progress resets the limit.

        Returns:
            The seconds waited.
        """
        begun_s = moved_s = time.monotonic()
        rounds = dict(self.roster.rounds)
        while not holds():
            self.check()
            if self.roster.rounds != rounds:
                rounds, moved_s = dict(self.roster.rounds), time.monotonic()
            if time.monotonic() - moved_s > limit_s:
                raise WaitLimit(what, limit_s, missing(), self.last_refusal)
            poll()
            self.pause(POLL_S)
        return time.monotonic() - begun_s
