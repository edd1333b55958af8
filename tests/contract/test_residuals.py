"""Every value is sent exactly once, whoever keeps a residual: codecs, and Ako's accumulators."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.codecs import Above, Drop, Filter, LowRank, OneBit, Quantized, TopK
from slipstream.codecs.partition import PeerAccumulators, Rotation
from slipstream.codecs.residual import Residual
from slipstream.types import EncodeContext, Values

Array = np.ndarray[Any, Any]
BOUND = Above(1.0, decay="constant")
CODECS = {
    "filter": Filter(BOUND),
    "filter by share": Filter(Above(Drop(0.5))),
    "filter in bfloat16": Filter(BOUND, values="bfloat16"),
    "filter in 8 bits": Filter(BOUND, values="int8"),
    "the largest": Filter(TopK(0.3)),
    "the largest in 4 bits": Filter(TopK(0.3), values="int4"),
    "one bit": OneBit(),
    "8 bits": Quantized(8, block=32),
    "4 bits": Quantized(4, block=64),
    "4 bits by chance": Quantized(4, block=32, rounding="stochastic"),
}
ROTATIONS = {
    "rotation": (Rotation(3), None),
    "rotation, filtered": (Rotation(3), BOUND),
    "rotation, the same for all": (Rotation(2, same_for_all=True), None),
}
LOW_RANK = {"rank 1": LowRank(1), "rank 3": LowRank(3)}
ROUNDED = {
    "one bit",
    "4 bits by chance",
    *LOW_RANK,
}  # what is kept is a difference that has to be rounded
FRACTIONS = {
    *ROUNDED,
    "8 bits",
    "4 bits",
    "filter in 8 bits",
    "the largest in 4 bits",
}  # residuals of such, whose sums with values are rounded
SELECTING = {
    "filter",
    "filter by share",
    "the largest",
    *ROTATIONS,
}  # entries leave as they are, or stay

# A user takes values, sends some and keeps the others; it may be told that what it sent last was
# dropped, if the receiver can drop anything.
Send = Callable[[Array], Array]


class User:
    """One sender and its residual."""

    def __init__(self, send: Send, kept: Callable[[], Array], drop: Callable[[], None] | None):
        self.send, self.kept, self.drop = send, kept, drop


def codec_user(codec: Any, numel: int) -> User:
    residual = codec.init(numel, "float32")
    last: list[bytes] = []

    def send(values: Array) -> Array:
        flat = Values(values.view(np.uint8), "float32")
        last[:] = [bytes(memoryview(f)) for f in codec.encode(flat, residual, EncodeContext())]
        out = Values.empty(numel, "float32")
        codec.decode_into(last, out)
        return out.data.view(np.float32).copy()

    return User(send, lambda: residual.values, lambda: residual.put_back(codec, last))


def rotating_user(rotation: Rotation, above: Above | None, numel: int) -> User:
    accumulators = PeerAccumulators(rotation, 0, [1], numel)
    (accumulator,) = accumulators.accumulators

    def send(values: Array) -> Array:
        accumulators.add(values)
        start, taken = accumulators.take(accumulator, above)
        out = np.zeros(numel, np.float32)
        out[start : start + taken.size] = taken
        return out

    return User(send, lambda: accumulator.residual.values, None)


def rows_of(numel: int) -> int:
    return next(n for n in (13, 7, 5, 3, 2, 1) if numel % n == 0)


def smaller_side(numel: int) -> int:
    return min(rows_of(numel), numel // rows_of(numel))


def low_rank_user(codec: LowRank, numel: int) -> User:
    rows = rows_of(numel)
    agreement, residual = codec.agree((rows, numel // rows)), codec.init(numel, "float32")
    clock = itertools.count()
    last: list[Any] = []

    def send(values: Array) -> Array:
        round_ = next(clock)
        in_round, flat = agreement.at(round_), Values(values.view(np.uint8), "float32")
        frames = in_round.encode(flat, residual)
        last[:] = [in_round, [bytes(memoryview(frame)) for frame in frames]]
        agreement.learn(round_, in_round.merge([last[1]], divisor=2))
        out = Values.empty(numel, "float32")
        in_round.decode_into(last[1], out)
        return out.data.view(np.float32).copy()

    return User(send, lambda: residual.values, lambda: residual.put_back(*last))


def user(name: str, numel: int) -> User:
    if name in LOW_RANK:
        # A basis has at most as many vectors as a vector has numbers.
        rank = LOW_RANK[name].rank
        return low_rank_user(LowRank(min(rank, smaller_side(numel))), numel)
    if name in CODECS:
        return codec_user(CODECS[name], numel)
    return rotating_user(*ROTATIONS[name], numel)


def dyadic(random: np.random.Generator, numel: int) -> Array:
    """Small multiples of 2⁻⁶: sums are exact, so that no rounding hides a loss."""
    return (random.integers(-512, 513, numel) / 64).astype(np.float32)


def rounds(seed: int, numel: int, count: int) -> Iterator[tuple[Array, bool]]:
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield dyadic(random, numel), bool(random.random() < 0.4)


names = pytest.mark.parametrize("name", [*CODECS, *ROTATIONS, *LOW_RANK])
many = given(numel=st.integers(1, 200), count=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))


@names
@settings(max_examples=60)
@many
@example(numel=1, count=8, seed=0)
def test_what_is_sent_and_what_is_kept_is_all_that_was_given(
    name: str, numel: int, count: int, seed: int
) -> None:
    sender = user(name, numel)
    for values, _ in rounds(seed, numel, count):
        before = sender.kept().copy()
        sent, given_ = sender.send(values.copy()), values + before
        kept = sender.kept()
        if name in SELECTING:
            assert (sent + kept).tobytes() == (given_ + np.float32(0)).tobytes()
            assert not (sent.astype(bool) & kept.astype(bool)).any()
        elif name in ROUNDED:
            np.testing.assert_allclose(sent + kept, given_, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(sent + kept, given_)


@names
@settings(max_examples=60)
@many
def test_a_contribution_that_was_dropped_is_sent_later(
    name: str, numel: int, count: int, seed: int
) -> None:
    sender = user(name, numel)
    given_, arrived = np.zeros(numel), np.zeros(numel)
    for values, dropped in rounds(seed, numel, count):
        given_ += values
        sent = sender.send(values.copy())
        if dropped and sender.drop is not None:
            sender.drop()
        else:
            arrived += sent
    np.testing.assert_allclose(arrived + sender.kept(), given_, atol=1e-4 * (name in FRACTIONS))


@names
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_leaves_and_does_not_stay_or_return(name: str, bad: float) -> None:
    sender = user(name, 4)
    for _ in range(3):  # a rotation has come round
        sender.send(np.float32([0.5, bad, -3, 2]) if _ == 0 else np.zeros(4, np.float32))
        if sender.drop is not None:
            sender.drop()
    assert np.isfinite(sender.kept()).all()


def test_a_part_is_a_view() -> None:
    residual = Residual.zeros(4)
    residual.add(np.float32([1, 2, 3, 4]))
    part = residual.part(slice(1, 3))
    assert part.take(above=2).tolist() == [0, 3]
    assert residual.values.tolist() == [1, 2, 0, 4]
    assert residual.take().tolist() == [1, 2, 0, 4]
    assert not residual.values.any()


def test_what_spoils_a_whole_contribution_returns_nothing_of_it() -> None:
    """An infinity makes one of the two means infinite; the residual was left as it was."""
    codec = OneBit()
    residual = codec.init(3, "float32")
    codec.encode(Values(np.float32([4, 2, -1]).view(np.uint8), "float32"), residual)
    before = residual.values.tolist()
    bad = Values(np.float32([np.inf, 1, -1]).view(np.uint8), "float32")
    residual.put_back(codec, codec.encode(bad, residual))
    assert residual.values.tolist() == before
