"""Slices by real processes: exactly once, past the dead, and to the same weights in the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch
from slices_worker import factor

pytestmark = pytest.mark.process

LEARNER = Path(__file__).with_name("flow_worker.py")
COUNTER = Path(__file__).with_name("slices_worker.py")
RANKS, STEPS = 4, 40
TENSORS = ("large", "small", "odd")  # of the worker's model
Told = dict[str, Any]


def run(fork_server: ForkServer, folder: Path, worker: Path, *cases: Told, ranks: int) -> list[int]:
    file = folder / "cases.json"
    file.write_text(json.dumps([{"steps": STEPS, **case} for case in cases]))
    run = fork_server.run(worker, str(file), ranks=ranks, env={}, limit_s=200)
    assert run.remains.left() == []
    return [run.codes[rank] for rank in range(ranks)]


def told(folder: Path, case: Told, ranks: list[int]) -> list[Told]:
    """What each rank said, none of which may be an error."""
    said = [json.loads((folder / f"{case['name']}.{rank}.json").read_text()) for rank in ranks]
    for each in said:
        assert "error" not in each, each["trace"]
    return said


# ---- exactly once

COUNTED = [
    {"name": "all at once", "strategy": "ako(partitions=1)"},
    {"name": "rotating", "strategy": "ako(partitions=3)", "flushes": [11, 12]},
    {"name": "many", "strategy": "ako(partitions=11, staleness=2)"},
    {"name": "the same to all", "strategy": "ako(partitions=3, schedule='same')", "flushes": [7]},
    {"name": "one slow link's worth", "strategy": "ako(rate='20mbit')", "flushes": [30]},
    {"name": "loaded", "strategy": "ako(partitions=2)", "loads": True},
    {"name": "swapped", "strategy": "ako(partitions=2)", "swaps": [5, 6, 20], "in_block": True},
]
BY_HAND = {**COUNTED[-1], "name": "swapped by hand", "in_block": False}


@pytest.fixture(scope="module")
def counted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counted")
    assert run(fork_server, folder, COUNTER, *COUNTED, BY_HAND, ranks=RANKS) == [0] * RANKS
    return folder


def everything(steps: int) -> float:
    return float(sum(factor(rank, step) for rank in range(RANKS) for step in range(steps)))


@pytest.mark.parametrize("case", COUNTED, ids=[case["name"] for case in COUNTED])
def test_every_worker_has_every_update_of_every_worker_once(counted: Path, case: Told) -> None:
    for each in told(counted, case, list(range(RANKS))):
        assert each["counted"] == [everything(STEPS)] * 2
        drained = [[everything(at + 1)] * 2 for at in case.get("flushes", [])]
        assert each.get("drained", []) == drained
        assert each["warned"] == []


def test_weights_that_are_swapped_by_hand_are_named(counted: Path) -> None:
    """Those that rank 0 has put back lack what its peers have added meanwhile."""
    said = told(counted, BY_HAND, list(range(RANKS)))
    (warning,) = (message for each in said for message in each["warned"])
    # A message may have reached any of them when the loop put its values back.
    assert any(f"'{name}'" in warning for name in TENSORS)
    assert "within `with job.swapped_weights():`" in warning
    assert said[0]["counted"] != [everything(STEPS)] * 2


def test_partitions_follow_from_the_rate_that_is_given(counted: Path) -> None:
    for each in told(counted, COUNTED[-3], list(range(RANKS))):
        slices = each["slices"]
        assert slices["partitions"] > 1
        assert slices["link_bytes_s"] == 20e6 / 8
        assert slices["predicted_bytes_s"] < 20e6 / 8 * 1.2


# ---- learning

LEARNT = [
    {"name": "plain", "strategy": "ako(partitions=2)", "momentum": False, "lr": 0.3},
    {"name": "momentum", "strategy": "ako(partitions=3)", "mean_at": 30},
    {"name": "adam", "strategy": "ako()", "optimizer": "Adam", "momentum": False, "lr": 0.01},
    {
        "name": "grown",
        "strategy": "ako(partitions=2, growth='sqrt', warm_steps=10)",
        "pause_s": [0.0, 0.004, 0.008],
    },
]


@pytest.fixture(scope="module")
def learnt(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learnt")
    assert run(fork_server, folder, LEARNER, *LEARNT, ranks=3) == [0] * 3
    return folder


@pytest.mark.parametrize("case", LEARNT, ids=[case["name"] for case in LEARNT])
def test_workers_learn_and_end_with_the_same_bits(learnt: Path, case: Told) -> None:
    said = told(learnt, case, [0, 1, 2])
    assert len({each["digest"] for each in said}) == 1
    assert {each["step"] for each in said} == {STEPS}
    for each in said:
        assert sum(each["losses"][-3:]) < 0.8 * sum(each["losses"][:3])


def test_workers_are_apart_until_they_flush(learnt: Path) -> None:
    said = told(learnt, LEARNT[1], [0, 1, 2])
    (apart,) = {each["apart"] for each in said}
    assert 1e-5 < apart < 0.5
    assert {each["together"] for each in said} == {0.0}
    assert len({each["flushed"] for each in said}) == 1


def test_training_goes_on_from_a_checkpoint(fork_server: ForkServer, tmp_path: Path) -> None:
    through = {**LEARNT[1], "name": "through", "save_at": 20, "save": str(tmp_path / "saved")}
    again = {**LEARNT[1], "name": "again", "load": through["save"]}
    assert run(fork_server, tmp_path, LEARNER, through, again, ranks=3) == [0] * 3
    (saved,) = {each["saved"] for each in told(tmp_path, through, [0, 1, 2])}
    said = told(tmp_path, again, [0, 1, 2])
    assert {each["loaded"] for each in said} == {saved}
    assert {len(each["losses"]) for each in said} == {STEPS - 20}


def test_workers_may_end_after_different_numbers_of_steps(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Far more than they may be apart while all train."""
    case = {
        "name": "uneven",
        "strategy": "ako(partitions=2, staleness=3)",
        "more_steps": [0, 60, 5],
    }
    assert run(fork_server, tmp_path, LEARNER, case, ranks=3) == [0] * 3
    said = told(tmp_path, case, [0, 1, 2])
    assert [each["step"] for each in said] == [STEPS, STEPS + 60, STEPS + 5]
    assert len({each["digest"] for each in said}) == 1


