"""The memory that the workers of one host share, from the view of one of them."""

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
LOOK_AROUND_S = 0.05  # delay after which a fault of the job ends a wait


class HostMemory:
    """The segments of tensors, and the board.

    Args:
        specs: The plan's tensors.
        ranks: The workers of this host, in rank order; the first represents them.
        shared: Memory of the size of such a ``HostSegment``; zeros before its first use.
        layers: The layers whose gradients may be sent as factors or rows.

    Attributes:
        board: The progress of rounds, published by the workers to each other.
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
        """Return a worker's segment for a tensor; worker 0's has the host's sum and result."""
        spec, at = self.specs[tensor], self._segment.at(worker, tensor)
        return Values(self._bytes[at : at + spec.nbytes], spec.dtype)

    def matrices(self, worker: int, layer: int) -> Bytes:
        """Return a worker's memory for its matrices of a layer, by number."""
        at, room = self._segment.matrices_at(worker, layer)
        return self._bytes[at : at + room]

    def aggregate(self, tensor: int, round_: int, own: Values | None, share: float) -> int:
        """Sum the contributions of the host's workers, in rank order, into the host's segment.

        Args:
            own: Worker 0's contribution.
            share: The average number of workers of a host. Sums are divided by it, so that the mean
                over hosts is the mean over workers, also for hosts that differ, and sums are about
                as large as the contributions of workers.

        Returns:
            The number of workers that have contributed.
        """
        contributions = [] if own is None else [own]
        for worker in range(1, len(self.ranks)):
            if self.board.published(worker, tensor, round_):
                contributions.append(self.place(worker, tensor))
        if contributions:
            spec, out = self.specs[tensor], self.place(0, tensor)
            mean_into(out.data, [values.data for values in contributions], spec.dtype, share)
        return len(contributions)

    def behind(self, round_: int, tensors: Collection[int]) -> list[str]:
        """Return the workers, but the first, that have not contributed these tensors to a round."""
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
        """Sleep until ``holds()``, which reads the board.

        Args:
            of_results: Wait for results; False: for contributions.

        Raises:
            RuntimeFault: The job has a fault.
            WaitLimit: ``limit_s`` have passed.
        """
        deadline = time.monotonic() + limit_s
        while True:
            bell = self.board.bell(of_results)
            if holds():
                return
            member.check()
            if time.monotonic() > deadline:
                raise WaitLimit(what, limit_s, missing(), member.last_refusal)
            self.board.sleep(of_results, bell, LOOK_AROUND_S)

    def close(self) -> None:
        """Close the descriptor; memory with views stays mapped."""
        self._shared.close()
