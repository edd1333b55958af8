"""Low rank: nothing is lost, all ends have the same basis, and bad input is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import LowRank, Residual
from slipstream.codecs.low_rank import HEADER, Bases, Projection, matrix_shape
from slipstream.errors import ConfigError, FrameRefused, RuntimeFault
from slipstream.types import Spec, Values

Array = np.ndarray[Any, Any]


def flat(matrix: Array) -> Values:
    return Values(np.ascontiguousarray(matrix, np.float32).reshape(-1).view(np.uint8), "float32")


def decoded(codec: Projection, frame: Any, shape: tuple[int, ...]) -> Array:
    out = Values.empty(int(np.prod(shape)), "float32")
    codec.decode_into([bytes(memoryview(frame))], out)
    return out.data.view(np.float32).reshape(shape).copy()


class Cluster:
    """Workers with residuals and bases of their own, and a holder with its own bases."""

    def __init__(self, codec: LowRank, shape: tuple[int, ...], workers: int, ahead: int = 1):
        self.shape = shape
        self.residuals = [codec.init(int(np.prod(shape)), "float32") for _ in range(workers)]
        self.bases = [codec.agree(shape, ahead=ahead) for _ in range(workers)]
        self.holder: Bases = codec.agree(shape, ahead=ahead)

    def round(self, number: int, gradients: list[Array]) -> Array:
        """The result, which all workers must have to the last bit."""
        frames = [
            [bytes(memoryview(f)) for f in bases.at(number).encode(flat(gradient), residual)]
            for gradient, residual, bases in zip(gradients, self.residuals, self.bases, strict=True)
        ]
        merged = self.holder.at(number).merge(frames, divisor=len(frames))
        self.holder.learn(number, merged)
        results = []
        for bases in self.bases:
            results.append(decoded(bases.at(number), merged, self.shape))
            bases.learn(number, bytes(memoryview(merged)))
        assert all(result.tobytes() == results[0].tobytes() for result in results)
        return results[0]

    def owed(self) -> Array:
        return np.mean([r.values.reshape(self.shape) for r in self.residuals], axis=0)


@settings(max_examples=250, deadline=None)
@given(
    st.integers(2, 12),
    st.integers(2, 40),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_results_and_residuals_are_all_that_was_given(
    rows: int, columns: int, rank: int, ahead: int, seed: int
) -> None:
    """4 rounds each: 1,000 rounds in all."""
    codec = LowRank(min(rank, rows, columns), seed=seed)
    cluster = Cluster(codec, (rows, columns), workers=3, ahead=ahead)
    numbers = np.random.default_rng(seed)
    given_, arrived = np.zeros((rows, columns)), np.zeros((rows, columns))
    for number in range(4):
        gradients = [numbers.normal(size=(rows, columns)).astype(np.float32) for _ in range(3)]
        before = [residual.values.copy() for residual in cluster.residuals]
        codec_now = cluster.bases[0].at(number)
        given_ += np.mean(gradients, axis=0, dtype=np.float64)
        arrived += cluster.round(number, gradients)
        again = Residual(before[0].copy(), separable=False)
        (frame,) = codec_now.encode(flat(gradients[0]), again)
        sent = decoded(codec_now, frame, (rows, columns)).reshape(-1)
        np.testing.assert_allclose(
            sent + again.values, before[0] + gradients[0].reshape(-1), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(arrived + cluster.owed(), given_, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 9), st.integers(0, 99))
def test_of_full_rank_it_is_the_mean(side: int, seed: int) -> None:
    cluster = Cluster(LowRank(side), (side, side), workers=4)
    numbers = np.random.default_rng(seed)
    for number in range(3):
        gradients = [numbers.normal(size=(side, side)).astype(np.float32) for _ in range(4)]
        result = cluster.round(number, gradients)
        np.testing.assert_allclose(result, np.mean(gradients, axis=0), rtol=1e-4, atol=1e-5)


def test_a_basis_comes_to_be_the_largest_directions() -> None:
    """Of gradients of rank 2 the first result misses some; the second has all of it, and so has
    every other one from there on."""
    numbers = np.random.default_rng(5)
    mean = (numbers.normal(size=(30, 2)) @ numbers.normal(size=(2, 20))).astype(np.float32)
    cluster = Cluster(LowRank(2), (30, 20), workers=2)
    missed = []
    for number in range(4):
        before = cluster.owed()
        result = cluster.round(number, [mean, mean])
        missed.append(np.abs(mean + before - result).max())
    assert missed[0] > 0.5
    assert max(missed[1], missed[3]) < 1e-4
    assert missed[2] < missed[0] / 2


def test_each_round_multiplies_the_other_side() -> None:
    codec = LowRank(2)
    bases = codec.agree((30, 4, 5))
    sizes = []
    for number in range(4):
        (frame,) = bases.at(number).encode(flat(np.ones((30, 20))), codec.init(600, "float32"))
        sizes.append(memoryview(frame).nbytes - HEADER.size)
        codec.examine(frame, (30, 4, 5))
        bases.learn(number, frame)
    assert sizes == [4 * 2 * 30, 4 * 2 * 20] * 2


def test_rounds_that_are_open_together_have_bases_of_their_own() -> None:
    bases = LowRank(1).agree((9, 7), ahead=2)
    first, second = bases.at(0), bases.at(1)
    assert first is bases.at(0)
    assert first is not second
    with pytest.raises(RuntimeFault, match="round 2"):
        bases.at(2)
    bases.learn(0, None)
    assert bases.at(1) is second
    bases.at(2)


def test_who_missed_rounds_needs_the_last_one_only() -> None:
    codec = LowRank(2)
    there, late = codec.agree((12, 9)), codec.agree((12, 9))
    numbers = np.random.default_rng(2)
    for number in range(5):
        gradient = flat(numbers.normal(size=(12, 9)))
        (frame,) = there.at(number).encode(gradient, codec.init(108, "float32"))
        there.learn(number, frame)
    late.at(0)
    late.learn(4, frame)
    frames = [side.at(5).encode(gradient, codec.init(108, "float32")) for side in (there, late)]
    assert bytes(memoryview(frames[0][0])) == bytes(memoryview(frames[1][0]))


@pytest.mark.parametrize("empty", ["zero", "tiny", "nobody"])
def test_without_gradients_the_basis_is_drawn_and_finite(empty: str) -> None:
    codec = LowRank(3)
    cluster = Cluster(codec, (8, 16), workers=2)
    nothing = np.full((8, 16), 1e-45 if empty == "tiny" else 0, np.float32)
    if empty == "nobody":
        for bases in (*cluster.bases, cluster.holder):
            bases.learn(0, None)
    else:
        assert np.isfinite(cluster.round(0, [nothing, nothing])).all()
    ones = np.ones((8, 16), np.float32)
    total = sum(cluster.round(number, [ones, ones]) for number in range(1, 6))
    np.testing.assert_allclose(total + cluster.owed(), 5 * ones, atol=1e-4)
    assert np.abs(total - 5 * ones).max() < 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_what_is_not_finite_arrives_once_and_leaves_nothing_behind(bad: float) -> None:
    cluster = Cluster(LowRank(2), (8, 16), workers=2)
    ones = np.ones((8, 16), np.float32)
    cluster.round(0, [ones, 2 * ones])
    before = cluster.residuals[0].values.copy()
    spoiled = ones.copy()
    spoiled[3, 4] = bad
    assert np.isnan(cluster.round(1, [spoiled, ones])).all()
    np.testing.assert_array_equal(cluster.residuals[0].values, before)
    owed = cluster.owed()
    for number in range(2, 6):
        owed += ones - cluster.round(number, [ones, ones])
    np.testing.assert_allclose(cluster.owed(), owed, atol=1e-4)


def test_a_dropped_contribution_returns_in_the_basis_it_was_sent_in() -> None:
    codec = LowRank(2)
    bases, residual = codec.agree((8, 16)), codec.init(128, "float32")
    gradient = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    sent_by = bases.at(0)
    frames = sent_by.encode(flat(gradient), residual)
    bases.learn(0, None)
    residual.put_back(sent_by, frames)
    np.testing.assert_allclose(residual.values.reshape(8, 16), gradient, atol=1e-6)


def test_contributions_in_another_basis_are_not_merged() -> None:
    codec, other = LowRank(2), LowRank(2, seed=1)
    ones = flat(np.ones((8, 16)))
    frames = [c.agree((8, 16)).at(0).encode(ones, c.init(128, "float32")) for c in (codec, other)]
    with pytest.raises(RuntimeFault, match="another basis"):
        codec.agree((8, 16)).at(0).merge(frames, divisor=2)
    with pytest.raises(RuntimeFault, match="another basis"):
        codec.agree((8, 16)).at(0).decode_into(frames[1], ones)


@pytest.mark.parametrize("frame", [b"", bytes(7), HEADER.pack(2, 0) + bytes(64), bytes(8 + 4)])
def test_frames_of_no_side_are_refused(frame: bytes) -> None:
    codec = LowRank(2)
    assert codec.nbytes((8, 16), 0) == 8 + 64
    codec.examine(HEADER.pack(0, 5) + bytes(64), (8, 16))
    codec.examine(HEADER.pack(1, 5) + bytes(128), (8, 16))
    with pytest.raises(FrameRefused):
        codec.examine(frame, (8, 16))
    with pytest.raises(FrameRefused):
        codec.examine(HEADER.pack(1, 5) + bytes(64), (8, 16))


@pytest.mark.parametrize("rank", [0, -1, 1.0, "4", True, None])
def test_ranks_that_are_none_are_refused(rank: Any) -> None:
    with pytest.raises(ConfigError, match="give a whole number, 1 or more"):
        LowRank(rank)


@pytest.mark.parametrize("seed", [-1, 1 << 32, 0.5])
def test_seeds_out_of_range_are_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        LowRank(seed=seed)


@pytest.mark.parametrize(
    ("rank", "shape", "dtype", "why"),
    [
        (4, (64, 40), "float32", ""),
        (4, (64, 3, 3, 3), "float32", ""),
        (1, (4096,), "float32", "it has one dimension, and no rank: route it to Dense()"),
        (1, (), "float32", "it has one dimension"),
        (1, (0, 8), "float32", "is more than its 0 x 8 matrix has: route it to Dense()"),
        (9, (8, 64), "float32", "rank=9 is more than its 8 x 64 matrix has: choose rank=7 or less"),
        (8, (8, 64), "float32", "it takes no fewer bytes than 8 x 64 values: choose rank=7"),
        (1, (2, 2), "float32", "it takes no fewer bytes than 2 x 2 values: route it to Dense()"),
        (3, (1 << 20, 64), "float32", "more bytes than a message may have: choose rank=1 or less"),
        (4, (64, 40), "float16", "it is float16"),
    ],
)
def test_tensors_that_gain_nothing_are_refused_with_a_way_out(
    rank: int, shape: tuple[int, ...], dtype: str, why: str
) -> None:
    found = LowRank(rank).obstacle(Spec("w", shape, dtype, 0))
    assert (why in found) if why else not found
    assert not found or "route it to Dense()" in found


def test_a_tensor_is_a_matrix_of_its_first_dimension() -> None:
    assert matrix_shape((64, 3, 5, 5)) == (64, 75)


def trained(rank: int | None) -> float:
    """Two layers, four workers, momentum; the loss after 250 steps."""
    numbers = np.random.default_rng(0)
    inputs = numbers.normal(size=(2048, 20))
    targets = np.tanh(inputs @ numbers.normal(size=(20, 24))) @ numbers.normal(size=(24, 10))
    weights = [numbers.normal(size=(20, 32)) / 5, numbers.normal(size=(32, 10)) / 6]
    moving = [np.zeros_like(weight) for weight in weights]
    clusters = [Cluster(LowRank(rank or 1), weight.shape, workers=4) for weight in weights]
    for step in range(250):
        gradients: list[list[Array]] = [[], []]
        for _ in range(4):
            batch = numbers.integers(0, 2048, size=32)
            hidden = np.tanh(inputs[batch] @ weights[0])
            error = (hidden @ weights[1] - targets[batch]) / 32
            gradients[0].append(inputs[batch].T @ ((error @ weights[1].T) * (1 - hidden**2)))
            gradients[1].append(hidden.T @ error)
        for layer, given_ in enumerate(gradients):
            result = clusters[layer].round(step, given_) if rank else np.mean(given_, axis=0)
            moving[layer] = 0.9 * moving[layer] + result
            weights[layer] = weights[layer] - 0.005 * moving[layer]
    return float(((np.tanh(inputs @ weights[0]) @ weights[1] - targets) ** 2).mean())


def test_it_learns_like_exact_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = trained(None)
    assert trained(4) < 1.2 * exact
    monkeypatch.setattr(Residual, "zeros", lambda numel, **_: Forgetful(np.zeros(numel)))
    assert trained(4) > 1.2 * exact, "without error feedback it would learn as well"


class Forgetful:
    """A residual that keeps nothing."""

    def __init__(self, values: Array) -> None:
        self._numel = values.size

    @property
    def values(self) -> Array:
        return np.zeros(self._numel, np.float32)
