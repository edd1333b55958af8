"""The worker that speaks for its host: sums what the host's workers contribute, exchanges the sum
with other hosts, and hands the result on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from slipstream.errors import RuntimeFault
from slipstream.runtime.driver import Driver
from slipstream.runtime.exchange.channel import Channel, Slots
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.types import Values


class HostSlots:
    """The host's tensors, as the channels between hosts see them; implements ``Slots``.

    Args:
        own: This worker's own tensors.
        share: See ``HostMemory.aggregate``.
    """

    def __init__(self, memory: HostMemory, own: Slots, share: float) -> None:
        self.memory, self._own, self._share = memory, own, share
        self._filled: set[int] = set()  # tensors of which the host's place holds something
        self._weights: dict[int, int] = {}  # by tensor: the workers that contributed to it
        self._unfinished: dict[int, int] = {}  # by tensor that has left: its round

    def aggregate(self, tensor: int, round_: int) -> None:
        """All workers of the host have contributed."""
        self._filled.discard(tensor)
        self._unfinished[tensor] = round_
        own = self._own.source(tensor)
        self._weights[tensor] = self.memory.aggregate(tensor, round_, own, self._share)
        if self._weights[tensor]:
            self._filled.add(tensor)

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
        if present:
            self._own.sink(tensor).data[:] = self.memory.place(0, tensor).data
            self._own.finish(tensor)


class HostLeader:
    """All tensors of a plan, at the worker that speaks for its host; implements ``Channel``.

    A tensor leaves when it is ready on all workers of the host. That is looked at whenever one
    becomes ready here, and waited for when the round is complete here.

    Args:
        slots: The host's tensors; ``between`` exchanges them.
        between: The channels to other hosts.
    """

    def __init__(
        self, slots: HostSlots, between: Sequence[Channel], member: Endpoint, limit_s: float
    ) -> None:
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
        self._fired.add(tensor)
        self._waiting.append(tensor)
        self._pass_on()

    def _pass_on(self) -> bool:
        """Let tensors leave that are ready on all workers of the host; whether any was."""
        arrived = self._memory.board.arrived(self._round, self._waiting)
        for tensor in arrived:
            self._waiting.remove(tensor)
            self._slots.aggregate(tensor, self._round)
            self._between.ready(tensor)
        return bool(arrived)

    def skip_round(self, tensors: Collection[int]) -> None:
        if tensors:
            raise RuntimeFault("tensors of a host cannot travel another way for a round")

    def flush(self) -> None:
        self._member.round = max(self._member.round, self._round + 1)
        for tensor in self._tensors:
            if tensor not in self._fired:
                self._fired.add(tensor)
                self._waiting.append(tensor)
        self._await_host()
        self._agree_on_step()
        self._between.flush()
        self._fired.clear()
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
        self._between.wait(wanted)
        for tensor in wanted:
            # Of those that have no result, this is the first that the host's workers hear.
            self._slots.finish(tensor)

    def refresh(self) -> None:
        self._between.refresh()
