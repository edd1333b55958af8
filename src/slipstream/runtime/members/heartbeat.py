"""Heartbeats: every member sends them to rank 0, which sends the progress of all members to all.

With each heartbeat, a member also checks which members have been silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slipstream.errors import FrameRefused, RuntimeFault
from slipstream.runtime.members.coordination import HUB
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.message_pump import TICK_S
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Beat, Leave, Message

BEAT_S = TICK_S
SAME_STEPS = (
    "every worker must run the same number of steps; give all ranks the same number of batches, as "
    "DistributedSampler(drop_last=True) or job.sampler does, or loop over job.steps(N)"
)


class Heartbeat:
    """One member's heartbeats, and the content of rank 0's last one.

    Attributes:
        finished: Rank 0 only: it has finished, and waits for the other ranks.
        awaited: Rank 0 only: returns, by key of a gathering, the ranks that have not contributed.
        last_done: The members that have finished, as of rank 0's last heartbeat.
        last_awaited: The value of ``awaited()`` at rank 0's last heartbeat.
    """

    def __init__(self, member: Endpoint) -> None:
        self._member, self._roster = member, member.roster
        self.finished = False
        self.awaited: Callable[[], dict[str, list[str]]] = dict
        self.last_done: Sequence[str] = ()
        self.last_awaited: Mapping[str, Sequence[str]] = {}
        member.pump.beat = self._beat
        member.on(Beat, self._on_beat)

    def _beat(self, late_s: float) -> None:
        now, transport = self._member.now, self._member.transport
        if self._member.is_hub:
            self._send_progress()
            self._report_finished_early()
        elif HUB in self._roster.heard:
            beat = Beat({self._member.name: self._roster.round})
            transport.send(HUB, beat, priority=CONTROL)
        coordination = self._member.coordination
        if coordination.on_lost is not None and self._member.is_hub:
            # The job continues without a dead worker: no need to wait for a long silence.
            for name, age_s in self._roster.dead_workers(now, transport.link_refused):
                coordination.lose(name, age_s)
        if late_s > BEAT_S:
            return  # this member itself was stopped: messages sent meanwhile are unread
        for name, age_s in self._roster.lost(now, transport.link_alive):
            coordination.lose(name, age_s)

    def _send_progress(self) -> None:
        self._roster.rounds[self._member.name] = self._roster.round
        done = [*self._roster.finished, *([HUB] if self.finished else [])]
        self.last_awaited = awaited = self.awaited()
        beat = Beat(self._roster.rounds, done, awaited)
        # Members that have finished wait to be dismissed, and expect heartbeats.
        for name in {*self._roster.heard, *self._roster.finished}:
            self._member.transport.send(name, beat, priority=CONTROL)

    def _report_finished_early(self) -> None:
        early = self._roster.finished_early()
        if early and self._member.fault is None:
            why = f"has finished, but rank 0 still trains: {SAME_STEPS}"
            # It takes this as rank 0's own reason, so the reason names the worker; sent before the
            # fault.
            fault_report = Leave(f"{early[0]} {why}", reported=True)
            self._member.transport.send(early[0], fault_report, priority=CONTROL)
            self._member.report(early[0], f"it {why}")

    def _on_beat(self, message: Message[Beat]) -> None:
        if self._member.is_hub:
            self._on_beat_at_hub(message.sender, message.body)
        elif message.sender == HUB:
            with self._member.updating():
                self._roster.rounds = dict(message.body.rounds)
                self.last_done = message.body.done
                self.last_awaited = message.body.awaited

    def _on_beat_at_hub(self, sender: str, beat: Beat) -> None:
        if sender in self._roster.left:
            return  # it sends heartbeats until it is dismissed
        if sender not in self._roster.heard:
            if sender in self._member.coordination.processes:
                return  # heartbeats have their own priority, and may overtake a server's Ready
            raise FrameRefused(f"{sender} is no member")
        with self._member.updating():
            self._roster.rounds[sender] = beat.rounds.get(sender, 0)

    def check_collective(self, what: str) -> Callable[[Sequence[str]], None]:
        """Return a check to call with the missing ranks while waiting for every rank in ``what``.

        The check raises RuntimeFault if one of them has finished or has begun a later round, and so
        will never make this call.
        """

        def check(missing: Sequence[str]) -> None:
            self._member.check()
            finished = {*self._roster.finished, *self.last_done}
            ahead = self._roster.ahead(self._roster.round)
            for name in missing:
                if name in finished or name in ahead:
                    doing = "has finished" if name in finished else "trains on"
                    raise RuntimeFault(
                        f"{self._member.name} is in {what}, but {name} {doing}: every rank must "
                        f"call {what} at the same place"
                    )

        return check

    def check_end(self, steps: int) -> Callable[[Sequence[str]], None]:
        """Return the same check for a rank that has finished after this number of steps.

        The check raises RuntimeFault if missing ranks have begun a later round, which waits for
        this rank.
        """

        def check(missing: Sequence[str]) -> None:
            self._member.check()
            ahead = self._roster.ahead(self._roster.round)
            training = [name for name in missing if name in ahead]
            if training:
                raise RuntimeFault(
                    f"{self._member.name} has finished after {steps} steps, and others still train "
                    f"and wait for it ({', '.join(training)}): {SAME_STEPS}"
                )

        return check
