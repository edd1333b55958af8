from __future__ import annotations

import pytest
import torch

from slipstream.apps.bench.data import TensorExamples
from slipstream.apps.bench.data.framed import Framed
from slipstream.errors import ConfigError


def examples(*shape: int, dtype: torch.dtype = torch.float32) -> TensorExamples:
    return TensorExamples(torch.ones(5, *shape, dtype=dtype), torch.arange(5))


def test_grey_images_are_enlarged_coloured_and_framed() -> None:
    grey = examples(1, 4, 3, dtype=torch.uint8)
    grey.inputs[2, 0, 0, 0] = 255
    framed = Framed(grey, 11)
    images, targets = framed.take(torch.tensor([2, 4]))
    assert len(framed) == 5
    assert targets.tolist() == [2, 4]
    assert images.shape == (2, 3, 11, 11)
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    # Twice as large, 8 × 6: one line above and two below, two columns on the left, three right.
    assert torch.equal(images[0, 0, 1:3, 2:4], torch.full((2, 2), 2.0))
    assert images[1, 0, 1:9, 2:8].unique().tolist() == pytest.approx([4 / 255 - 2])
    assert (images[0, 0] > -2).sum() == 8 * 6


def test_colour_images_that_fill_the_frame_are_only_centred() -> None:
    colour = TensorExamples(torch.rand(5, 3, 7, 7), torch.arange(5))
    images, _ = Framed(colour, 7).take(torch.tensor([3]))
    assert torch.allclose(images, 4 * colour.inputs[3:4] - 2)


def test_what_cannot_be_framed_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 by 9 do not fit a frame of 8 by 8; shrink them"):
        Framed(examples(1, 4, 9), 8)
    with pytest.raises(ConfigError, match="images of 2 channels: give grey ones"):
        Framed(examples(2, 4, 4), 8)
