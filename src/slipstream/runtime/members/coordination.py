"""Coordination: rank 0 decides which members failed, are lost or come back, and informs all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from slipstream.errors import ContributionRefused, FrameRefused, PeerFailed, PeerLost, RuntimeFault
from slipstream.runtime.members.failure_detector import Roster, is_worker
from slipstream.runtime.members.message_pump import MessagePump
from slipstream.runtime.members.waiting import Waiter
from slipstream.runtime.process.event_log import log_event
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Fault, Leave, Message, Rejoin, Return

HUB = "rank 0"
logger = logging.getLogger(__name__)


class Coordination:
    """One member's part of the coordination.

    Attributes:
        lost: Workers without which the job continues.
        on_lost: Rank 0 only: called with each lost worker. None: losing a worker ends the job.
        on_return: Called with a lost worker that sends a message again; the message is dropped.
            None: the worker is a member again, as before.
        processes: By name of a member: the process that the name belongs to.
    """

    def __init__(self, pump: MessagePump, roster: Roster, waiter: Waiter) -> None:
        self._pump, self._roster, self._waiter = pump, roster, waiter
        self.lost: list[str] = []
        self.on_lost: Callable[[str], None] | None = None
        self.on_return: Callable[[str], None] | None = None
        self.processes: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}  # by name of a restarted worker
        self._rejoining: set[str] = set()  # restarted workers that are not admitted yet
        pump.admit = self._admit
        pump.on_refused = self._on_refused
        pump.on(Fault, self._on_fault)

    @property
    def is_hub(self) -> bool:
        """True if this member is rank 0."""
        return self._pump.name == HUB

    # ---- messages of other members

    def _admit(self, message: Message[Any]) -> bool:
        """Return whether to handle a message: its sender must be the process of that name, and must
        not be a lost worker that has to rejoin first."""
        self._require_bound(message)
        if message.sender in self.lost and not self._asks_to_return(message):
            if self.on_return is not None:
                self.on_return(message.sender)
                return False
            self._take_back(message.sender)
        self._roster.heard_from(message.sender, self._pump.clock())
        return True

    def _require_bound(self, message: Message[Any]) -> None:
        """Check that a restarted worker has sent a Rejoin, since it is another process."""
        known = self.processes.get(message.sender)
        if known not in (None, message.process) and not isinstance(message.body, Rejoin):
            raise FrameRefused(f"{message.sender} is another process")

    def _asks_to_return(self, message: Message[Any]) -> bool:
        return isinstance(message.body, Return | Rejoin) or message.sender in self._rejoining

    def _on_refused(self, message: Message[Any], error: FrameRefused) -> None:
        """End the job if a worker's gradient is invalid: its round cannot close without it."""
        if isinstance(error, ContributionRefused) and message.sender in self.processes:
            reason = f"its gradient was refused by {self._pump.name}: {error}"
            self.report(message.sender, reason)

    # ---- lost and returning workers

    def lose(self, name: str, silent_s: float) -> None:
        """Continue without a silent member, or fail."""
        if self.on_lost is None or not self.is_hub or not is_worker(name):
            self.announce(Fault(name, None, silent_s))
            return
        with self._waiter.updating():
            self._roster.leave(name)
            self.lost.append(name)
        log_event(logger, "member_lost", at=self._pump.name, member=name, silent_s=silent_s)
        self.on_lost(name)

    def go_on_without(self, name: str) -> None:
        """Continue without a worker that rank 0 has announced as lost; not on rank 0."""
        with self._waiter.updating():
            self.lost.append(name)
        log_event(logger, "member_lost", at=self._pump.name, member=name)

    def give_up(self, name: str) -> None:
        """Continue without a worker that is known to be dead; on rank 0."""
        if name in self._roster.heard:
            self.lose(name, 0.0)

    def await_return(self, name: str, body: Rejoin, process: int) -> None:
        """Expect a worker that was started again; on rank 0.

        It may read the values that the others have gathered, and ask to be admitted; until then it
        counts as lost.

        Raises:
            FrameRefused: The worker is unknown, or its incarnation is not a later one.
        """
        known = self._incarnations.get(name, 0)
        if name == HUB or name not in self.processes or body.incarnation <= known:
            raise FrameRefused(
                f"{name} comes back in incarnation {body.incarnation}, after {known}"
            )
        self.give_up(name)
        if self._waiter.fault is None:
            self._incarnations[name] = body.incarnation
            self._rejoining.add(name)
            self.processes[name] = process
            self._pump.transport.connect(name, body.address)

    def readmit(self, name: str, address: str, process: int) -> None:
        """Make a lost worker a member again, as another process at another address."""
        self._pump.transport.connect(name, address)
        self._rejoining.discard(name)
        self.processes[name] = process
        if name in self.lost:
            self._take_back(name)

    def _take_back(self, name: str) -> None:
        with self._waiter.changed:
            self.lost.remove(name)
            self._roster.returned(name)
            if self.is_hub:
                self._roster.expect(name, self._pump.clock())
        log_event(logger, "member_rejoined", at=self._pump.name, member=name)

    # ---- faults

    def announce(self, fault: Fault, *, reported: bool = False, by: str = "") -> None:
        """Fail with a fault; rank 0 sends it to all others first.

        Args:
            reported: True if the member that failed has shown the error itself.
            by: The member that reported the fault, which needs no message; by default the one that
                failed.
        """
        if self.is_hub:
            # Members that have finished wait to be dismissed, so they get it as well.
            for name in {*self._roster.heard, *self._roster.finished} - {by or fault.peer}:
                self._pump.transport.send(name, fault, priority=CONTROL)
        self._roster.leave(fault.peer)
        self._log_fault(fault)
        if fault.peer == self._pump.name:
            self._waiter.fail(RuntimeFault(f"{self._pump.name}: {fault.reason}"))
        elif fault.reason is None:
            self._waiter.fail(PeerLost(fault.peer, fault.silent_s))
        else:
            failed = PeerFailed(fault.peer, fault.reason, reported=reported, where=fault.where)
            self._waiter.fail(failed)

    def _log_fault(self, fault: Fault) -> None:
        at, member = self._pump.name, fault.peer
        if fault.reason is None:
            log_event(logger, "member_lost", at=at, member=member, silent_s=fault.silent_s)
        else:
            log_event(logger, "member_failed", at=at, member=member, reason=fault.reason)

    def report(self, peer: str, reason: str) -> None:
        """Report another member's failure, detected here; on the pump's thread."""
        if self._waiter.fault is not None:
            return
        if self.is_hub:
            self.announce(Fault(peer, reason, 0.0), by=HUB)
        else:
            self._pump.transport.send(HUB, Leave(reason, about=peer))
            self._waiter.fail(PeerFailed(peer, reason))

    def on_failed(self, message: Message[Leave], reason: str) -> None:
        """Handle a member's report that it, or another one, has failed."""
        fault = Fault(message.body.about or message.sender, reason, 0.0, message.body.where)
        self.announce(fault, reported=message.body.reported, by=message.sender)

    def _on_fault(self, message: Message[Fault]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not decide who has failed")
        if message.body.peer != self._pump.name or message.body.reason is not None:
            self.announce(message.body)
