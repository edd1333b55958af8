"""The other workers of a host: contribute to the host's sum, and take its result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from slipstream.errors import RuntimeFault
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint


class HostFollower:
    """All tensors of a plan, at a worker for which another one speaks; implements ``Channel``.

    Args:
        worker: Its number on the host, 1 or more.
    """

    def __init__(
        self, worker: int, memory: HostMemory, slots: Slots, member: Endpoint, limit_s: float
    ) -> None:
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()  # nothing leaves the host from here
        self.received: Counter[str] = Counter()
        self._worker, self._memory, self._slots = worker, memory, slots
        self._member, self._limit_s = member, limit_s
        self._round = 0
        self._fired: set[int] = set()
        self._awaited: set[int] = set()  # tensors whose last result was not taken yet

    def ready(self, tensor: int) -> None:
        if tensor in self._fired:
            raise completed_twice(self._memory.specs[tensor].name)
        # The host sums into the memory in which its results are: this one's turn to have read it.
        self.wait([tensor])
        self._fired.add(tensor)
        values = self._slots.source(tensor)
        if values is not None:
            self._memory.place(self._worker, tensor).data[:] = values.data
        board = self._memory.board
        board.note(self._worker, self.step, 0)
        board.publish(self._worker, tensor, self._round, values is not None)

    def skip_round(self, tensors: Collection[int]) -> None:
        if tensors:
            raise RuntimeFault("tensors of a host cannot travel another way for a round")

    def flush(self) -> None:
        tensors = range(len(self._memory.specs))
        for tensor in tensors:
            if tensor not in self._fired:
                self.ready(tensor)
        self._fired.clear()
        self._awaited.update(tensors)
        self._round += 1
        self._member.round = max(self._member.round, self._round)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        begun = time.monotonic()
        wanted = self._awaited.copy() if tensors is None else self._awaited.intersection(tensors)
        while wanted := wanted & self._awaited:
            self._memory.wait(
                lambda wanted=wanted: self._take(wanted),  # type: ignore[misc]
                self._member,
                of_results=True,
                what=f"the results of round {self._round - 1}",
                limit_s=self._limit_s,
                missing=lambda: self._member.roster.behind(self._member.roster.round),
            )
        self.wait_s += time.monotonic() - begun

    def _take(self, wanted: Iterable[int]) -> bool:
        """Take the results that are there; whether any is."""
        found = False
        for tensor in sorted(wanted):
            present = self._memory.board.result(tensor, self._round - 1)
            if present is None:
                continue
            found = True
            self._awaited.discard(tensor)
            if present:
                self._slots.sink(tensor).data[:] = self._memory.place(0, tensor).data
                self._slots.finish(tensor)
        return found

    def refresh(self) -> None:
        self._take(self._awaited.copy())
