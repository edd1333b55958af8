"""Drives the channels of one plan through the steps of a training loop; does not import torch.

Training (``slipstream.torch``) and simulations (``slipstream.testing``) both use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from slipstream.runtime.exchange.channel import Channel


class LayerSource(Protocol):
    """Layers whose gradients may be sent in compact form; the framework captures them."""

    def begin_step(self) -> None:
        """The next step of the training loop begins."""
        ...

    def flush(self) -> None:
        """Hand over what has not been sent; called before the channels are flushed."""
        ...

    def delivered(self) -> None:
        """All results that the next step needs are in their places."""
        ...


class Driver:
    """Exchanges all tensors once per step.

    Attributes:
        step: Of the training loop; channels send it too, so that holders detect workers that are
            in different steps.
        exchanged: Whether all contributions of this step have been made.
        frozen_in: The call in whose block the model has other weights, so that results are applied
            only when awaited; empty outside of one.
        layers: Captured layers, if the plan lets any be sent in compact form.
    """

    def __init__(self, channels: Sequence[Channel], layers: LayerSource | None = None) -> None:
        self.channels = tuple(channels)
        self.step = 0
        self.exchanged = False
        self.frozen_in = ""
        self.layers = layers
        self._after_flush: list[Callable[[], None]] = []

    def call_after_flush(self, call: Callable[[], None]) -> None:
        """Call back whenever all contributions of a round have been made."""
        self._after_flush.append(call)

    @property
    def wait_s(self) -> float:
        return sum(channel.wait_s for channel in self.channels)

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final."""
        for channel in self.channels:
            channel.ready(tensor)

    def flush(self) -> None:
        """Complete this worker's part of the round; a tensor that is not ready is sent as it is."""
        if self.layers is not None:
            self.layers.flush()
        for channel in self.channels:
            channel.flush()
        self.exchanged = True
        for call in self._after_flush:
            call()

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Wait until the next round may begin with these tensors (default all)."""
        wanted = None if tensors is None else list(tensors)
        for channel in self.channels:
            channel.wait(wanted)
        if self.layers is not None and wanted is None:
            self.layers.delivered()

    def refresh(self) -> None:
        """Between steps: apply results that arrived without being waited for."""
        for channel in self.channels:
            channel.refresh()

    def resume(self, step: int) -> None:
        """Set the number of the step that begins now."""
        self.step, self.exchanged = step, False
        if self.layers is not None:
            self.layers.begin_step()
        for channel in self.channels:
            channel.step = step
