"""The other workers of a host: contribute to the host's sum, and take its result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from slipstream.codecs.matrices import Matrix
from slipstream.errors import RuntimeFault
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.exchange.send_buffers import Loan, SendBuffers
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.leader import AddGradient, refuse_layer
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint


class HostFollower:
    """All tensors of a plan, at a worker for which another one speaks; implements ``Channel``.

    Args:
        worker: Its number on the host, 1 or more.
        layers: Those that may travel in compact form.
        add: Adds the gradient of such a layer to this worker's.
    """

    takes_early = False

    def __init__(
        self,
        worker: int,
        memory: HostMemory,
        slots: Slots,
        member: Endpoint,
        limit_s: float,
        layers: HostLayers | None = None,
        add: AddGradient = refuse_layer,
    ) -> None:
        self._layers, self._add = layers, add
        self._travelling: Collection[int] | None = None  # layers in compact form; None: all
        self._captured: set[int] = set()  # layers that were published in this round
        self._added: set[int] = set()  # tensors whose last contribution was in compact form
        self._buffers = SendBuffers()
        self._skipped: Collection[int] = ()
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()  # nothing leaves the host from here
        self.received: Counter[str] = Counter()
        self.rank, self._memory, self._slots = worker, memory, slots
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
        self._added.discard(tensor)
        values = self._slots.source(tensor)
        if values is not None:
            self._memory.place(self.rank, tensor).data[:] = values.data
        self._publish(tensor, values is not None)

    def _publish(self, tensor: int, present: bool) -> None:
        board = self._memory.board
        board.note(self.rank, self.step, 0)
        board.publish(self.rank, tensor, self._round, present)

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = tensors

    # ---- layers in compact form; implements ``LayerChannel``

    def travel_compact(self, units: Collection[int]) -> None:
        self._travelling = units

    def buffer(self, unit: int, place: int, nbytes: int) -> Loan:
        return self._buffers.take((unit, place), nbytes)

    def early(self, unit: int, matrix: Matrix, loan: Loan) -> int:
        raise RuntimeFault("the rows of a host leave together")

    def early_round(self, unit: int) -> int | None:
        return None

    def ready_layer(
        self, unit: int, matrices: Sequence[tuple[Matrix, Loan]] | None, *, early: bool = False
    ) -> None:
        assert self._layers is not None
        layer, tensors = self._layers.layer(unit), self._layers.units[unit].tensors
        if unit in self._captured:
            raise completed_twice(layer.name)
        self.wait(tensors)
        self._captured.add(unit)
        self._fired.update(tensors)
        self._added.update(tensors)
        if matrices is not None:
            self._layers.write(self.rank, unit, [matrix for matrix, _ in matrices])
            for _, loan in matrices:
                loan.release()
        if layer.bias is not None:
            self._publish(layer.bias, False)
        self._publish(layer.weight, matrices is not None)  # the last: it stands for all

    def _flush_layers(self) -> None:
        for unit in self._layers.units if self._layers is not None else ():
            travels = self._travelling is None or unit in self._travelling
            if travels and unit not in self._captured:
                self.ready_layer(unit, None)

    # ---- rounds

    def flush(self) -> None:
        self._flush_layers()
        tensors = range(len(self._memory.specs))
        for tensor in tensors:
            if tensor not in self._fired and tensor not in self._skipped:
                self.ready(tensor)
        self._fired.clear()
        self._captured.clear()
        self._awaited.update(tensors)
        self._round += 1
        self._member.round = max(self._member.round, self._round, self.step + 1)

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
            if present and tensor in self._added:
                self._add(tensor, self._memory.place(0, tensor))
            elif present:
                self._slots.sink(tensor).data[:] = self._memory.place(0, tensor).data
                self._slots.finish(tensor)
        return found

    def refresh(self) -> None:
        self._take(self._awaited.copy())
