"""The channel of a host's other workers: contribute to the host's sum, and take its result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from slipstream.codecs.matrices import Matrix
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.runtime.hosts.channel import AddGradient, HostChannel
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.types import Settings


class HostFollower(HostChannel):
    """All tensors of a plan, at a worker that another one represents; implements ``Channel``.

    Args:
        worker: Its number on the host, 1 or more.
        memory: The memory that the host's workers share.
        slots: This worker's own tensors.
        member: This worker's endpoint.
        limit_s: The longest wait.
        layers: The layers that may be sent in compact form.
        add: Adds the gradient of such a layer to this worker's; None: results are written.
        settings: The optimizer's settings, which are sent with a round; None if none are.
    """

    def __init__(
        self,
        worker: int,
        memory: HostMemory,
        slots: Slots,
        member: Endpoint,
        limit_s: float,
        layers: HostLayers | None = None,
        add: AddGradient | None = None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        super().__init__(worker, memory, member, limit_s, layers, settings)
        self._slots, self._add = slots, add
        self._captured: set[int] = set()  # layers that were published in this round
        self._added: set[int] = set()  # tensors whose last contribution was in compact form
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()  # stays empty: only the leader sends to other hosts
        self.received: Counter[str] = Counter()
        self._rounds_awaited: dict[
            int, int
        ] = {}  # by tensor: the round whose result it has not taken yet
        self._noted_round = -1
        self._next_round = 0

    def ready(self, tensor: int) -> None:
        self._refuse_second(tensor)
        # The host sums into the memory of its results, so this worker must have read its result
        # first.
        self.wait([tensor])
        self._ready_tensors.add(tensor)
        self._added.discard(tensor)
        values = self._slots.source(tensor)
        if values is not None:
            self._memory.place(self.rank, tensor).data[:] = values.data
        self._publish(tensor, values is not None)

    def _publish(self, tensor: int, present: bool) -> None:
        board = self._memory.board
        if self._noted_round != self._round:
            self._noted_round = self._round
            board.note(self.rank, self._round, self._settings_number())
        board.publish(self.rank, tensor, self._round, present, self.step)

    def ready_layer(
        self, unit: int, matrices: Sequence[tuple[Matrix, Loan]] | None, *, early: bool = False
    ) -> None:
        assert self._layers is not None
        layer, tensors = self._layers.layer(unit), self._layers.units[unit].tensors
        if unit in self._captured:
            raise completed_twice(layer.name)
        self.wait(tensors)
        self._captured.add(unit)
        self._ready_tensors.update(tensors)
        if self._add is not None:
            self._added.update(tensors)
        if matrices is not None:
            self._layers.write(self.rank, unit, [matrix for matrix, _ in matrices])
            for _, loan in matrices:
                loan.release()
        if layer.bias is not None:
            self._publish(layer.bias, False)
        self._publish(layer.weight, matrices is not None)  # last, since it stands for all

    # ---- rounds

    def flush(self) -> None:
        self._flush_layers(self._captured)
        for tensor in self._unready_tensors():
            self.ready(tensor)
        self._rounds_awaited.update(dict.fromkeys(self._ready_tensors, self._round))
        self._ready_tensors.clear()
        self._captured.clear()
        self._round += 1
        self._member.round = max(self._member.round, self._round, self.step + 1)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        start = time.monotonic()
        wanted = set(self._rounds_awaited if tensors is None else tensors)
        while wanted := wanted & self._rounds_awaited.keys():
            self._wait_until(lambda wanted=wanted: self._take(wanted))  # type: ignore[misc]
        self.wait_s += time.monotonic() - start

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        self._memory.wait(
            holds,
            self._member,
            of_results=True,
            what=f"the results of round {self._round - 1}",
            limit_s=self._limit_s,
            missing=lambda: self._member.roster.behind(self._member.roster.round),
        )

    def _take(self, wanted: Iterable[int]) -> bool:
        """Take the results that have arrived; return whether there is any."""
        has_arrived = False
        for tensor in sorted(wanted):
            present = self._memory.board.result(tensor, self._rounds_awaited[tensor])
            if present is None:
                continue
            has_arrived = True
            del self._rounds_awaited[tensor]
            if present and self._add is not None and tensor in self._added:
                self._add(tensor, self._memory.place(0, tensor))
            elif present:
                self._slots.sink(tensor).data[:] = self._memory.place(0, tensor).data
                self._slots.finish(tensor)
        return has_arrived

    def refresh(self) -> None:
        self._take(list(self._rounds_awaited))

    # ---- where hosts may miss rounds

    @property
    def told_round(self) -> int:
        """The open round of hosts, as far as this worker knows."""
        self._read_next_round()
        return self._next_round

    def open_round(self) -> int:
        """Return the round that this worker's host makes next; wait until it is known."""
        start = time.monotonic()
        self._wait_until(self._read_next_round)
        self.wait_s += time.monotonic() - start
        return self._next_round

    def _read_next_round(self) -> bool:
        """Return whether the leader has published the round after the last one; read its number."""
        board, last = self._memory.board, self._round - 1
        if last < 0:
            return True
        if board.published(0, 0, last) is None:
            return False
        self._next_round = board.noted(0, last)
        return True
