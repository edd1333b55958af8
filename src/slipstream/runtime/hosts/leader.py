"""The leader's channel: the worker that represents its host sums the workers' contributions,
exchanges the sum with other hosts, and passes the result on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from slipstream.codecs.matrices import Matrix
from slipstream.runtime.exchange.channel import Channel, LayerChannel, Slots
from slipstream.runtime.exchange.collector import different_settings, different_steps
from slipstream.runtime.exchange.driver import Driver
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.runtime.hosts.channel import AddGradient, HostChannel
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.types import Settings, Values

STEPS = 1 << 15  # that a word of the board can distinguish


class MissedRounds(Protocol):
    """Rounds between hosts, of which a host may miss some."""

    @property
    def told_round(self) -> int:
        """The open round, as far as this host knows."""
        ...

    def open_round(self) -> int:
        """Return the round that this host makes next; wait until it is known."""
        ...


class HostSlots:
    """The host's tensors, as the channels between hosts see them; implements ``Slots``.

    Args:
        memory: The memory that the host's workers share.
        own: This worker's own tensors.
        share: See ``HostMemory.aggregate``.
        divisors: By tensor: the divisor of its sum instead of ``share``.
        add: Adds the gradient of a layer that was sent in compact form to this worker's; None:
            results are written.
        is_whole: Returns whether a tensor's result is complete. Results that are weights arrive
            chunk by chunk.

    Attributes:
        before_result: Called with a round before the first of its results is passed on.
    """

    def __init__(
        self,
        memory: HostMemory,
        own: Slots,
        share: float,
        divisors: Mapping[int, float] = MappingProxyType({}),
        add: AddGradient | None = None,
        is_whole: Callable[[int], bool] = lambda tensor: True,
    ) -> None:
        self.memory, self.share, self._divisors = memory, share, divisors
        self._is_whole = is_whole
        self.before_result: Callable[[int], None] = lambda round_: None
        self._own, self._add = own, add
        self._added: set[int] = (
            set()
        )  # tensors of layers that are sent in compact form in this round
        self._filled: set[int] = set()  # tensors with a value in the host's segment
        self._weights: dict[int, int] = {}  # by tensor: the workers that contributed to it
        self._unfinished: dict[int, int] = {}  # by tensor that was sent: its round

    def aggregate(self, tensor: int, round_: int) -> None:
        """Sum a tensor to which all workers of the host have contributed."""
        self._open(tensor, round_)
        own = self._own.source(tensor)
        divisor = self._divisors.get(tensor, self.share)
        self._weights[tensor] = self.memory.aggregate(tensor, round_, own, divisor)
        if self._weights[tensor]:
            self._filled.add(tensor)

    def open_layer(self, tensors: Iterable[int], round_: int) -> None:
        """Open the tensors of a layer in compact form: their result is added to gradients."""
        for tensor in tensors:
            self._open(tensor, round_)
            if self._add is not None:
                self._added.add(tensor)

    def _open(self, tensor: int, round_: int) -> None:
        self._filled.discard(tensor)
        self._added.discard(tensor)
        self._unfinished[tensor] = round_

    def is_open(self, tensor: int) -> bool:
        """Return whether the tensor was sent, and its result was not passed on yet."""
        return tensor in self._unfinished

    def source(self, tensor: int) -> Values | None:
        """Return the host's contribution."""
        return self.memory.place(0, tensor) if tensor in self._filled else None

    def weight(self, tensor: int) -> int:
        """Return the averaging weight of a sum: of a buffer, how many workers it is of; else 1."""
        is_parameter = self.memory.specs[tensor].role == "parameter"
        return 1 if is_parameter else max(1, self._weights[tensor])

    def drop(self, tensor: int) -> None:
        """Withdraw the host's contribution."""
        self._filled.discard(tensor)

    def sink(self, tensor: int) -> Values:
        """Return the memory for the result; it may already contain it, as the source does."""
        self._filled.add(tensor)
        return self.memory.place(0, tensor)

    def finish(self, tensor: int) -> None:
        """Pass a result on, if it has arrived; do nothing if that was done already."""
        if tensor not in self._unfinished or not self._is_whole(tensor):
            return
        round_ = self._unfinished.pop(tensor)
        self.before_result(round_)
        present = tensor in self._filled
        # Other workers first: they copy while this worker does.
        self.memory.board.publish_result(tensor, round_, present)
        if present and self._add is not None and tensor in self._added:
            self._add(tensor, self.memory.place(0, tensor))
        elif present:
            self._own.sink(tensor).data[:] = self.memory.place(0, tensor).data
            self._own.finish(tensor)


