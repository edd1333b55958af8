"""What a training loop may do between outer rounds, and what it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from test_mixes import vector
from test_outer_rounds import RANKS, STREAMED, WORKER, Run, alone, run

from slipstream.updates import LocalSteps, Nesterov

__all__ = ["run"]  # the fixture
pytestmark = pytest.mark.process


def test_complex_parameters_are_merged_in_part(run: Run) -> None:
    told = run(STREAMED, model="complex")
    local, outer = LocalSteps(4, 3, 2, 0.25), Nesterov()
    wanted = alone(local, outer, told[0]["fragments"], model="complex")
    assert len({each["digest"] for each in told}) == 1
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("strategy", ["diloco(every=3)", STREAMED])
def test_a_closure_steps_like_a_loop_without_one(strategy: str, run: Run) -> None:
    assert run(strategy, closure=True)[0]["digest"] == run(strategy)[0]["digest"]


def test_a_closure_whose_gradients_are_not_finite_does_not_count(run: Run) -> None:
    told = run("diloco(every=3)", closure=True, endless=[1, 4], nonfinite="refuse")
    assert len({each["digest"] for each in told}) == 1
    assert vector(told[0]["weights"]).isfinite().all()
    moved = run("diloco(every=3)", closure=True)
    assert told[0]["digest"] != moved[0]["digest"], "a step of rank 1 is missing"


def test_a_closure_whose_gradients_are_not_finite_ends_the_job(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    options = json.dumps({"closure": True, "endless": [1, 4], "nonfinite": "stop"})
    arguments = "diloco(every=3)", str(tmp_path), "float64", options
    run = fork_server.run(WORKER, *arguments, ranks=RANKS)
    assert 0 not in set(run.codes.values())
    assert "rank 1" in run.told()
    assert "not finite" in run.told()


@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        ("diloco(every=3)", "float64"),
        ("diloco(every=3)", "bfloat16"),
        ("diloco(every=3, first=3)", "float32"),  # servers apply
    ],
)
def test_weights_that_the_loop_loads_are_the_outer_ones(
    strategy: str, dtype: str, run: Run
) -> None:
    """After job.distribute, and before the first step."""
    wanted = run(strategy, dtype, seed=8)
    told = run(strategy, dtype, seed=3, load_state=8)
    assert {each["digest"] for each in told} == {wanted[0]["digest"]}


@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("diloco(every=3)", "plain"),
        ("diloco(every=3)", "frozen"),  # which differs in layers that are not trained, too
        ("diloco(every=3, first=3)", "plain"),
    ],
)
def test_weights_that_one_rank_alone_loads_end_the_job(
    strategy: str, model: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    options = json.dumps({"load_state": 8, "load_on": [0], "model": model})
    run = fork_server.run(WORKER, strategy, str(tmp_path), "float32", options, ranks=RANKS)
    assert 0 not in set(run.codes.values())
    assert "weights were changed after job.distribute, and not alike" in run.told()


@pytest.mark.parametrize("flush", [False, True], ids=["at the end", "flushed"])
def test_weights_that_one_rank_changes_after_the_last_round_are_averaged(
    flush: bool, run: Run
) -> None:
    """When all workers have just got the same."""
    changed = {"1": ["0.weight"], "2": ["1.running_mean"]}
    plain, told = (
        run("diloco(every=3)", model="norm", flush=flush, changed=each) for each in ({}, changed)
    )
    assert len({each["digest"] for each in told}) == 1
    assert "rank 1 has changed weights after the last outer round ('0.weight')" in str(
        told[0]["warned"]
    )
    assert told[0]["own"] == plain[0]["digest"] == plain[0]["own"]
    before, after = (torch.tensor(each[0]["weights"]["0.weight"]) for each in (plain, told))
    torch.testing.assert_close(after, before * (1 - 0.5 / RANKS))
    del before, plain[0]["weights"]["0.weight"], told[0]["weights"]["0.weight"]
    assert told[0]["weights"] == plain[0]["weights"]


def test_buffers_that_a_forward_pass_changes_after_the_last_round_are_averaged(run: Run) -> None:
    told = run("diloco(every=3)", model="norm", flush=False, changed={"2": ["1.running_mean"]})
    assert len({each["digest"] for each in told}) == 1
    assert all(each["warned"] == [] for each in told)


def test_weights_that_all_ranks_change_alike_after_the_last_round_are_kept(run: Run) -> None:
    """Such as those of an earlier epoch that was better; to the last bit."""
    changed = {str(rank): ["0.weight", "1.running_mean"] for rank in range(RANKS)}
    told = run("diloco(every=3)", model="norm", flush=False, changed=changed)
    assert {each["digest"] for each in told} == {told[0]["own"]}
    assert all(each["warned"] == [] for each in told)


@pytest.mark.parametrize("strategy", ["diloco(every=3)", STREAMED])
def test_lent_weights_are_not_trained_and_not_exchanged(strategy: str, run: Run) -> None:
    plain = run(strategy)
    told = run(strategy, misuse_after=6)  # while fragments are under way
    for each in told:
        flushed, stepped, saved, loaded = each["said"]
        assert "job.flush() within job.outer_weights(), where the models have other" in flushed
        assert "optimizer.step() within job.outer_weights()" in stepped
        assert "job.save() within job.outer_weights()" in saved
        assert "job.load() within job.outer_weights()" in loaded
    assert {each["digest"] for each in told} == {plain[0]["digest"]}, "nothing has changed"


def test_small_outer_updates_of_models_in_16_bits_add_up(run: Run) -> None:
    """An outer update far below a weight's last bit counts when there are enough of them."""
    strategy = "diloco(every=1, lr=0.001, momentum=0.0)"
    told = run(strategy, "bfloat16", steps=120)
    moved = vector(told[0]["weights"]) - vector(told[0]["begun"])
    assert len({each["digest"] for each in told}) == 1
    assert torch.count_nonzero(moved) > 0.01 * moved.numel()
