"""Workers that exchange bits learn, and stay equal bit for bit on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("one_bit_worker.py")
# Small chunks: tensors are cut, and every server holds several.
BITS = "one_bit(chunk_bytes=4096)"
BIT_BYTES_A_STEP = (24 * 96 + 96 * 16) / 8
OVERFLOW = 5


@dataclass(frozen=True)
class Outcome:
    """What the workers wrote down, by rank, and the figures of the whole job."""

    told: list[dict[str, Any]]
    figures: dict[str, Any]

    def loss(self, steps: slice) -> float:
        losses = [loss for one in self.told for loss in one["losses"][steps]]
        return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def train(fork_server: ForkServer) -> Callable[..., Outcome]:
    def run(workers: int, servers: int, strategy: str = BITS, **env: str) -> Outcome:
        env |= {
            "SLIPSTREAM_STRATEGY": strategy,
            "SLIPSTREAM_SERVERS": str(servers),
            "SLIPSTREAM_JSON": "figures.json",
        }
        run = fork_server.run(WORKER, ranks=workers, env=env)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        told = [
            json.loads((run.folder / f"told.{rank}.json").read_text()) for rank in range(workers)
        ]
        return Outcome(told, json.loads((run.folder / "figures.json").read_text()))

    return run


def assert_equal_throughout(outcome: Outcome) -> None:
    first = outcome.told[0]["digests"]
    for rank, one in enumerate(outcome.told):
        differ = [step for step, digest in enumerate(one["digests"]) if digest != first[step]]
        assert not differ, f"rank {rank} differs from rank 0 after steps {differ}"


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_workers_learn_and_stay_equal(
    workers: int, servers: int, train: Callable[..., Outcome]
) -> None:
    bits = train(workers, servers)
    assert_equal_throughout(bits)
    assert len(set(bits.told[0]["digests"])) == len(bits.told[0]["digests"])  # every step moves
    assert bits.loss(slice(-10, None)) < 0.5 * bits.loss(slice(0, 5))


def test_two_runs_agree_bit_for_bit(train: Callable[..., Outcome]) -> None:
    one, other = train(3, 2), train(3, 2)
    assert one.told[0]["digests"] == other.told[0]["digests"]


def test_weights_travel_in_bits_and_biases_dense(train: Callable[..., Outcome]) -> None:
    bits, dense = train(2, 1), train(2, 1, "push_pull(chunk_bytes=4096)")
    schemes = bits.figures["bytes"]["by_scheme"]
    assert set(schemes) == {"one-bit/sharded", "dense/sharded"}
    # One worker is not beside the server; its bytes go up and down once a step.
    moved = schemes["one-bit/sharded"] / bits.figures["steps"]
    assert 2 * BIT_BYTES_A_STEP < moved < 2.4 * BIT_BYTES_A_STEP  # two means a segment
    total = dense.figures["bytes"]["sent"] + dense.figures["bytes"]["received"]
    assert sum(schemes.values()) < total / 12
    assert bits.loss(slice(-10, None)) < 2 * dense.loss(slice(-10, None))


def test_an_overflow_reaches_everybody_and_is_over_with_its_step(
    train: Callable[..., Outcome],
) -> None:
    """Residuals stay finite, so that a step which mixed precision skips costs that step alone."""
    outcome = train(2, 1, OVERFLOW=str(OVERFLOW))
    assert [one["skipped"] for one in outcome.told] == [[OVERFLOW], [OVERFLOW]]
    assert_equal_throughout(outcome)
    assert outcome.loss(slice(-10, None)) < 0.5 * outcome.loss(slice(0, 5))
