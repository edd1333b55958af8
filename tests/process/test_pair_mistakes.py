"""What cannot be trained with several pairs is said before anything starts, alike on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fork_server import ForkServer

pytestmark = pytest.mark.process

Said = list[dict[str, list[str]]]  # by rank, by mistake: the kind of error, and its text

WORKER = Path(__file__).with_name("pair_mistakes_worker.py")
TOLD = {
    "none": ("ConfigError", "an empty list"),
    "same_optimizer": ("ConfigError", "given the same optimizer twice"),
    "again": ("ConfigError", "given the same optimizer twice"),
    "shared_parameter": ("ConfigError", "'bias' is in the optimizers of pair 0 and pair 1"),
    "sliced": ("ConfigError", "ako trains one model with one optimizer, and was given 2 pairs"),
    "in_shared_memory": ("ConfigError", "gadei trains one model with one optimizer"),
    "too_late": ("ConfigError", "comes before the first step"),
    "after_the_second": ("ConfigError", "comes before the first step"),
    "another_strategy": ("ConfigError", "with allreduce before, and now with all_to_all"),
    "other_settings": ("ConfigError", "with allreduce before, and now with other settings"),
    "no_pairs": ("ConfigError", "or a list of such pairs; it was given a Linear"),
    "wrong_order": ("ConfigError", "in this order; it was given a SGD and a Linear"),
    "frozen": ("ConfigError", "no parameter that requires a gradient"),
    "only_factors": ("ConfigError", "factors: it knows no dense route"),
    "too_early": ("ConfigError", "job.backward_for comes after job.distribute"),
    "whose": ("ConfigError", "takes an optimizer that job.distribute has returned"),
}
TOGETHER = {
    "first_of_some": ("ConfigError", "would wait for each other there; use first=2, close_after_s"),
}
RUNNING = {
    "added_later": ("RuntimeFault", "call that optimizer's step() before the next backward()"),
    "converted": ("RuntimeFault", "float64 now, but was torch.float32 at job.distribute"),
}
DIFFERENT = {"one_rank_more": "pair 2", "one_rank_wrong": "LBFGS"}


def told(fork_server: ForkServer, folder: Path, ranks: int, *names: str) -> Said:
    run = fork_server.run(WORKER, str(folder), *names, ranks=ranks, limit_s=200)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return [json.loads((folder / f"told.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[1, 2])
def said(
    request: pytest.FixtureRequest,
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Said:
    running = {**TOGETHER, **RUNNING} if request.param > 1 else ()
    folder = tmp_path_factory.mktemp("mistakes")
    return told(fork_server, folder, request.param, *TOLD, *running)


@pytest.mark.parametrize("name", TOLD)
def test_mistakes_are_refused_with_a_way_out(said: Said, name: str) -> None:
    kind, text = TOLD[name]
    for each in said:
        assert each[name][0] == kind, each[name]
        assert text in each[name][1]
    assert len({each[name][1] for each in said}) == 1


def test_rounds_that_workers_may_miss_are_refused(said: Said) -> None:
    for name, (kind, text) in TOGETHER.items() if len(said) > 1 else ():
        assert all(each[name][0] == kind and text in each[name][1] for each in said), said


def test_what_goes_wrong_later_ends_the_job(said: Said) -> None:
    for name, (kind, text) in RUNNING.items() if len(said) > 1 else ():
        assert any(each[name][0] == kind and text in each[name][1] for each in said), said


def test_ranks_must_give_the_same_pairs(fork_server: ForkServer, tmp_path: Path) -> None:
    for each in told(fork_server, tmp_path, 2, *DIFFERENT):
        for name, text in DIFFERENT.items():
            assert each[name][0] != "none"
            assert text in each[name][1]
