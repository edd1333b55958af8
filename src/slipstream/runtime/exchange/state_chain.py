"""Copies rank 0's tensors to all ranks, piece by piece from rank to rank.

Each rank forwards a piece as it arrives, so the copy takes about as long as one transfer over one
link, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from slipstream.runtime.exchange.transfer import Arrival, Transfer
from slipstream.transports.wire import Message, State
from slipstream.types import Values

COPY = "copy of rank 0"


class StateChain:
    """One worker's link of the chain; ``run`` must be called on every rank in the same order.

    Args:
        rank: This worker's.
        world_size: The number of workers.
        transfer: Sends and receives the pieces.
        limit_s: How long a run may wait.
    """

    def __init__(self, rank: int, world_size: int, transfer: Transfer, limit_s: float) -> None:
        self.open = True  # whether a run may begin; else early pieces could fill the memory
        self._rank, self._world_size = rank, world_size
        self.among(())
        self._transfer, self._limit_s = transfer, limit_s
        self.sync = 0
        transfer.keep_early(COPY, self._may_come_early)

    def among(self, lost: Collection[int]) -> None:
        """Set the order of the chain without lost ranks; all ranks must use the same ``lost``."""
        after = [r for r in range(self._rank + 1, self._world_size) if r not in lost]
        before = [r for r in range(self._rank) if r not in lost]
        self._next = f"rank {after[0]}" if after else None
        self._before = f"rank {before[-1]}" if before else ""
        self._upstream = {f"rank {rank}" for rank in before}

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def _may_come_early(self, message: Message[State]) -> bool:
        """Whether the rank before may be ahead of this one by this piece."""
        is_later = message.body.number >= self.sync
        return self.open and is_later and message.sender == self._before

    def run(self, tensors: Sequence[Values], finish: Callable[[], None] = lambda: None) -> bool:
        """Rank 0 sends these tensors; on the other ranks they are overwritten. All list the same.

        Returns whether they have arrived; False if a rank before this one has died and the job
        continues.
        """
        is_complete = True
        if self._rank == 0:
            if self._next is not None:
                self.send_to(self._next, self.sync, tensors)
        else:
            is_complete = self._receive(tensors)
        self.sync += 1
        finish()
        return is_complete

    def send_to(self, peer: str, sync: int, tensors: Sequence[Values]) -> None:
        """Send to a peer, for its run with this number."""
        self._transfer.send(peer, COPY, sync, [values.data for values in tensors])

    def _receive(self, tensors: Sequence[Values]) -> bool:
        memory, member = [values.data for values in tensors], self._transfer.member
        arrival = Arrival(self._before, COPY, self.sync, lambda _: memory, forward=self._next)
        with self._transfer.expecting([arrival]):
            member.wait_until(
                lambda: arrival.complete or not self._upstream.isdisjoint(member.lost),
                what="rank 0's weights",
                limit_s=self._limit_s,
                missing=lambda: [self._before],
            )
        return arrival.complete
