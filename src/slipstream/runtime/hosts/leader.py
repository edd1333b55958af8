"""The worker that speaks for its host: sums what the host's workers contribute, exchanges the sum
with other hosts, and hands the result on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from slipstream.codecs.matrices import Matrix
from slipstream.errors import RuntimeFault
from slipstream.runtime.driver import Driver
from slipstream.runtime.exchange.channel import Channel, LayerChannel, Slots
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.exchange.send_buffers import Loan, SendBuffers
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.types import Values

AddGradient = Callable[[int, Values], None]


def refuse_layer(tensor: int, values: Values) -> None:
    """For plans without layers that travel in compact form."""
    raise RuntimeFault(f"tensor {tensor} is of no layer that travels in compact form")


class HostSlots:
    """The host's tensors, as the channels between hosts see them; implements ``Slots``.

    Args:
        own: This worker's own tensors.
        share: See ``HostMemory.aggregate``.
        add: Adds the gradient of a layer that travelled in compact form to this worker's.
    """

    def __init__(
        self, memory: HostMemory, own: Slots, share: float, add: AddGradient = refuse_layer
    ) -> None:
        self.memory, self.share = memory, share
        self._own, self._add = own, add
        self._added: set[int] = set()  # tensors of layers that travel in compact form in this round
        self._filled: set[int] = set()  # tensors of which the host's place holds something
        self._weights: dict[int, int] = {}  # by tensor: the workers that contributed to it
        self._unfinished: dict[int, int] = {}  # by tensor that has left: its round

    def aggregate(self, tensor: int, round_: int) -> None:
        """All workers of the host have contributed."""
        self._open(tensor, round_)
        own = self._own.source(tensor)
        self._weights[tensor] = self.memory.aggregate(tensor, round_, own, self.share)
        if self._weights[tensor]:
            self._filled.add(tensor)

    def open_layer(self, tensors: Iterable[int], round_: int) -> None:
        """These travel in compact form in this round: their result is added to gradients."""
        for tensor in tensors:
            self._open(tensor, round_)
            self._added.add(tensor)

    def _open(self, tensor: int, round_: int) -> None:
        self._filled.discard(tensor)
        self._added.discard(tensor)
        self._unfinished[tensor] = round_

    def is_open(self, tensor: int) -> bool:
        """Whether the tensor has left, and its result was not handed on yet."""
        return tensor in self._unfinished

    def source(self, tensor: int) -> Values | None:
        """What the host contributes."""
        return self.memory.place(0, tensor) if tensor in self._filled else None

    def weight(self, tensor: int) -> int:
        """How many workers a buffer's sum is of; a parameter's is divided by all, and counts 1."""
        is_parameter = self.memory.specs[tensor].role == "parameter"
        return 1 if is_parameter else max(1, self._weights[tensor])

    def drop(self, tensor: int) -> None:
        """The host contributes nothing after all."""
        self._filled.discard(tensor)

    def sink(self, tensor: int) -> Values:
        """Where the result goes; it need not be written to if it is where the source was."""
        self._filled.add(tensor)
        return self.memory.place(0, tensor)

    def finish(self, tensor: int) -> None:
        """The result is there, if there is any: hand it on. Nothing if that is done already."""
        round_ = self._unfinished.pop(tensor, None)
        if round_ is None:
            return
        present = tensor in self._filled
        # The others first: they copy while this worker does.
        self.memory.board.publish_result(tensor, round_, present)
        if present and tensor in self._added:
            self._add(tensor, self.memory.place(0, tensor))
        elif present:
            self._own.sink(tensor).data[:] = self.memory.place(0, tensor).data
            self._own.finish(tensor)


class HostLeader:
    """All tensors of a plan, at the worker that speaks for its host; implements ``Channel``.

    A tensor leaves when it is ready on all workers of the host. That is looked at whenever one
    becomes ready here, and waited for when the round is complete here.

    Args:
        slots: The host's tensors; ``between`` exchanges them.
        between: The channels to other hosts.
        layers: Those that may travel in compact form, and the channel on which they do.
    """

    takes_early = False

    def __init__(
        self,
        slots: HostSlots,
        between: Sequence[Channel],
        member: Endpoint,
        limit_s: float,
        layers: tuple[HostLayers, LayerChannel] | None = None,
    ) -> None:
        self.rank = 0  # of the workers of this host
        self._layers = None if layers is None else layers[0]
        self._links = None if layers is None else layers[1]
        self._travelling: Collection[int] | None = None  # layers in compact form; None: all
        self._captured: dict[int, Sequence[tuple[Matrix, Loan]] | None] = {}  # in this round
        self._buffers = SendBuffers()
        self._skipped: Collection[int] = ()
        self._slots, self._memory = slots, slots.memory
        self._between = Driver(between)
        self._member, self._limit_s = member, limit_s
        self._tensors = range(len(slots.memory.specs))
        self._round = 0
        self._fired: set[int] = set()
        self._waiting: list[int] = []  # ready here, and not on all workers of the host
        self._waited_s = 0.0

    # ---- figures

    @property
    def step(self) -> int:
        return self._between.step

    @step.setter
    def step(self, step: int) -> None:
        self._between.resume(step)

    @property
    def wait_s(self) -> float:
        return self._waited_s + self._between.wait_s

    @property
    def sent(self) -> Counter[str]:
        return sum((channel.sent for channel in self._between.channels), Counter())

    @property
    def received(self) -> Counter[str]:
        return sum((channel.received for channel in self._between.channels), Counter())

    # ---- contributing

    def ready(self, tensor: int) -> None:
        if tensor in self._fired:
            raise completed_twice(self._memory.specs[tensor].name)
        self._begin([tensor])
        self._pass_on()

    def _begin(self, tensors: Sequence[int]) -> None:
        """These are ready here. The sum takes the place of the last result: that is handed on."""
        self.wait([tensor for tensor in tensors if self._slots.is_open(tensor)])
        self._fired.update(tensors)
        self._waiting += tensors

    def _pass_on(self) -> bool:
        """Let tensors leave that are ready on all workers of the host; whether any was."""
        arrived = self._memory.board.arrived(self._round, self._waiting)
        for tensor in arrived:
            self._waiting.remove(tensor)
            if self._layers is not None and self._layers.unit_of.get(tensor) in self._captured:
                self._pass_on_layer(tensor, self._layers)
                continue
            self._slots.aggregate(tensor, self._round)
            self._between.ready(tensor)
        return bool(arrived)

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = tensors
        for channel in self._between.channels:
            channel.skip_round(tensors)

    # ---- layers in compact form; implements ``LayerChannel``

    def travel_compact(self, units: Collection[int]) -> None:
        self._travelling = units
        assert self._links is not None
        self._links.travel_compact(units)

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
        if unit in self._captured:
            raise completed_twice(self._layers.layer(unit).name)
        self._captured[unit] = matrices
        self._begin(self._layers.units[unit].tensors)
        self._pass_on()

    def _pass_on_layer(self, tensor: int, layers: HostLayers) -> None:
        """All workers of the host have captured this tensor's layer."""
        unit = layers.unit_of[tensor]
        if tensor != layers.layer(unit).weight:
            return  # all of a layer is with its weight
        assert self._links is not None
        self._slots.open_layer(layers.units[unit].tensors, self._round)
        own = self._captured[unit]
        matrices = None if own is None else [matrix for matrix, _ in own]
        share, buffer = self._slots.share, self._links.buffer
        stacked = layers.stacked(unit, self._round, matrices, buffer, share)
        for _, loan in own or ():
            loan.release()
        self._links.ready_layer(unit, stacked)

    def _flush_layers(self) -> None:
        """Layers that no pass has used contribute nothing."""
        for unit in self._layers.units if self._layers is not None else ():
            travels = self._travelling is None or unit in self._travelling
            if travels and unit not in self._captured:
                self.ready_layer(unit, None)

    # ---- rounds

    def flush(self) -> None:
        # After a checkpoint, rounds restart at 0; all workers of a job must count alike.
        self._member.round = max(self._member.round, self._round + 1, self.step + 1)
        self._flush_layers()
        for tensor in self._tensors:
            if tensor not in self._fired and tensor not in self._skipped:
                self._begin([tensor])
        self._await_host()
        self._agree_on_step()
        self._between.flush()
        self._fired.clear()
        self._captured.clear()
        self._round += 1

    def _await_host(self) -> None:
        begun = time.monotonic()
        while self._waiting:
            self._memory.wait(
                self._pass_on,
                self._member,
                of_results=False,
                what=f"this host's gradients of round {self._round}",
                limit_s=self._limit_s,
                missing=lambda: self._memory.behind(self._round),
            )
        self._waited_s += time.monotonic() - begun

    def _agree_on_step(self) -> None:
        ranks, board = self._memory.ranks, self._memory.board
        steps = [self.step, *(board.noted(worker)[0] for worker in range(1, len(ranks)))]
        if len(set(steps)) > 1:
            told = (f"rank {r} at step {s}" for r, s in zip(ranks, steps, strict=True))
            raise RuntimeFault(
                f"workers ran different numbers of backward passes: {', '.join(told)}; every "
                "worker must call backward() equally often a step (use job.accumulate() for passes "
                "that only add up)"
            )

    # ---- results

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        wanted = self._tensors if tensors is None else list(tensors)
        if not wanted:
            return
        self._between.wait(wanted)
        for tensor in wanted:
            # Of those that have no result, this is the first that the host's workers hear.
            self._slots.finish(tensor)

    def refresh(self) -> None:
        self._between.refresh()
