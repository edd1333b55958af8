"""Copies rank 0's tensors to all ranks, piece by piece from rank to rank.

Each rank forwards a piece as it arrives, so the copy takes about as long as one transfer over one
link, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from slipstream.errors import FrameRefused
from slipstream.runtime.members.member import Member
from slipstream.transports.wire import Message, Piece, checksum
from slipstream.types import Values

PIECE_BYTES = 4 * 1024 * 1024


class StateChain:
    """One worker's link of the chain; ``run`` must be called on every rank in the same order."""

    def __init__(self, rank: int, world_size: int, member: Member, limit_s: float) -> None:
        self.open = True  # whether a run may begin; else early pieces could fill the memory
        self._rank, self._world_size = rank, world_size
        self.among(())
        self._member = member
        self._limit_s = limit_s
        self.sync = 0
        self._targets: Sequence[Values] = ()
        self._left = 0
        self._early: list[Message[Piece]] = []
        member.on(Piece, self._on_piece)

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

    def run(self, tensors: Sequence[Values], finish: Callable[[], None] = lambda: None) -> bool:
        """Rank 0 sends these tensors; on the other ranks they are overwritten. All list the same.

        Returns whether they have arrived; False if a rank before this one has died and the job
        continues.
        """
        if self._rank == 0:
            if self._next is not None:
                self.send_to(self._next, self.sync, tensors)
        else:
            with self._member.lock:
                self._targets = tensors
                self._left = sum(values.data.nbytes for values in tensors)
                for message in self._take_out_early():
                    with suppress(FrameRefused):
                        self._take(message)
            self._member.wait_until(
                lambda: not self._left or not self._upstream.isdisjoint(self._member.lost),
                what="rank 0's weights",
                limit_s=self._limit_s,
                missing=lambda: [self._before],
            )
        complete = not self._left
        self._left = 0
        self.sync += 1
        finish()
        return complete

    def _take_out_early(self) -> list[Message[Piece]]:
        """The pieces that have arrived for this run; pieces of later runs stay."""
        of_run: dict[bool, list[Message[Piece]]] = {True: [], False: []}
        for message in self._early:
            of_run[message.body.sync == self.sync].append(message)
        self._early = of_run[False]
        return of_run[True]

    def send_to(self, peer: str, sync: int, tensors: Sequence[Values]) -> None:
        """Send to a peer, for its run with this number."""
        for index, values in enumerate(tensors):
            for offset in range(0, values.data.nbytes, PIECE_BYTES):
                piece = values.data[offset : offset + PIECE_BYTES]
                body = Piece(sync, index, offset, checksum([piece]))
                self._member.send(peer, body, [piece])

    def _on_piece(self, message: Message[Piece]) -> None:
        if message.sender != self._before or len(message.frames) != 1:
            raise FrameRefused(f"a piece of state from {message.sender}")
        with self._member.updating():
            if self._left == 0 or message.body.sync != self.sync:
                self._keep(message)
            else:
                self._take(message)

    def _keep(self, message: Message[Piece]) -> None:
        """The rank before may be ahead: keep pieces of later runs."""
        if not self.open or message.body.sync < self.sync:
            raise FrameRefused(f"a piece of copy {message.body.sync}, which is not expected")
        self._early.append(message)

    def _take(self, message: Message[Piece]) -> None:
        body, frame = message.body, message.frames[0]
        nbytes = memoryview(frame).nbytes
        if body.tensor >= len(self._targets):
            raise FrameRefused(f"a piece of tensor {body.tensor}")
        target = self._targets[body.tensor].data
        if body.offset + nbytes > target.nbytes or checksum(message.frames) != body.crc:
            raise FrameRefused(f"a piece of tensor {body.tensor} that does not fit")
        if self._next is not None:
            self._member.send(self._next, body, message.frames)
        memoryview(target)[body.offset : body.offset + nbytes] = memoryview(frame)
        self._left -= nbytes
