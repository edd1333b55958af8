"""A member of a job: its messages, its heartbeats, its view of the other members, its exit.

Rank 0 is the hub: every member sends heartbeats to it, and it sends to all members the progress of
all, and which members are lost or failed. A worker handles messages on a separate thread, a server
on its main thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from slipstream.errors import RuntimeFault
from slipstream.runtime.members.coordination import HUB, Coordination
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.exit_barrier import ExitBarrier
from slipstream.runtime.members.failure_detector import (
    SILENCE_FACTOR_IF_LINK_ALIVE,
    SILENCE_S,
    Roster,
)
from slipstream.runtime.members.heartbeat import BEAT_S, Heartbeat
from slipstream.runtime.members.message_pump import Handler, MessagePump, MessageTrace
from slipstream.runtime.members.waiting import Waiter
from slipstream.transports.protocol import Transport

__all__ = [
    "BEAT_S",
    "HUB",
    "SILENCE_FACTOR_IF_LINK_ALIVE",
    "SILENCE_S",
    "Handler",
    "Member",
    "internal_fault",
]

FINAL_SEND_S = 3.0  # for messages still queued at the end
FINAL_SEND_IF_FAILED_S = 0.3  # some member may never read what is queued for it
B = TypeVar("B")


class Member(Endpoint):
    """One member, made of parts with one concern each. It is also pair 0's endpoint.

    Args:
        name: The member's name: ``rank 2`` or ``server 0``.
        transport: The transport of its messages.
        silence_s: The silence after which another member counts as lost.
        clock: Returns seconds that only grow; a simulation passes its own.
        waiter: Waits for other threads; a simulation passes its own.
        trace: Called with every message; for simulations.

    Attributes:
        pump: Receives messages and calls their handlers. Provides ``on_any_pair``, ``on_tick``
            and ``pump_once``.
        roster: The time of each member's last message, and its progress.
        coordination: Failed, lost and returning members.
        heartbeat: Sends heartbeats, and keeps rank 0's last one.
        exit_barrier: The end of the job. Provides ``abandon``.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
        waiter: Waiter | None = None,
        trace: MessageTrace | None = None,
    ) -> None:
        waiter, roster = waiter or Waiter(), Roster(silence_s)
        pump = MessagePump(name, transport, clock, trace)
        super().__init__(0, pump, roster, waiter, Coordination(pump, roster, waiter))
        self.heartbeat = Heartbeat(self)
        self.exit_barrier = ExitBarrier(self, self.heartbeat)
        self.on_any_pair, self.on_tick = pump.on_any_pair, pump.on_tick
        self.pump_once = pump.run_once
        self.abandon = self.exit_barrier.abandon

    def for_pair(self, pair: int) -> Endpoint:
        """Return one pair's view of this member; pair 0 uses the member itself.

        Args:
            pair: The number that the pair's messages carry.

        Returns:
            An endpoint whose handlers take this pair's messages only, and whose rounds count from
            0.
        """
        if pair == 0:
            return self
        return Endpoint(pair, self.pump, self.roster, self.waiter, self.coordination)

    # ---- other members

    def bind(self, processes: Mapping[str, int]) -> None:
        """Set which process each name belongs to; messages from another process are refused."""
        self.coordination.processes |= processes

    def expect(self, *names: str) -> None:
        """Watch these members from now on."""
        for name in names:
            if name != self.name:
                self.roster.expect(name, self.now)

    # ---- the thread

    def start(self) -> None:
        """Handle messages and ticks on a separate thread."""
        self.pump.start(self._on_pump_error)

    def run(self) -> None:
        """Handle messages and ticks on this thread until stopped."""
        self.pump.run(self._on_pump_error)

    def _on_pump_error(self, error: Exception) -> None:
        self.fail(error if isinstance(error, RuntimeFault) else internal_fault(error))

    # ---- the end

    @property
    def dismissed(self) -> bool:
        """True if rank 0 has ended the job."""
        return self.exit_barrier.dismissed

    def stop(self) -> None:
        """Stop handling messages, and close the transport after its queue is sent."""
        self.pump.stop(lambda: FINAL_SEND_S if self.fault is None else FINAL_SEND_IF_FAILED_S)


def internal_fault(error: Exception) -> RuntimeFault:
    """Return the fault of a job whose message pump has failed."""
    fault = RuntimeFault(f"slipstream's network thread failed: {type(error).__name__}: {error}")
    fault.__cause__ = error
    return fault
