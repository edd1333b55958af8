"""What a training loop does between ``backward()`` and ``step()``, and when gradients leave.

A gradient that has left cannot be changed any more. So in the first steps gradients leave at
``step()``, and it is found out whether the loop touches them before: clips or unscales them, makes
several backward passes, or changes the optimizer's settings. Only a loop that touches nothing gets
overlap: its gradients leave during the backward pass from then on. If it touches them later, it is
told once, and its gradients leave at ``step()`` again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import RuntimeFault
from slipstream.torch.capture.synchronizer import Synchronizer

PROBED_STEPS = 3  # in which gradients leave at step()
LATE_PASS = "a second backward() came before step()", "the passes after the first do"
CHANGED = "changed between backward() and step()"


class LoopWatch:
    """Watches one worker's loop; each worker decides for itself when its gradients leave.

    Args:
        hooked: Whether hooks of the optimizer run before a step: these may change gradients, which
            then leave at ``step()`` for good.
        settings: The optimizer's settings, where these leave with the gradients.
        is_first: Whether this worker is the one that warns.

    Attributes:
        late_pass: Whether a backward pass of this step came when gradients had already left.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        hooked: Callable[[], bool] = lambda: False,
        settings: Callable[[], Any] = lambda: None,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        self._synchronizer, self._hooked = synchronizer, hooked
        self._settings, self._is_first = settings, is_first
        plan = synchronizer.plan
        # Layers in compact form have no gradient to touch before it has left.
        self._compact = any(unit.layer is not None for unit in plan.units)
        self._probes = plan.schedule.leaves_during_backward and not self._compact
        self.late_pass = False
        self._untouched = 0  # steps
        self._several = False  # backward passes
        # By tensor: its gradient, the version, and the sum: ``.grad.data`` has versions of its own.
        self._seen: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._settings_then: Any = None
        if self._probes:
            synchronizer.leave_at_step(self._accumulated)

    def _accumulated(self, tensor: int) -> None:
        """A backward pass has added to a gradient, which has not left."""
        if not self._probes or self._synchronizer.accumulating:
            return
        gradient = self._synchronizer.inventory.tensors[tensor].grad
        if not self._seen:
            self._settings_then = self._settings()
        self._several |= tensor in self._seen
        if gradient is not None:
            self._seen[tensor] = gradient, gradient._version, gradient.detach().sum()

    def note_late_pass(self) -> None:
        """A backward pass adds to gradients that have left.

        Raises:
            RuntimeFault: As ``examine``; at once, before a layer sends a second compact gradient.
        """
        self.late_pass = True
        if self._compact or self._synchronizer.leaves_at_step:
            self._stop_overlap(*LATE_PASS)

    def examine(self, settings_sent: Any = None) -> None:
        """The step is about to end: has the loop touched what leaves, or has left?

        Args:
            settings_sent: The settings that have left with the gradients; None: none have.

        Raises:
            RuntimeFault: Within ``job.backward_for``, where the loop has asked for overlap; or with
                layers in compact form, also if hooks run before a step.
        """
        if self._compact and self._hooked():
            raise RuntimeFault(
                "a step pre-hook of the optimizer sees this worker's gradients, but layers in "
                "compact form have none: remove the hook, or route all layers dense"
            )
        if self._synchronizer.driver.exchanged:
            changed = self._synchronizer.gradients.changed_since()
            if self.late_pass:
                self._stop_overlap(*LATE_PASS)
            elif settings_sent is not None and settings_sent != self._settings():
                self._stop_overlap(f"an optimizer setting was {CHANGED}", "the change does")
            elif changed:
                self._stop_overlap(f"gradients were {CHANGED}", "the change does")
        elif self._probes and self._seen:
            touched = self._hooked() or self._touched()
            self._untouched = 0 if touched else self._untouched + 1
            self._probes = 0 < self._untouched < PROBED_STEPS
            if self._untouched == PROBED_STEPS:
                self._synchronizer.leave_during_backward()
        self._several = self.late_pass = False
        self._seen.clear()

    def _touched(self) -> bool:
        tensors = self._synchronizer.inventory.tensors
        changed = (
            tensors[tensor].grad is not gradient
            or gradient._version != version
            or not torch.equal(gradient.detach().sum(), total)
            for tensor, (gradient, version, total) in self._seen.items()
        )
        return self._several or any(changed) or self._settings() != self._settings_then

    def _stop_overlap(self, event: str, lost: str) -> None:
        synchronizer = self._synchronizer
        if synchronizer.leaves_at_step:
            raise RuntimeFault(
                f"{event}, but within job.backward_for(...) gradients leave during backward(): "
                "leave job.backward_for out, or do it before that"
            )
        if self._compact:
            raise RuntimeFault(
                f"{event} (clipping, a GradScaler, accumulation?), but layers in compact form have "
                "no gradient that the loop could change: leave it out, put all passes but the last "
                "into `with job.accumulate():`, or route all layers dense"
            )
        synchronizer.leave_at_step()
        if self._is_first():
            warnings.warn(
                f"{event} for the first time in step {synchronizer.step}, when gradients had "
                f"already left: in this step {lost} not count. From the next step on gradients "
                "leave at step(), without overlap",
                stacklevel=6,
            )