class HostLeader(HostChannel):
    """All tensors of a plan, at the worker that represents its host; implements ``Channel``.

    A tensor is sent when it is ready on all workers of the host. This is checked whenever a tensor
    becomes ready here, and waited for when the round is complete here.

    Args:
        slots: The host's tensors; ``between`` exchanges them.
        between: The channels to other hosts.
        member: This worker's endpoint.
        limit_s: The longest wait.
        layers: The layers that may be sent in compact form, and the channel that sends them.
        rounds: The channel that knows the open round, if hosts may miss rounds.
        settings: The optimizer's settings, which are sent with a round; None if none are.
    """

    def __init__(
        self,
        slots: HostSlots,
        between: Sequence[Channel],
        member: Endpoint,
        limit_s: float,
        layers: tuple[HostLayers, LayerChannel] | None = None,
        rounds: MissedRounds | None = None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        of_host = None if layers is None else layers[0]
        super().__init__(0, slots.memory, member, limit_s, of_host, settings)
        self._links = None if layers is None else layers[1]
        self._captured: dict[int, Sequence[tuple[Matrix, Loan]] | None] = {}  # in this round
        self._slots, self._rounds = slots, rounds
        self._between = Driver(between)
        self._tensors = range(len(slots.memory.specs))
        slots.before_result = self._publish_round
        self._published_for = -1  # the last round after which the others know the next one
        self._waiting: list[int] = []  # tensors ready here, and not on all workers of the host
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
        self._refuse_second(tensor)
        self._begin([tensor])
        self._pass_on()

    def _begin(self, tensors: Sequence[int]) -> None:
        """Begin tensors that are ready here; pass on their last results, which sums overwrite."""
        self.wait([tensor for tensor in tensors if self._slots.is_open(tensor)])
        self._ready_tensors.update(tensors)
        self._waiting += tensors

    def _pass_on(self) -> bool:
        """Send tensors that are ready on all workers of the host; return whether any is."""
        arrived = self._memory.board.arrived(self._round, self._waiting)
        for tensor in arrived:
            self._waiting.remove(tensor)
            self._agree_on_step(tensor)
            if self._layers is not None and self._layers.unit_of.get(tensor) in self._captured:
                self._pass_on_layer(tensor, self._layers)
                continue
            self._slots.aggregate(tensor, self._round)
            self._between.ready(tensor)
        return bool(arrived)

    def skip_round(self, tensors: Collection[int]) -> None:
        super().skip_round(tensors)
        for channel in self._between.channels:
            channel.skip_round(tensors)

    # ---- layers in compact form; implements ``LayerChannel``

    def travel_compact(self, units: Collection[int]) -> None:
        super().travel_compact(units)
        assert self._links is not None
        self._links.travel_compact(units)

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
        """Send a layer that all workers of the host have captured."""
        unit = layers.unit_of[tensor]
        if tensor != layers.layer(unit).weight:
            return  # a layer is sent with its weight
        assert self._links is not None
        self._slots.open_layer(layers.units[unit].tensors, self._round)
        own = self._captured[unit]
        matrices = None if own is None else [matrix for matrix, _ in own]
        stacked = layers.stacked(unit, self._round, matrices, self._links, self._slots.share)
        for _, loan in own or ():
            loan.release()
        self._links.ready_layer(unit, stacked)

    # ---- rounds

    def flush(self) -> None:
        # After a checkpoint, rounds restart at 0; all workers of a job must count in the same way.
        self._member.round = max(self._member.round, self._round + 1, self.step + 1)
        self._flush_layers(self._captured)
        for tensor in self._unready_tensors():
            self._begin([tensor])
        self._await_host()
        self._agree_on_settings()
        self._between.flush()
        self._ready_tensors.clear()
        self._captured.clear()
        self._round += 1

    def _await_host(self) -> None:
        start = time.monotonic()
        while self._waiting:
            self._memory.wait(
                self._pass_on,
                self._member,
                of_results=False,
                what=f"this host's gradients of round {self._round}",
                limit_s=self._limit_s,
                missing=lambda: self._memory.behind(self._round, self._waiting),
            )
        self._waited_s += time.monotonic() - start

    @property
    def _others(self) -> range:
        return range(1, len(self._memory.ranks))

    def _agree_on_step(self, tensor: int) -> None:
        ranks, board = self._memory.ranks, self._memory.board
        ahead = [(board.step(worker, tensor) - self.step) % STEPS for worker in self._others]
        if any(ahead):
            steps = [a if a < STEPS // 2 else a - STEPS for a in (0, *ahead)]
            steps_by_rank = (
                f"rank {r} at step {self.step + s}" for r, s in zip(ranks, steps, strict=True)
            )
            raise different_steps(steps_by_rank)

    def _agree_on_settings(self) -> None:
        own, board = self._settings_number(), self._memory.board
        if any(board.noted(worker, self._round) != own for worker in self._others):
            raise different_settings()

    # ---- where hosts may miss rounds

    @property
    def told_round(self) -> int:
        """The open round of hosts, as far as this one knows."""
        return 0 if self._rounds is None else self._rounds.told_round

    def open_round(self) -> int:
        """Return the round that this host makes next; wait until it is known."""
        round_ = 0 if self._rounds is None else self._rounds.open_round()
        if self._round:
            self._publish_round(self._round - 1)
        return round_

    def _publish_round(self, last: int) -> None:
        """Publish to the host's other workers which round comes after this host's last one."""
        if self._rounds is not None and last > self._published_for:
            self._published_for = last
            self._memory.board.note(0, last, self._rounds.told_round)
            self._memory.board.publish(0, 0, last, True)

    # ---- results

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        wanted = self._tensors if tensors is None else list(tensors)
        if not wanted:
            return
        self._between.wait(wanted)
        for tensor in wanted:
            # For tensors without a result, this is the first notice that the host's workers get.
            self._slots.finish(tensor)

    def refresh(self) -> None:
        self._between.refresh()
