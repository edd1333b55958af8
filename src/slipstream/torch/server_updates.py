"""Where servers update: gradients leave, new weights come back, the loop sees an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.errors import RuntimeFault
from slipstream.torch.loop_optimizer import LoopOptimizer
from slipstream.torch.shard_optimizer import settings_of
from slipstream.torch.synchronizer import Synchronizer
from slipstream.transports.wire import Settings


class ServerUpdates(Synchronizer):
    """Results are awaited layer by layer, before the next forward (see ``ForwardGate``).

    The learning rate and other settings travel with each gradient, so a change between
    ``backward()`` and ``step()`` comes too late; so does a change of the gradients. Both are
    refused rather than ignored.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._optimizer = optimizer
        self._sent: Settings | None = None
        self._refreshed_for = -1
        super().__init__(*args)
        self.resume(0)

    def resume(self, step: int) -> None:
        # What arrives is written without autograd's knowledge: a version that moves is the user's.
        self._weights = [
            (p, p._version) for group in self._optimizer.param_groups for p in group["params"]
        ]
        super().resume(step)

    def begin_forward(self) -> None:
        """Take what has come unasked; once a step, so that no layer changes under a pass."""
        if self._refreshed_for != self.step and self.takes_unasked:
            self._refreshed_for = self.step
            for exchange in self._exchanges:
                exchange.refresh()

    def settings(self) -> Settings:
        """The optimizer's settings, the same for all of a round."""
        if self._sent is None:
            self._sent = settings_of(self._optimizer)
        return self._sent

    def _gradient_ready(self, tensor: int) -> None:
        self._refuse_second_pass("update='server'")
        super()._gradient_ready(tensor)

    def pass_ended(self) -> None:
        if self.plan.schedule.leaves_during_backward:
            self.flush()
        self._note_left()

    def before_step(self) -> None:
        self.tap.end()
        self._check_all_exchanged(self._optimizer)
        if any(p._version != version for p, version in self._weights):
            raise RuntimeFault(
                "weights were changed outside of the optimizer, but with update='server' they live "
                "at the servers: use update='worker', or job.load for a checkpoint"
            )
        if self._changed_since():
            raise RuntimeFault(
                "gradients were changed between backward() and step() (clipping?), but with "
                "update='server' they are not the averaged ones: use update='worker' to see and "
                "change those"
            )
        if self.plan.clip_norm is not None:
            self._clear_refused()  # one that is not finite would make all others so
            trained = [p for p, _ in self._weights if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, self.plan.clip_norm)
        super().before_step()
        if self._sent is not None and settings_of(self._optimizer) != self._sent:
            raise RuntimeFault(
                "an optimizer setting was changed between backward() and step(), but with "
                "update='server' it travels with the gradients: change it before backward()"
            )
        self._sent = None
        self._left = []

    def end_step(self) -> None:
        self.before_step()
        self.after_step()


class RemoteOptimizer(LoopOptimizer):
    """Its ``step`` only marks the end of a step."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeFault(
            "with update='server' the optimizer's state lives at the servers: job.save keeps it"
        )
