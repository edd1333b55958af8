"""Where servers update: gradients are sent, new weights come back, the loop sees an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slipstream.errors import RuntimeFault
from slipstream.torch.forward_gate import ForwardGate
from slipstream.torch.loop_optimizer import LoopOptimizer
from slipstream.torch.shard_optimizer import settings_of
from slipstream.torch.synchronizer import Synchronizer
from slipstream.transports.wire import Settings


class SettingsSender(Protocol):
    """What takes an optimizer's settings to the servers, with each gradient."""

    settings: Callable[[], Settings | None]


class ServerUpdates:
    """Waits for results layer by layer, before the next forward; implements ``Applier``.

    The learning rate and other settings are sent with each gradient, so a change between
    ``backward()`` and ``step()`` comes too late; so does a change of the gradients. Both are
    refused, not ignored.

    Args:
        loop: The optimizer that the training loop uses; its ``step`` ends a step here.
        sender: The channel that sends the settings.
    """

    single_pass = "updates at servers"

    def __init__(
        self, synchronizer: Synchronizer, loop: LoopOptimizer, sender: SettingsSender
    ) -> None:
        self._synchronizer, self._optimizer = synchronizer, loop
        loop.end_step, sender.settings = self.end_step, self.settings
        self._sent: Settings | None = None
        self._refreshed_for = -1
        places = {id(tensor): i for i, tensor in enumerate(synchronizer.inventory.tensors)}
        self.hooks = [ForwardGate(synchronizer.model, places, self.wait, self._begin_forward)]
        self.begin_step()

    def settings(self) -> Settings:
        """The optimizer's settings, the same for all of a round."""
        if self._sent is None:
            self._sent = settings_of(self._optimizer)
        return self._sent

    def begin_step(self) -> None:
        # Arrived weights are written without autograd's knowledge: a changed version is the user's
        # write.
        self._weights = [
            (p, p._version) for group in self._optimizer.param_groups for p in group["params"]
        ]

    def _begin_forward(self) -> None:
        """Apply weights that have arrived; once per step, so that no layer changes during a
        pass."""
        driver = self._synchronizer.driver
        if self._refreshed_for != driver.step and not driver.frozen:
            self._refreshed_for = driver.step
            driver.refresh()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        self._synchronizer.driver.wait(tensors)

    def pass_ended(self) -> None:
        if self._synchronizer.plan.schedule.leaves_during_backward:
            self._synchronizer.flush()
        self._synchronizer.gradients.note_left()

    def end_step(self) -> None:
        """Send what has not been sent yet; new weights are awaited before they are used.

        Raises:
            RuntimeFault: Weights, gradients or settings were changed too late.
        """
        synchronizer = self._synchronizer
        synchronizer.tap.end()
        synchronizer.gradients.refuse_unknown(self._optimizer)
        if any(p._version != version for p, version in self._weights):
            raise RuntimeFault(
                "weights were changed outside of the optimizer, but they live at the servers: use "
                "push_pull(), in which workers update, or job.load for a checkpoint"
            )
        if synchronizer.gradients.changed_since():
            raise RuntimeFault(
                "gradients were changed between backward() and step() (clipping?), but where "
                "servers update they are not the averaged ones: use push_pull(), in which workers "
                "update, to see and change those"
            )
        synchronizer.end_exchange()
        if self._sent is not None and settings_of(self._optimizer) != self._sent:
            raise RuntimeFault(
                "an optimizer setting was changed between backward() and step(), but where servers "
                "update it is sent with the gradients: change it before backward()"
            )
        self._sent = None
        synchronizer.end_step()


class RemoteOptimizer(LoopOptimizer):
    """Its ``step`` only marks the end of a step."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeFault(
            "where servers update, they have the optimizer's state: job.save keeps it"
        )
