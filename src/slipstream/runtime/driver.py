"""Takes the channels of one plan through the steps of a training loop. Free of torch.

Training (``slipstream.torch``) and simulations (``slipstream.testing``) drive channels with this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from slipstream.runtime.exchange.channel import Channel


class LayerSource(Protocol):
    """Layers whose gradients may travel in compact form, which the framework captures."""

    def begin_step(self, step: int) -> None:
        """This step of the training loop begins now."""
        ...

    def flush(self) -> None:
        """Hand over what has not left yet; called before the channels are flushed."""
        ...


class Driver:
    """One exchange of everything a step.

    Attributes:
        step: Of the training loop; channels send it along, so that holders can tell when workers
            fall out of step.
        exchanged: Whether this step's contributions have all been made.
        frozen: Whether weights stay as they are between steps: nothing is taken unasked.
        layers: Captured layers, if the plan lets any travel in compact form.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = tuple(channels)
        self.step = 0
        self.exchanged = False
        self.frozen = False
        self.layers: LayerSource | None = None

    @property
    def wait_s(self) -> float:
        return sum(channel.wait_s for channel in self.channels)

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final."""
        for channel in self.channels:
            channel.ready(tensor)

    def flush(self) -> None:
        """Complete this worker's part of the round: what is not ready contributes what it has."""
        if self.layers is not None:
            self.layers.flush()
        for channel in self.channels:
            channel.flush()
        self.exchanged = True

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Until the next round may begin with these tensors (default all)."""
        wanted = None if tensors is None else list(tensors)
        for channel in self.channels:
            channel.wait(wanted)

    def refresh(self) -> None:
        """Between steps: take results that arrived without being waited for."""
        for channel in self.channels:
            channel.refresh()

    def resume(self, step: int) -> None:
        """The step that begins now."""
        self.step, self.exchanged = step, False
        if self.layers is not None:
            self.layers.begin_step(step)
        for channel in self.channels:
            channel.step = step
