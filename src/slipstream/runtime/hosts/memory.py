"""The memory that the workers of one host share, as one of them uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from slipstream._native import HostBoard, mean_into
from slipstream.errors import WaitLimit
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Layer, Rank, Spec, Values

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
LOOK_AROUND_S = 0.05  # how soon a fault of the job ends a wait


class HostMemory:
    """Areas of tensors, and the board.

    Args:
        specs: The plan's tensors.
        ranks: The workers of this host, in rank order; the first speaks for them.
        shared: Memory of the size of such a ``HostSegment``; zeros before anybody uses it.
        layers: Those whose gradients may travel as factors or rows.

    Attributes:
        board: What the workers tell each other of rounds.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        ranks: Sequence[Rank],
        shared: SharedMemory,
        layers: Sequence[Layer] = (),
    ) -> None:
        self.specs, self.ranks = tuple(specs), tuple(ranks)
        self._segment = HostSegment.of(specs, len(ranks), layers)
        self._shared = shared
        self._bytes = np.frombuffer(shared.memory, np.uint8)
        self.board = HostBoard(shared.memory, len(ranks), len(specs))

    def place(self, worker: int, tensor: int) -> Values:
        """Where a worker puts its contribution; worker 0: where the host's sum and result are."""
        spec, at = self.specs[tensor], self._segment.at(worker, tensor)
        return Values(self._bytes[at : at + spec.nbytes], spec.dtype)

    def matrices(self, worker: int, layer: int) -> Bytes:
        """Where a worker puts its matrices of a layer, by number."""
        at, room = self._segment.matrices_at(worker, layer)
        return self._bytes[at : at + room]

    def aggregate(self, tensor: int, round_: int, own: Values | None, share: float) -> int:
        """Sum what the host's workers have contributed, in rank order, into the host's place.

        Args:
            own: What worker 0 contributes.
            share: How many workers a host stands for on average. Sums are divided by it, so that
                the mean over hosts is the mean over workers, also of hosts that differ, and sums
                are about as large as what workers contribute.

        Returns:
            How many workers have contributed.
        """
        given = [] if own is None else [own]
        for worker in range(1, len(self.ranks)):
            if self.board.published(worker, tensor, round_):
                given.append(self.place(worker, tensor))
        if given:
            spec, out = self.specs[tensor], self.place(0, tensor)
            mean_into(out.data, [values.data for values in given], spec.dtype, share)
        return len(given)

    def behind(self, round_: int, tensors: Collection[int]) -> list[str]:
        """The workers, but the first, that have not contributed these tensors to a round."""
        return [
            f"rank {rank}"
            for worker, rank in enumerate(self.ranks)
            if worker and any(self.board.published(worker, t, round_) is None for t in tensors)
        ]

    def wait(
        self,
        holds: Callable[[], bool],
        member: Endpoint,
        *,
        of_results: bool,
        what: str,
        limit_s: float,
        missing: Callable[[], Sequence[str]],
    ) -> None:
        """Sleep until ``holds()``, which looks at the board.

        Args:
            of_results: Whether it is results, or else contributions, that are waited for.

        Raises:
            RuntimeFault: The job's fault.
            WaitLimit: ``limit_s`` have passed.
        """
        deadline = time.monotonic() + limit_s
        while True:
            seen = self.board.bell(of_results)
            if holds():
                return
            member.check()
            if time.monotonic() > deadline:
                raise WaitLimit(what, limit_s, missing(), member.last_refusal)
            self.board.sleep(of_results, seen, LOOK_AROUND_S)

    def close(self) -> None:
        """Give the descriptor back; memory that is looked at stays mapped."""
        self._shared.close()
