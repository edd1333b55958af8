"""Keeps one worker's model in step with the others: drives exchanges from autograd's hooks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import RuntimeFault
from slipstream.runtime.exchange import Exchange
from slipstream.strategy import Plan
from slipstream.torch.compact_exchange import CompactExchange
from slipstream.torch.compact_layers import CompactLayer, Ports, capture
from slipstream.torch.inventory import Inventory, unexpected_gradient
from slipstream.torch.slots import LiveTensors
from slipstream.torch.tap import BackwardTap


class Synchronizer(ABC):
    """One exchange of everything a backward pass; subclasses say when results are awaited."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        inventory: Inventory,
        slots: LiveTensors,
        exchanges: Sequence[Exchange],
    ) -> None:
        self.plan = plan
        self._inventory = inventory
        self._left: list[tuple[Tensor, Tensor | None, int]] = []
        self.step = 0
        self.exchanged = False
        self.takes_unasked = True
        self._slots = slots
        self._exchanges = tuple(exchanges)
        self._copying: list[int] = []
        self._handles: list[Any] = []
        self._end_capture: Callable[[], None] = lambda: None
        self._has_compact: Callable[[int], bool] = lambda _: False
        self._known = {id(tensor) for tensor in inventory.tensors}
        # Autograd runs a thread for each device; a model may be spread over several.
        self._lock = threading.Lock()
        self._devices = [tensor.device.type for tensor in inventory.tensors]
        self._dtypes = [tensor.dtype for tensor in inventory.tensors]
        parameters = [
            (i, tensor)
            for i, (spec, tensor) in enumerate(zip(inventory.specs, inventory.tensors, strict=True))
            if spec.role == "parameter"
        ]
        self.tap = BackwardTap(
            model, parameters, on_ready=self._gradient_ready, on_end=self.pass_ended
        )

    def capture_compact(self, exchange: CompactExchange) -> None:
        """Let layers hand over compact gradients instead of dense ones, where these are wanted."""

        def entered(layer: CompactLayer, x: Tensor) -> int | None:
            if self.tap.paused or self.exchanged:
                return None  # other passes add to this one; or this step's exchange is over
            with self._lock:
                return exchange.entered(layer, x)

        def takes(layer: CompactLayer) -> bool:
            with self._lock:
                return exchange.takes(layer)

        def captured(layer: CompactLayer) -> None:
            if not self.tap.paused:
                self.tap.touch()
                with self._lock:
                    exchange.captured(layer)

        def settled(layer: CompactLayer) -> None:
            with self._lock:
                if layer.settle():
                    layer.own() if self.tap.paused else exchange.settled(layer)

        self._has_compact = exchange.has
        self._end_capture = capture(exchange.layers, Ports(entered, takes, captured, settled))

    @property
    def wait_s(self) -> float:
        return sum(exchange.wait_s for exchange in self._exchanges)

    def _gradient_ready(self, tensor: int) -> None:
        self._refuse_converted(tensor)
        with self._lock:
            if self._has_compact(tensor) or not self.plan.schedule.leaves_during_backward:
                return
            self._slots.fetch(tensor)
            self._hand_over(self._copying)
            # A copy from an accelerator is given until the next layer's gradient is done.
            if self._devices[tensor] == "cpu":
                self._hand_over([tensor])
            else:
                self._copying = [tensor]

    def _refuse_converted(self, tensor: int) -> None:
        before, now = self._dtypes[tensor], self._inventory.tensors[tensor].dtype
        if now != before:
            raise RuntimeFault(
                f"{self._inventory.specs[tensor].name!r} is {now} now, but was {before} at "
                "job.distribute: convert the model (model.double(), model.to(...)) before that"
            )

    def _refuse_second_pass(self, how: str) -> None:
        if self.exchanged:
            raise RuntimeFault(
                f"a second backward() before step(), but with {how} the first one's gradients have "
                "already left: put all passes but the last into `with job.accumulate():`, or use "
                "overlap=False"
            )

    def _hand_over(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            for exchange in self._exchanges:
                exchange.ready(tensor)
        self._copying = []

    def _note_left(self) -> None:
        """These gradients have left: whoever changes them now would change nothing."""
        parameters = [t for t in self._inventory.tensors if isinstance(t, nn.Parameter)]
        self._left = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]

    def _changed_since(self) -> bool:
        return any(
            p.grad is not gradient or (gradient is not None and gradient._version != version)
            for p, gradient, version in self._left
        )

    @abstractmethod
    def pass_ended(self) -> None:
        """A backward pass outside ``accumulate`` is over."""

    def flush(self) -> None:
        """Complete this worker's part of the round."""
        self._hand_over(self._copying)
        for exchange in self._exchanges:
            exchange.flush()
        self._slots.forget()
        self.exchanged = True

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        for exchange in self._exchanges:
            exchange.wait(tensors)

    def before_step(self) -> None:
        """Make sure that this step's gradients have been exchanged, even if none came."""
        self.tap.end()
        if not self.exchanged:
            self.flush()

    def after_step(self) -> None:
        self.resume(self.step + 1)

    def resume(self, step: int) -> None:
        """The step that begins now."""
        self.step = step
        self.exchanged = False
        self._slots.finite.step = step
        for exchange in self._exchanges:
            exchange.step = step

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes within only add to the gradients; nothing is exchanged."""
        before, self.tap.paused = self.tap.paused, True
        try:
            yield
        finally:
            self.tap.paused = before

    def close(self) -> None:
        """Let go of the model and the optimizer: they are ordinary ones again."""
        self.tap.remove()
        self._end_capture()
        for handle in self._handles:
            handle.remove()

    def _clear_refused(self) -> None:
        """Where gradients are used before they leave: those that do not count are None then."""
        named = zip(self._inventory.specs, self._inventory.tensors, strict=True)
        trained = ((spec.name, tensor) for spec, tensor in named if spec.role == "parameter")
        self._slots.finite.clear_refused(trained)

    def _check_all_exchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """A parameter that trains but was not there at the start would drift apart unseen."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._known:
                    raise unexpected_gradient(parameter)


class WorkerUpdates(Synchronizer):
    """The mean gradient is in ``.grad`` when backward() returns; the user's optimizer runs here."""

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super().__init__(*args)
        self._handles += [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    def pass_ended(self) -> None:
        self.flush()
        self.wait()

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            return  # it runs backward itself, within the step
        self._check_all_exchanged(optimizer)
        self.before_step()
        self.wait()
