"""Captures one worker's gradients from autograd, and drives the channels that exchange them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.exchange.channel import Channel
from slipstream.runtime.exchange.driver import Driver
from slipstream.runtime.exchange.engine import Applier
from slipstream.torch.capture.compact_gradients import CompactGradients
from slipstream.torch.capture.local_gradients import LocalGradients
from slipstream.torch.capture.tap import BackwardTap
from slipstream.torch.tensors.compact_layers import CompactLayer, Ports, capture
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.slots import LiveTensors
from slipstream.torch.tensors.swapped_weights import outside_of


class Synchronizer:
    """One exchange of all tensors per backward pass. An applier decides when to wait for results.

    Args:
        model: Its backward passes are captured.
        plan: The decisions for its tensors.
        inventory: Its tensors.
        slots: What they contribute, and where results go.
        channels: All channels of the plan.
        applier: Makes the applier of this synchronizer.
        compact: Captures layers that may be sent in compact form, if there are any.

    Attributes:
        leaves_at_step: Whether gradients are sent at ``step()``, and not during backward.
        accumulating: Whether the loop is within ``job.accumulate()``.
        ended: Steps that have ended here; those of a checkpoint do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        slots: LiveTensors,
        channels: Sequence[Channel],
        applier: Callable[[Synchronizer], Applier],
        compact: CompactGradients | None = None,
    ) -> None:
        self.model, self.plan, self.inventory, self.slots = model, plan, inventory, slots
        self.driver = Driver(channels, compact)
        self.gradients = LocalGradients(inventory, slots.finite, plan.update.clip_norm)
        self.leaves_at_step = self.accumulating = False
        self.ended = 0
        self._copying: list[int] = []
        self._at_step: list[Callable[[], None]] = []
        self._compact = compact
        # Autograd runs a thread for each device; a model may use several devices.
        self._lock = threading.Lock()
        self._devices = [tensor.device.type for tensor in inventory.tensors]
        self.tap = BackwardTap(
            model,
            [(i, inventory.tensors[i]) for i in inventory.parameters],
            on_ready=self.gradient_ready,
            on_end=lambda: self.applier.pass_ended(),
        )
        self.applier = applier(self)
        self._end_capture = None if compact is None else self._capture(compact)

    def _capture(self, compact: CompactGradients) -> Callable[[], None]:
        """Let layers hand over compact gradients instead of dense ones, where these are needed.

        Returns:
            A function that ends it.
        """

        def entered(layer: CompactLayer, x: Tensor) -> int | None:
            if self.tap.paused or self.driver.exchanged:
                return None  # other passes add to this one; or this step's exchange is over
            with self._lock:
                return compact.entered(layer, x)

        def takes(layer: CompactLayer) -> bool:
            with self._lock:
                return compact.takes(layer)

        def captured(layer: CompactLayer) -> None:
            if not self.tap.paused:
                self.tap.touch()
                with self._lock:
                    compact.captured(layer)

        def finished(layer: CompactLayer) -> None:
            with self._lock:
                if layer.finish():
                    layer.detach() if self.tap.paused else compact.finished(layer)

        ports = Ports(compact.may_take, entered, takes, captured, finished)
        return capture(compact.layers, ports)

    # ---- gradients become final (autograd's threads)

    def gradient_ready(self, tensor: int) -> None:
        """A parameter's gradient is complete: send it, if gradients are sent during backward."""
        if self.driver.exchanged and not self.applier.takes_pass():
            return
        self.gradients.refuse_converted(tensor)
        with self._lock:
            captured = self._compact is not None and self._compact.has(tensor)
            if captured or not self.plan.schedule.leaves_during_backward:
                return
            self.slots.fetch(tensor)
            if self._copying:
                self._hand_over(self._copying)
            # A copy from an accelerator has until the next layer's gradient is done.
            if self._devices[tensor] == "cpu":
                self.driver.ready(tensor)
            else:
                self._copying = [tensor]

    def _hand_over(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            self.driver.ready(tensor)
        self._copying = []

    # ---- steps (the training thread)

    @property
    def step(self) -> int:
        """Steps that have ended."""
        return self.driver.step

    def flush(self) -> None:
        """Complete this worker's part of the round."""
        if self.plan.update.inner.travels == "gradients":
            self.gradients.clip()
        self._hand_over(self._copying)
        self.driver.flush()
        self.slots.forget()

    def end_exchange(self) -> None:
        """Make sure that this step's gradients have been exchanged, even if there were none."""
        self.tap.end()
        if not self.driver.exchanged:
            for tensor in range(len(self._devices)) if self.leaves_at_step else ():
                self.gradients.refuse_converted(tensor)
            self.flush()

    @property
    def never_left(self) -> bool:
        """Whether there were gradients, and none of them was ever sent."""
        return self.tap.used and not self.ended and not self.driver.exchanged

    def end_step(self) -> None:
        """The next step begins."""
        self.ended += 1
        self.resume(self.step + 1)

    def resume(self, step: int) -> None:
        """This step begins now."""
        self.slots.finite.step = step
        self.driver.resume(step)
        for call in self._at_step:
            call()

    def call_at_step(self, call: Callable[[], None]) -> None:
        """Call back whenever a step begins: one has ended, or other weights were loaded."""
        self._at_step.append(call)

    def refuse_step_in_block(self) -> None:
        """Refuse a step while the model has other weights, before the step exchanges anything.

        Raises:
            RuntimeFault: It has.
        """
        if block := self.driver.frozen_in:
            raise outside_of("optimizer.step()", block)

    # ---- when gradients are sent

    @contextmanager
    def _paused(self, paused: bool) -> Iterator[None]:
        before, self.tap.paused = self.tap.paused, paused
        try:
            yield
        finally:
            self.tap.paused = before

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes within only accumulate gradients; nothing is exchanged."""
        before, self.accumulating = self.accumulating, True
        try:
            with self._paused(True):
                yield
        finally:
            self.accumulating = before

    def leaving_during_backward(self) -> AbstractContextManager[None]:
        """Within, gradients are sent as soon as they are ready."""
        return self._paused(False)

    def leave_at_step(self, on_gradient: Callable[[int], None] = lambda _: None) -> None:
        """From now on gradients are sent at ``step()``, and not during backward.

        With several pairs, a backward pass of one may run through the models of others. And a loop
        may change gradients between ``backward()`` and ``step()``.

        Args:
            on_gradient: Called when a backward pass has added to a tensor's gradient.
        """
        self.leaves_at_step = self.tap.paused = True

        def on_paused(tensor: int) -> None:
            self._refuse_addition()
            on_gradient(tensor)

        self.tap.note_paused(on_paused)

    def leave_during_backward(self) -> None:
        """From now on gradients are sent as soon as they are ready."""
        self.leaves_at_step = self.tap.paused = False
        self.tap.note_paused(lambda _: None)

    def _refuse_addition(self) -> None:
        if self.driver.exchanged:
            raise RuntimeFault(
                "a backward pass adds to gradients that left within job.backward_for(...) and were "
                "not used yet: call that optimizer's step() before the next backward(), or leave "
                "job.backward_for out"
            )

    def close(self) -> None:
        """Remove all hooks: the model and the optimizer are ordinary ones again."""
        self.tap.remove()
        if self._end_capture is not None:
            self._end_capture()
        for hook in self.applier.hooks:
            hook.remove()