# ---- the dead


@pytest.mark.parametrize("schedule", ["rotate", "same"])
def test_the_rest_go_on_when_one_dies(
    fork_server: ForkServer, tmp_path: Path, schedule: str
) -> None:
    strategy = f"ako(partitions=2, staleness=2, schedule='{schedule}')"
    case = {"name": "died", "strategy": strategy, "killed": [1, 9], "mean_at": 30}
    assert run(fork_server, tmp_path, LEARNER, case, ranks=3) == [0, -9, 0]
    said = told(tmp_path, case, [0, 2])
    assert {each["step"] for each in said} == {STEPS}
    assert {each["together"] for each in said} == {0.0}  # whatever each has got of the dead one's
    assert len({each["digest"] for each in said}) == 1


# ---- after the last step

LATE_SWAP = """
import time
from pathlib import Path
import torch, slipstream

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def wait_until(holds):
    while not holds():
        time.sleep(0.01)

def step():
    optimizer.zero_grad()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()

with slipstream.init() as job:
    model, optimizer = job.distribute(model, optimizer, "ako")
    step()
    if job.rank == 0:
        own = model.weight.detach().clone()
        model.weight.data.fill_(0.5)
        Path("swapped").touch()
        wait_until(lambda: (model.weight != 0.5).any())
        model.weight.data.copy_(own)
    else:
        wait_until(Path("swapped").exists)
        step()
"""


def test_updates_that_are_lost_after_the_last_step_are_named(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    script = tmp_path / "late_swap.py"
    script.write_text(LATE_SWAP)
    job = launch(SLIPSTREAM, "run", "--workers=2", str(script))
    assert job.wait() == 0, job.stderr
    assert job.stderr.count("the loop has written weights outside of optimizer.step()") == 1
    assert "'weight'" in job.stderr
