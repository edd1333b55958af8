"""One learner: the model on shared weights, and its slots."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream._native import Rings
from slipstream.errors import JobEnded, WaitLimit
from slipstream.methods import SharedMemoryUpdates
from slipstream.planning.segment import SegmentPlan
from slipstream.runtime.shared_memory.optimizer import SharedOptimizer
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer
from slipstream.torch.capture.replaced_weights import FirstWeights, warn_of_replaced
from slipstream.torch.modes.carried_updates import CarriedUpdates, pin
from slipstream.torch.modes.learner_slots import FirstGradient, Slot, SlotWriter, slots_of
from slipstream.torch.modes.shared_weights import SharedWeights, settings_of
from slipstream.torch.modes.slot_updates import SlotUpdates
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.staging import CopyEngine, engine_for_device
from slipstream.transports.shared_memory import SharedMemory

TICK_S = 0.2  # how often a wait in native code lets Python handle signals


class Learner:
    """Binds the model, fills slots, and waits where it must.

    Args:
        share: Returns the value of the first learner that has called it.

    Attributes:
        own: The optimizer of a learner that updates by itself; else the server has it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        about: SharedMemoryUpdates,
        rank: int,
        memory: SharedMemory,
        plan: SegmentPlan,
        limit_s: float,
        finite: FiniteGradients,
        share: Callable[[Any], Any],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._about, self._direct = about, about.apply == "direct"
        self.rank, self._memory, self._plan, self._limit_s = rank, memory, plan, limit_s
        self._finite, self._share = finite, share
        self.rings = Rings(memory.memory)
        self.weights = SharedWeights(model, plan, memory, self.rings.weights_at)
        self.ages: Counter[int] = Counter()
        self.wait_s = 0.0
        self.moved = 0
        self.updates: SlotUpdates | CarriedUpdates | None = None
        self.own: SharedOptimizer | None = None
        self._first: FirstGradient | None = None
        self._opened = self._closed = False

    @property
    def steps(self) -> int:
        """Steps of this learner."""
        return 0 if self.updates is None else self.updates.steps

    @property
    def _has_trained(self) -> bool:
        """Whether any learner has pushed a gradient in this job."""
        return any(map(self.rings.pushed, range(self.rings.learners)))

    def progress(self) -> int:
        """Changes while other learners train."""
        return self.rings.version

    @property
    def had_gradients(self) -> bool:
        """Whether any backward pass has given a trained parameter a gradient."""
        # Backward opens a slot for large layers itself, and torch calls no hook for them.
        return self._opened or (self._first is not None and self._first.seen)

    @property
    def in_rows(self) -> set[str]:
        """The names of parameters of which only used rows are written into slots."""
        plan, known = self._plan, dict(self._model.named_parameters())
        names = {plan.tensors[each.tensor].name for each in plan.gradients if each.width}
        if not isinstance(self.updates, CarriedUpdates):
            return names
        # Copies of the weights: torch's own gradient is copied, sparse or not.
        sparse = {id(m.weight) for m in self._model.modules() if getattr(m, "sparse", False)}
        return {name for name in names if id(known[name]) in sparse}

    def start(self) -> RemoteOptimizer:
        """Hook into the model; returns the optimizer for the loop."""
        self.rings.release_dead(self.rank)  # locks and slots of an earlier incarnation
        deliver = self._publish
        if self._direct:
            self.own = SharedOptimizer(
                self._plan, type(self._optimizer).__name__, settings_of(self._optimizer)
            )
            self._all = self._memory.view(self.rings.weights_at, self._plan.weights_nbytes)
            deliver = self._apply
        slots = SlotWriter(
            self._model,
            self._optimizer,
            self._plan,
            slots_of(self._memory, self.rings, self._plan, self.rank),
            reserve=self._reserve,
            deliver=deliver,
            version=lambda: self.rings.version,
            finite=self._finite,
        )
        first = FirstWeights(lambda: self._has_trained, self._share)
        if self._about.consistent or not self.weights.on_host:
            copies = self._copy_engine()
            self.updates = CarriedUpdates(slots, self.weights, copies, self._reading, first)
        else:
            self.weights.bind()
            self.updates = SlotUpdates(self._model, self._plan, slots, self.weights, first)
        self._first = FirstGradient(slots.parameters)
        named = zip(slots.names, slots.parameters, strict=True)
        loop = RemoteOptimizer(
            self._optimizer, {name: p for name, p in named if isinstance(p, nn.Parameter)}
        )
        end_step = self.updates.end_step

        def end() -> None:
            end_step()
            loop.forget_state()
            if loop.has_post_hooks:
                self.wait()

        loop.attach(end)
        return loop

    def _copy_engine(self) -> CopyEngine:
        if not self.weights.on_host:
            pin(torch.frombuffer(self._memory.memory, dtype=torch.uint8))
        return engine_for_device(next(self._model.parameters()).device)

    # ---- slots

    def _reserve(self) -> int:
        if self._closed:
            raise JobEnded
        self._opened = True
        begun = time.monotonic()
        while (slot := self.rings.reserve(self.rank, TICK_S)) is None:
            if time.monotonic() - begun > self._limit_s:
                raise WaitLimit("the server to empty a slot", self._limit_s, ["server"])
        self.wait_s += time.monotonic() - begun
        return slot

    def _publish(self, slot: Slot) -> None:
        self.moved += slot.filled_nbytes
        self.rings.publish(self.rank)

    def _apply(self, slot: Slot) -> None:
        """Apply a slot as the server would, with this learner's own optimizer state."""
        self.moved += slot.filled_nbytes
        assert self.own is not None
        with self._writing():
            self.own.apply(self._all, slot.whole)
        before = self.rings.advance() - 1
        self.ages[max(0, before - slot.version)] += 1
        # One more step of this learner; its slot is free again.
        self.rings.publish(self.rank)
        self.rings.release(self.rank)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Within, only this learner uses the weights, if they must be consistent."""
        consistent = self._about.consistent
        if consistent and not self.rings.begin_writing(self.rank, self._limit_s):
            raise WaitLimit("learners to release the weights", self._limit_s, ["learners"])
        try:
            yield
        finally:
            if consistent:
                self.rings.end_writing()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within, the weights do not change, if they must be consistent."""
        consistent = self._about.consistent
        if consistent and not self.rings.begin_reading(self.rank, self._limit_s):
            raise WaitLimit("the lock of the weights", self._limit_s, ["server"])
        try:
            yield
        finally:
            if consistent:
                self.rings.end_reading(self.rank)

    def wait(self) -> None:
        """Wait until all gradients of this learner are applied; it then has the current weights.

        Raises:
            WaitLimit: The server has not applied them in time.
        """
        assert self.updates is not None
        self.updates.finish()
        begun = time.monotonic()
        while self.rings.taken(self.rank) < self.rings.pushed(self.rank):
            if time.monotonic() - begun > self._limit_s:
                raise WaitLimit("the server to apply gradients", self._limit_s, ["server"])
            time.sleep(0.0005)
        self.updates.finish()

    def begin_anew(self) -> None:
        """The shared weights and all state that belongs to them have been replaced."""
        assert self.updates is not None
        self.updates.begin_anew()

    def take_last(self) -> None:
        """No learner trains any more: take the weights that all have in the end."""
        assert self.updates is not None
        if self.steps and (replaced := self.updates.replaced()):
            warn_of_replaced(replaced[0])
        self.begin_anew()

    def close(self) -> None:
        self._closed = True
        if self.updates is not None:
            self.updates.close()
        self.weights.unbind()
        self._memory.close()
