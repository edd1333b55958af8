"""The mean of vectors, and how far apart they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runtime.consensus import Consensus, Differences
from slipstream.runtime.member import Member
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Opinion, checksum


@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0, 10))
def test_mean_and_spread_are_what_numpy_says(count: int, seed: int, apart: float) -> None:
    numbers = np.random.default_rng(seed)
    vectors = numbers.normal(3, 1, 40) + apart * numbers.normal(0, 1, (count, 40))
    vectors = vectors.astype(np.float32)
    told = Differences(40)
    for start, stop in ((0, 15), (15, 40)):
        for which in numbers.permutation(count):
            told.add(start, vectors[which, start:stop])
    mean, spread = told.mean(count)
    exact = vectors.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(mean, exact, rtol=1e-5, atol=1e-6)
    distances = ((vectors - exact) ** 2).sum(axis=1)
    assert spread == pytest.approx(np.sqrt(distances.mean()) / np.linalg.norm(exact), rel=1e-4)


def test_equal_vectors_are_not_apart_at_all() -> None:
    vector = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32)
    told = Differences(1000)
    for _ in range(7):
        told.add(0, vector)
    mean, spread = told.mean(7)
    np.testing.assert_array_equal(mean, vector)
    assert spread == 0


ONES = np.ones(4, np.float32).tobytes()


@pytest.mark.parametrize(
    ("sender", "body", "frames", "word"),
    [
        ("rank 7", Opinion(0, 0.0, checksum([ONES])), [ONES], "weights from rank 7"),
        ("rank 1", Opinion(4, 0.0, checksum([ONES])), [ONES], "not the next"),
        ("rank 1", Opinion(0, 0.0, checksum([ONES * 4])), [ONES * 4], "not the next"),
        ("rank 1", Opinion(0, 0.0, checksum([ONES, ONES])), [ONES, ONES], "2 frames"),
        ("rank 1", Opinion(0, 0.0, 7), [ONES], "checksum"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    sender: str, body: Opinion, frames: list[bytes], word: str
) -> None:
    network = MemoryNetwork()
    member = Member("rank 0", network.endpoint("rank 0"), clock=lambda: 0.0)
    Consensus(0, 3, member, numel=10, limit_s=0.0)
    stranger = network.endpoint(sender)
    stranger.connect("rank 0", member.transport.address)
    stranger.send("rank 0", body, frames)
    member.pump_once(0.0)
    assert word in member.last_refusal
