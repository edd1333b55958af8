"""Outer rounds where the workers of a host average first: exact, and every step counts once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from test_mixes import vector
from test_outer_rounds import RANKS, WORKER, alone
from test_two_levels import environments

from slipstream.systems import parse
from slipstream.updates import LocalSteps, Nesterov

pytestmark = pytest.mark.process

HOSTS = (0, 0, 1)  # by rank
Told = list[dict[str, Any]]
Run = Callable[..., Told]


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    def start(strategy: str, dtype: str = "float64", **options: Any) -> Told:
        arguments = strategy, str(tmp_path), dtype, json.dumps(options)
        run = fork_server.run(WORKER, *arguments, ranks=environments(HOSTS))
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return start


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(every=3, hosts='first')",
        "diloco(every=4, fragments=3, overlap_steps=3, mix=0.25, hosts='first')",
    ],
)
def test_every_outer_round_is_what_one_process_makes_of_it(strategy: str, run: Run) -> None:
    told = run(strategy)
    update = parse(strategy).update
    assert isinstance(update.inner, LocalSteps)
    assert isinstance(update.outer, Nesterov)
    wanted = alone(update.inner, update.outer, told[0]["fragments"])
    assert len({each["digest"] for each in told}) == 1, "all end with the same weights"
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert len({each["outer"] for each in told}) == 1, "outer weights are the same"
    assert len({each["own"] for each in told}) == RANKS, "between rounds each has its own"


def counted(told: Told, workers: int) -> torch.Tensor:
    """(1/n) Σ over workers of what each has moved, but for what waits in its host's residual.

    That is of the host's sum divided by the workers of a host, 3/2 of them on average.
    """
    moved = sum(vector(each["moved"]) for each in told)
    owed = sum(vector(told[leader]["owed"]) for leader in (0, 2))
    assert isinstance(moved, torch.Tensor)
    return (moved + owed * RANKS / 2) / workers


def test_with_error_feedback_every_step_counts_once(run: Run) -> None:
    """With η = 1 and μ = 0 weights move as far as the mean of the workers' steps."""
    strategy = "diloco(every=4, fragments=2, lr=1.0, momentum=0.0, wire='int4', hosts='first')"
    told = run(strategy, "float32")
    assert "int4/peers" in told[0]["stats"]["bytes"]["by_scheme"]
    assert not told[1]["stats"]["bytes"]["sent"], "one stream a host"
    assert len({each["digest"] for each in told}) == 1
    assert vector(told[0]["owed"]).abs().max() > 0, "nothing was kept back"


def test_what_a_late_host_did_counts_in_a_later_round(run: Run) -> None:
    """The one worker of the second host is late; then it makes rounds as the first does."""
    strategy = "diloco(every=2, lr=1.0, momentum=0.0, first=1, hosts='first')"
    told = run(strategy, "float32", late=2)
    assert sum(told[0]["stats"]["rounds"]["dropped"].values()) > 0, "nobody was late"
    assert len({each["digest"] for each in told}) == 1
    assert vector(told[0]["weights"]).isfinite().all()
