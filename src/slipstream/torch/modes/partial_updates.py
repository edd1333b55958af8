"""Partial exchange: a worker applies its own update at once, and accumulates it for its peers."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.runtime.exchange.engine import Hook
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.written_weights import WrittenWarning


class PartialUpdates:
    """Sends the changes that the user's optimizer makes to the weights; implements ``Applier``.

    Any optimizer works: its momentum and other state see this worker's gradients only.

    Args:
        loop: The optimizer that the training loop uses; its ``step`` ends a step here.
        averages: Follow each update of the weights.
        written: Warns of weights that the loop has written itself.
    """

    hooks: Sequence[Hook] = ()

    def __init__(
        self,
        synchronizer: Synchronizer,
        loop: LoopOptimizer,
        channel: GossipChannel,
        averages: Averages,
        written: WrittenWarning,
    ) -> None:
        self._synchronizer, self._optimizer = synchronizer, loop.local
        self._step = loop.step_local
        self._channel, self._averages = channel, averages
        self._written = written
        loop.end_step = self.end_step

    def takes_pass(self) -> bool:
        """Nothing is sent before the step, so passes add up."""
        return True

    def pass_ended(self) -> None:
        """Nothing to do: nothing is sent before the step."""

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Nothing to do: weights are complete only after ``job.flush``."""

    def begin_step(self) -> None:
        """Nothing to do: no state is kept from step to step."""

    def warn_of_written(self) -> None:
        """Warn if it was noticed since the last step that the loop has written weights."""
        self._written.give(self._synchronizer.step)

    def end_step(self) -> None:
        """Step, accumulate the update for the peers, and wait for peers that are far behind."""
        synchronizer, channel = self._synchronizer, self._channel
        synchronizer.tap.end()
        synchronizer.gradients.refuse_unknown(self._optimizer)
        synchronizer.gradients.clear_refused()
        synchronizer.gradients.clip()
        channel.admit_joiners()
        coefficient = channel.rule.coefficient(synchronizer.step, channel.workers)
        self._averages.before_update()
        channel.give(channel.weights.stepped(self._step, coefficient))
        self._averages.follow()
        self.warn_of_written()
        channel.wait()
        synchronizer.end_step()
