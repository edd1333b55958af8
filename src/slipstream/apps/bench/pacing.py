"""A real net that takes as long as on a given device, however few cores it shares.

Every layer with parameters gets an equal share of the step, a third of it forward. In the forward
pass, a layer ends no earlier than its share after its start, so that waits for others are not
caught up. In the backward pass, nothing waits for others, and layers end by one clock that starts
with the first. So gradients become ready throughout the backward pass, as on the device.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

SPIN_S = 0.0002


class Pace:
    """Hooks in a model; create it after slipstream's hooks, or waits count as computation."""

    def __init__(self, model: nn.Module, step_s: float) -> None:
        layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        self._forward_s = step_s / 3 / max(1, len(layers))
        self._backward_s = step_s * 2 / 3 / max(1, len(layers))
        self._entered: dict[nn.Module, float] = {}
        self._due: float | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)

    def begin_step(self) -> None:
        self._due = None

    def _enter(self, layer: nn.Module, _inputs: Any) -> None:
        self._entered[layer] = time.perf_counter()

    def _leave(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        sleep_until(self._entered[layer] + self._forward_s)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, _gradient: Tensor) -> None:
        now = time.perf_counter()
        self._due = (now if self._due is None else self._due) + self._backward_s
        sleep_until(self._due)


def sleep_until(moment: float) -> None:
    """Sleep, but end early, since a sleep ends late; spend the rest in a busy loop."""
    remaining = moment - time.perf_counter() - SPIN_S
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < moment:
        pass
