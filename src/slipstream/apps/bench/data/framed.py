"""Small images for nets that were made for colour photographs."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from slipstream.apps.bench.data.examples import Batch, TensorExamples
from slipstream.errors import ConfigError

CHANNELS = 3
MIDDLE, SPREAD = 0.5, 0.25


@dataclass(frozen=True, slots=True)
class Framed:
    """Images of three channels, ``side`` × ``side``, made from smaller ones when they are taken.

    Grey becomes colour; an image is enlarged by the largest integer that fits, and padded with
    black. Numbers from 0 to 1 become −2 to 2: a deep net whose inputs are all positive learns
    nothing for a long time. Converted in advance, a set of bytes would need many times its
    memory.
    """

    images: TensorExamples
    side: int

    def __post_init__(self) -> None:
        channels, height, width = self.images.inputs.shape[1:]
        if channels not in (1, CHANNELS):
            raise ConfigError(f"images of {channels} channels: give grey ones or ones of 3 colours")
        if max(height, width) > self.side:
            raise ConfigError(
                f"images of {height} by {width} do not fit a frame of {self.side} by {self.side}; "
                "shrink them first"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Tensor) -> Batch:
        inputs, targets = self.images.take(indices)
        times = self.side // max(inputs.shape[2:])
        enlarged = F.interpolate(inputs, scale_factor=times) if times > 1 else inputs
        framed = F.pad(enlarged, self._margins(*enlarged.shape[2:]))
        return framed.sub_(MIDDLE).div_(SPREAD).expand(-1, CHANNELS, -1, -1).contiguous(), targets

    def _margins(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the margins left, right, above and below."""
        left, above = (self.side - width) // 2, (self.side - height) // 2
        return left, self.side - width - left, above, self.side - height - above
