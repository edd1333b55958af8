"""Few bits per value: which draws decide about stochastic rounding."""

import numpy as np

from slipstream.codecs import Quantized
from slipstream.types import EncodeContext, Values


def sent(seed: int, step: int) -> bytes:
    """One gradient in 4 bits, rounded as with this seed in this step."""
    codec = Quantized(4, block=64, rounding="stochastic", seed=seed)
    gradient = np.linspace(-1, 1, 512, dtype=np.float32)
    values = Values(gradient.view(np.uint8), "float32")
    (frame,) = codec.encode(values, codec.init(512, "float32"), EncodeContext(step))
    return bytes(memoryview(frame))


def test_stochastic_rounding_draws_anew_at_every_step_and_seed() -> None:
    """Runs with neighbouring seeds share no draws, so the mean of such runs has less noise."""
    frames = [sent(seed, step) for seed in range(5) for step in range(1, 6)]
    assert len(set(frames)) == len(frames)
    assert frames == [sent(seed, step) for seed in range(5) for step in range(1, 6)]
