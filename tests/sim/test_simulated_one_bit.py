"""One bit a value in whole jobs: residuals at workers and servers, whatever arrives when."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import OneBit
from slipstream.systems import one_bit
from slipstream.testing import Simulation, simulate
from slipstream.types import Chunk, Segment, Spec, Values

SPECS = [
    Spec("first", (40, 30), "float32", 0),
    Spec("bias", (30,), "float32", 1),
    Spec("second", (30, 80), "float32", 2),
    Spec("level", (5,), "float32", 3, "buffer"),
]


def some(seed: int) -> Callable[[int, int, int], bytes | None]:
    """Normal numbers, and here and there nothing at all."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes | None:
        random = np.random.default_rng((seed, rank, round_, tensor))
        if random.random() < 0.25:
            return None
        return random.normal(size=SPECS[tensor].numel).astype(np.float32).tobytes()

    return contribute


def mean(acc: np.ndarray, side: np.ndarray) -> np.float32:
    """In eight lanes, as the kernel adds: another order might turn the sign of a value near 0."""
    terms = np.zeros(-(-acc.size // 8) * 8)
    terms[: acc.size] = np.where(side, acc, 0)
    lanes = np.cumsum(terms.reshape(-1, 8), axis=0)[-1]  # cumsum adds one after the other
    return np.float32(np.cumsum(lanes)[-1] / max(1, side.sum()))


class Quantizer:
    """The paper's equations for one link: what is decoded, with the residual kept here."""

    def __init__(self) -> None:
        self.residuals: dict[Segment, np.ndarray] = defaultdict(lambda: np.float32(0))

    def __call__(self, segment: Segment, values: np.ndarray) -> np.ndarray:
        acc = values + self.residuals[segment]
        positive = acc >= 0
        decoded = np.where(positive, mean(acc, positive), mean(acc, ~positive))
        self.residuals[segment] = acc - decoded
        return decoded


def piece(content: bytes | None, segment: Segment) -> np.ndarray | None:
    if content is None:
        return None
    return np.frombuffer(content, np.float32)[segment.start : segment.stop]


def expected(simulation: Simulation, chunk: Chunk) -> list[list[np.ndarray | None]]:
    """By round and segment."""
    workers = [Quantizer() for _ in simulation.contributions[0]]
    server = Quantizer()
    results = []
    for given_ in simulation.contributions:
        row: list[np.ndarray | None] = []
        for segment in chunk.segments:
            terms = [
                quantize(segment, values)
                for quantize, content in zip(workers, given_, strict=True)
                if (values := piece(content[segment.tensor], segment)) is not None
            ]
            if not terms:
                row.append(None)
                continue
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            row.append(server(segment, total / np.float32(len(workers))))
        results.append(row)
    return results


def check_results(simulation: Simulation, chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        for wanted, by_rank in zip(expected(simulation, chunk), simulation.results, strict=True):
            for segment, values in zip(chunk.segments, wanted, strict=True):
                for worker in by_rank:
                    got = piece(worker[segment.tensor], segment)
                    assert (got is None) == (values is None)
                    if values is not None:
                        np.testing.assert_array_equal(got, values)


@settings(max_examples=25)
@given(
    workers=st.integers(1, 4),
    servers=st.integers(1, 2),
    chunk_bytes=st.sampled_from([4096, 2 << 20]),
    slow=st.none() | st.just(0),
    seed=st.integers(0, 2**32),
)
def test_every_worker_gets_what_the_equations_say(
    workers: int, servers: int, chunk_bytes: int, slow: int | None, seed: int
) -> None:
    simulation = simulate(
        one_bit(chunk_bytes=chunk_bytes),
        SPECS,
        workers=workers,
        servers=servers if chunk_bytes == 4096 else 1,
        rounds=5,
        seed=seed,
        contribute=some(seed),
        slow=slow,
    )
    assert simulation.refused == 0
    for by_rank in simulation.results:
        assert all(worker == by_rank[0] for worker in by_rank)
    plan = simulation.plan
    in_bits = [c for c in plan.chunks if plan.route(plan.unit_of(c)).up == OneBit()]
    assert {s.tensor for c in in_bits for s in c.segments} == {0, 2}
    check_results(simulation, in_bits)


def test_the_order_of_arrival_does_not_show() -> None:
    def results(order: int) -> object:
        return simulate(
            one_bit(chunk_bytes=4096),
            SPECS,
            workers=3,
            servers=2,
            rounds=6,
            seed=order,
            contribute=some(1),
        ).results

    assert results(1) == results(2) == results(3)


def test_bits_are_all_that_travels() -> None:
    simulation = simulate(one_bit(), SPECS, workers=2, servers=1, rounds=3)
    plan = simulation.plan
    nbytes = sum(
        OneBit.nbytes(segment.numel)
        for chunk in plan.chunks
        if plan.route(plan.unit_of(chunk)).up == OneBit()
        for segment in chunk.segments
    )
    for counter in (*simulation.sent, *simulation.received):
        assert counter["one-bit/sharded"] == 3 * nbytes
    assert Values.empty(3600, "float32").data.nbytes > 30 * nbytes
