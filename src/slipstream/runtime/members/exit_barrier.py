"""Leaving a job: all workers report to rank 0, which dismisses all when all have finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.errors import FrameRefused, PeerFailed, PeerLost, RuntimeFault
from slipstream.runtime.members.coordination import HUB
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.heartbeat import SAME_STEPS, Heartbeat
from slipstream.transports.wire import Final, Leave, Message, WorkerLeft


class ExitBarrier:
    """One member's side of leaving the job.

    Attributes:
        dismissed: True once rank 0 has ended the job.
        summaries: Rank 0 only: by name, the metrics of workers that have left.
    """

    def __init__(self, member: Endpoint, heartbeat: Heartbeat) -> None:
        self._member, self._roster, self._heartbeat = member, member.roster, heartbeat
        self.dismissed = False
        self.summaries: dict[str, bytes] = {}
        self._retired: set[str] = set()  # rank 0 only: workers that have made their last round
        self._everybody_here: bool | None = None  # rank 0's Final: no worker trains any more
        member.on(Leave, self._on_leave)
        member.on(WorkerLeft, self._on_worker_left)
        member.on(Final, self._on_final)

    def finish_training(self, rank: int, world_size: int, limit_s: float) -> bool:
        """Wait until no worker trains any more.

        Returns:
            True if no worker was lost, so that all can take the last weights together.
        """
        what = "the other workers to finish training"
        if not self._member.is_hub:
            self._member.send(HUB, WorkerLeft(rank))
            self._member.wait_for_end(
                lambda: self._everybody_here is not None,
                what=what,
                limit_s=limit_s,
                missing=lambda: [HUB],
            )
            return bool(self._everybody_here)
        others = others_than_hub(world_size)

        def missing() -> list[str]:
            return self._not_in(self._retired, others)

        self._member.wait_for_end(
            lambda: not missing(), what=what, limit_s=limit_s, missing=missing
        )
        everybody_here = not self._member.lost
        for name in others:
            self._member.send(name, Final(everybody_here))
        return everybody_here

    def leave(
        self, summary: bytes, world_size: int, limit_s: float, before_dismissal: Callable[[], None]
    ) -> list[bytes]:
        """Leave after a normal end, with this worker's metrics, and wait until all workers do.

        Args:
            before_dismissal: Rank 0 calls it before any worker can begin another job.

        Returns:
            On rank 0, the metrics of ranks 1 to n-1; an empty list on other ranks.

        Raises:
            RuntimeFault: In lockstep, a worker still trains while rank 0 has finished.
        """
        if not self._member.is_hub:
            self._member.send(HUB, Leave(round=self._roster.round), [summary])
            self._member.wait_for_end(
                lambda: self.dismissed,
                what="rank 0 to end the job",
                limit_s=limit_s,
                missing=lambda: [HUB],
            )
            return []
        others = others_than_hub(world_size)
        self._heartbeat.finished = True
        self._wait_for_summaries(others, limit_s)
        before_dismissal()
        for name in [*others, *self._roster.heard]:
            self._member.send(name, Leave())
        return [self.summaries[name] for name in others if name in self.summaries]

    def _wait_for_summaries(self, others: list[str], limit_s: float) -> None:
        def ahead() -> list[str]:
            return self._roster.ahead(self._roster.round)

        def missing() -> list[str]:
            return self._not_in(self.summaries, others)

        self._member.wait_for_end(
            lambda: not missing() or bool(ahead()),
            what="all ranks to finish",
            limit_s=limit_s,
            missing=missing,
        )
        if ahead():
            raise RuntimeFault(
                f"{', '.join(ahead())} still trains, but rank 0 has finished: {SAME_STEPS}"
            )

    def _not_in(self, arrived: Any, others: list[str]) -> list[str]:
        lost = self._member.lost
        return [name for name in others if name not in arrived and name not in lost]

    def abandon(self, reason: str, *, reported: bool = False, where: str = "") -> None:
        """Report that this member ends with an error; only ``stop`` may follow.

        Args:
            reported: True if this process has shown the error itself.
            where: The line of the user's code that failed.
        """
        if isinstance(self._member.fault, PeerLost | PeerFailed):
            return  # rank 0 already knows, or has announced it
        if self._member.is_hub:
            for name in {*self._roster.heard, *self._roster.finished}:
                self._member.transport.send(name, Leave(reason, reported, where=where))
        elif not self.dismissed:
            self._member.transport.send(HUB, Leave(reason, where=where))

    def _on_leave(self, message: Message[Leave]) -> None:
        if message.body.reason is not None:
            self._member.coordination.on_failed(message, message.body.reason)
            return
        if message.frames:
            self.summaries[message.sender] = bytes(message.frames[0])
        with self._member.updating():
            self._roster.leave(message.sender)
            self._roster.finished[message.sender] = message.body.round
            self.dismissed = self.dismissed or message.sender == HUB

    def _on_worker_left(self, message: Message[WorkerLeft]) -> None:
        with self._member.updating():
            self._retired.add(message.sender)

    def _on_final(self, message: Message[Final]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not end the training")
        with self._member.updating():
            self._everybody_here = message.body.copied


def others_than_hub(world_size: int) -> list[str]:
    """Return the names of ranks 1 to n-1."""
    return [f"rank {rank}" for rank in range(1, world_size)]
