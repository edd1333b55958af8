"""One learner's part: the model on shared weights, and its slots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream._native import Rings
from slipstream.errors import WaitLimit
from slipstream.planning.one_machine import OneMachine
from slipstream.planning.segment import SegmentPlan
from slipstream.runtime.shared_optimizer import SharedOptimizer
from slipstream.torch.carried_updates import CarriedUpdates, CudaWay, HostWay, Way, pin
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.loop_optimizer import LoopOptimizer
from slipstream.torch.shared_weights import SharedWeights, settings_of
from slipstream.torch.slot_updates import Slot, SlotUpdates, slots_of
from slipstream.transports.shared_memory import SharedMemory

LOOK_S = 0.2  # how often a wait in native code lets Python look at signals


class Learner:
    """Binds the model, fills slots, and waits where it must."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        about: OneMachine,
        rank: int,
        memory: SharedMemory,
        plan: SegmentPlan,
        limit_s: float,
        finite: FiniteGradients,
    ) -> None:
        self._model, self._optimizer, self._about = model, optimizer, about
        self._rank, self._memory, self._plan, self._limit_s = rank, memory, plan, limit_s
        self._finite = finite
        self.rings = Rings(memory.memory)
        self.weights = SharedWeights(model, plan, memory, self.rings.weights_at)
        self.ages: Counter[int] = Counter()
        self.wait_s = 0.0
        self.moved = 0
        self.updates: SlotUpdates | CarriedUpdates | None = None

    def start(self) -> torch.optim.Optimizer:
        """Hook into the model; the loop uses what is returned."""
        self.rings.bury(self._rank)  # what an earlier life may have held
        deliver = self._publish
        if self._about.apply == "direct":
            self._own = SharedOptimizer(
                self._plan, type(self._optimizer).__name__, settings_of(self._optimizer)
            )
            self._all = self._memory.view(self.rings.weights_at, self._plan.weights_nbytes)
            deliver = self._apply
        ways: dict[str, Any] = {
            "reserve": self._reserve,
            "deliver": deliver,
            "version": lambda: self.rings.version,
            "finite": self._finite,
        }
        slots = slots_of(self._memory, self.rings, self._plan, self._rank)
        parts = (self._model, self._optimizer, self._plan, slots)
        if self._about.consistent or not self.weights.on_host:
            way = self._way()
            self.updates = CarriedUpdates(*parts, self.weights, way, holding=self._reading, **ways)
        else:
            self.weights.bind()
            share_buffers = self.weights.copy_out_buffers
            self.updates = SlotUpdates(*parts, share_buffers=share_buffers, **ways)
        loop = LoopOptimizer(self._optimizer)
        loop.synchronizer = self.updates
        return loop

    def _way(self) -> Way:
        if self.weights.on_host:
            return HostWay()
        pin(torch.frombuffer(self._memory.memory, dtype=torch.uint8))
        return CudaWay(next(self._model.parameters()).device)

    # ---- slots

    def _reserve(self) -> int:
        begun = time.monotonic()
        while (slot := self.rings.reserve(self._rank, LOOK_S)) is None:
            if time.monotonic() - begun > self._limit_s:
                raise WaitLimit("the server to empty a slot", self._limit_s, ["server"])
        self.wait_s += time.monotonic() - begun
        return slot

    def _publish(self, slot: Slot) -> None:
        self.moved += slot.filled_nbytes
        self.rings.publish(self._rank)

    def _apply(self, slot: Slot) -> None:
        """What the server would do; this learner's optimizer remembers its own gradients."""
        self.moved += slot.filled_nbytes
        with self._writing():
            self._own.apply(self._all, slot.whole)
        before = self.rings.advance() - 1
        self.ages[max(0, before - slot.version)] += 1
        # One more step of this learner's, and its slot is free again.
        self.rings.publish(self._rank)
        self.rings.release(self._rank)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if not self._about.consistent:
            yield
            return
        if not self.rings.begin_writing(self._rank, self._limit_s):
            raise WaitLimit("the others to let go of the weights", self._limit_s, ["learners"])
        try:
            yield
        finally:
            self.rings.end_writing()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if not self._about.consistent:
            yield
            return
        if not self.rings.begin_reading(self._rank, self._limit_s):
            raise WaitLimit("whoever changes the weights", self._limit_s, ["server"])
        try:
            yield
        finally:
            self.rings.end_reading(self._rank)

    def wait(self) -> None:
        """Until all gradients of this learner are applied; then it has the weights of now."""
        assert self.updates is not None
        self.updates.settle()
        begun = time.monotonic()
        while self.rings.taken(self._rank) < self.rings.pushed(self._rank):
            if time.monotonic() - begun > self._limit_s:
                raise WaitLimit("the server to apply gradients", self._limit_s, ["server"])
            time.sleep(0.0005)
        self.updates.settle()

    def begin_anew(self) -> None:
        """The shared weights have been replaced, and all that is beside them."""
        assert self.updates is not None
        if isinstance(self.updates, SlotUpdates):
            self.weights.copy_in_unbound()
        self.updates.begin_anew()

    def close(self) -> None:
        if self.updates is not None:
            self.updates.close()
        self.weights.unbind()
        self._memory.close()
