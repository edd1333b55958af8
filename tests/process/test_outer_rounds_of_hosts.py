"""Outer rounds where the workers of a host average first: exact, and every step counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from test_mixes import vector
from test_outer_rounds import RANKS, Run, alone, composed, expected_of_first, runner
from test_two_levels import environments

from slipstream.codecs import Quantized
from slipstream.routes import Route
from slipstream.systems import parse
from slipstream.topologies import Sharded, TwoLevel
from slipstream.updates import LocalSteps, Nesterov, Update

pytestmark = pytest.mark.process

HOSTS = (0, 0, 1)  # by rank


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    return runner(fork_server, tmp_path, environments(HOSTS))


@pytest.mark.parametrize(
    "strategy",
    [
        "local_sgd(every=5, hierarchical=True)",
        "diloco(every=4, fragments=3, overlap_steps=3, mix=0.25, hierarchical=True)",
    ],
)
def test_every_outer_round_is_what_one_process_makes_of_it(strategy: str, run: Run) -> None:
    told = run(strategy)
    update = parse(strategy).rounds.update
    assert isinstance(update.inner, LocalSteps)
    assert isinstance(update.outer, Nesterov)
    wanted = alone(update.inner, update.outer, told[0]["fragments"])
    assert len({each["digest"] for each in told}) == 1, "all end with the same weights"
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert len({each["outer"] for each in told}) == 1, "outer weights are the same"
    assert len({each["own"] for each in told}) == RANKS, "between rounds each has its own"


def test_with_error_feedback_every_step_counts_once(run: Run) -> None:
    """With η = 1 and μ = 0 weights move as far as the mean of the workers' steps, but for what
    waits in a host's residual: that is of the sum of its workers divided by 3/2, their mean
    number."""
    route = Route(TwoLevel(Sharded()), up=Quantized(4, block=64))
    told = run(composed(route, Update(LocalSteps(4, 2), Nesterov(1.0, 0.0))), "float32")
    moved = vector(told[0]["flushed"]) - vector(told[0]["begun"])
    first, second, third = (vector(each["moved"]) for each in told)
    held_back = 1.5 * (vector(told[0]["owed"]) + vector(told[2]["owed"]))
    assert held_back.abs().max() > 0, "nothing was kept back"
    assert not told[1]["owed"], "it is the host's"
    assert torch.allclose(moved, (first + second + third + held_back) / RANKS, rtol=0, atol=1e-6)
    assert len({each["digest"] for each in told}) == 1


def test_hosts_hold_shares_of_the_model(run: Run) -> None:
    told = run("diloco(every=4, wire='int8', hierarchical=True)", "float32")
    assert len({each["digest"] for each in told}) == 1
    assert "int8/peers" in told[0]["stats"]["bytes"]["by_scheme"]
    assert not told[1]["stats"]["bytes"]["sent"], "one stream a host"


def test_what_a_late_host_did_counts_in_a_later_round(run: Run) -> None:
    """Each round is one host's: the mean over all steps of its workers that have not counted."""
    strategy = "diloco(every=2, lr=1.0, momentum=0.0, first=1, hierarchical=True)"
    told = run(strategy, "float32", late=2)
    assert sum(told[0]["stats"]["rounds"]["dropped"].values()) > 0, "nobody was late"
    assert len({each["digest"] for each in told}) == 1
    moved = vector(told[0]["weights"]) - vector(told[0]["begun"])
    wanted, sizes = expected_of_first(told, 1, [[0, 1], [2]])
    assert 2 in sizes, "host 0 made a round"
    assert torch.allclose(moved, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("first", ["", ", first=2"])
def test_a_checkpoint_continues_as_the_run_did(first: str, run: Run, tmp_path: Path) -> None:
    strategy = f"diloco(every=4, hierarchical=True{first})"
    whole = run(strategy, "float32", save_after=8)
    resumed = run(strategy, "float32", load=str(tmp_path / "saved.safetensors"))
    assert {each["digest"] for each in resumed} == {whole[0]["digest"]}
