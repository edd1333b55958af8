"""One script, unchanged: alone, under ``slipstream run``, under torchrun, under a scheduler."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import distance
from fork_server import ForkServer
from launches import SLIPSTREAM, TORCHRUN, Launch, until
from ports import free_port

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).with_name("ways_worker.py")
STEPS, BATCH = 20, 12
SECRET = {"SLIPSTREAM_SECRET": "torchrun's store is open to all"}
MODEL_BYTES = 4 * (2 * 512 * 512 + 2 * 512)
RUN = (SLIPSTREAM, "run", "--workers=2")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def prometheus_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def ways(launch: Callable[..., Launch], prometheus_port: int) -> dict[str, Launch]:
    """All started at a time: most of each is spent importing torch."""
    elastic = (TORCHRUN, "--nproc-per-node=2")
    again = (*elastic, "--standalone", "--max-restarts=1")
    port = f"--master-port={free_port()}"
    watched = ("--log=run.jsonl", "--tensorboard=board", f"--prometheus={prometheus_port}")
    to_json = {"SLIPSTREAM_JSON": "figures.json"}
    by_environment = {"SLIPSTREAM_STRATEGY": "allreduce"}
    script = str(SCRIPT)
    return {
        "run": launch(*RUN, "--json=figures.json", *watched, script, env={"HOLD": "1"}),
        "run, servers": launch(*RUN, "--servers=2", "--json=figures.json", script),
        "run, option": launch(*RUN, "--strategy=all_to_all", "--json=figures.json", script),
        "torchrun": launch(*elastic, port, script, env=SECRET | to_json | by_environment),
        "torchrun, restarted": launch(*again, script, env=SECRET | {"FAIL_ATTEMPT": "0"}),
    }


@pytest.fixture(scope="module")
def finished(ways: dict[str, Launch], scraped: str) -> dict[str, Launch]:
    assert scraped
    for name, job in ways.items():
        assert job.wait() == 0, f"{name}: {job.stderr}"
    return ways


@pytest.fixture(scope="module")
def scraped(ways: dict[str, Launch], prometheus_port: int) -> str:
    """What Prometheus saw half-way; then the job may go on."""
    url = f"http://127.0.0.1:{prometheus_port}/metrics"
    seen = ""

    def half_way() -> bool:
        nonlocal seen
        try:
            seen = urllib.request.urlopen(url, timeout=10).read().decode()
        except OSError:
            return False
        return f"slipstream_step {STEPS // 2 + 1}.0" in seen

    until(half_way, f"the metrics of half-way\n{ways['run'].stderr}")
    (ways["run"].folder / "go").touch()
    return seen


@pytest.fixture(scope="module")
def alone(fork_server: ForkServer) -> Path:
    """Not even RANK is set."""
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    run = fork_server.run(SCRIPT, ranks=[unset], env={"SLIPSTREAM_JSON": "figures.json"})
    assert run.codes == {0: 0}, run.told()
    return run.folder


def weights(folder: Path) -> Weights:
    return dict(torch.load(folder / "weights.pt"))


def figures(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "figures.json").read_text()))


def assert_same_bits(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("way", ["run, servers", "torchrun, restarted"])
def test_same_bits_however_it_is_started(finished: dict[str, Launch], way: str) -> None:
    assert_same_bits(weights(finished[way].folder), weights(finished["run"].folder))


@pytest.mark.parametrize("way", ["run", "run, option", "torchrun"])
def test_two_workers_train_like_one_alone(
    finished: dict[str, Launch], alone: Path, way: str
) -> None:
    one, two = weights(alone), weights(finished[way].folder)
    assert one.keys() == two.keys()
    for name in one:
        assert distance(two[name], one[name]) <= 1e-5, name


def test_nothing_set_but_what_a_scheduler_sets(
    fork_server: ForkServer, finished: dict[str, Launch]
) -> None:
    run = fork_server.run(SCRIPT, ranks=2, env={"MASTER_PORT": str(free_port())})
    assert set(run.codes.values()) == {0}, run.told()
    assert_same_bits(weights(run.folder), weights(finished["run"].folder))


def test_alone_there_is_no_traffic(alone: Path) -> None:
    told = figures(alone)
    assert (told["workers"], told["servers"], told["steps"]) == (1, 0, STEPS)
    assert told["bytes"]["sent"] == told["bytes"]["received"] == 0
    assert len(told["weights_sha256"]) == 1


@pytest.mark.parametrize(
    ("way", "strategy", "servers"),
    [
        ("run", "push_pull", 1),
        ("run, servers", "push_pull", 2),
        ("run, option", "all_to_all", 0),
        ("torchrun", "allreduce", 0),
    ],
)
def test_figures(finished: dict[str, Launch], way: str, strategy: str, servers: int) -> None:
    told = figures(finished[way].folder)
    assert (told["strategy"], told["workers"], told["servers"]) == (strategy, 2, servers)
    assert told["steps"] == STEPS
    assert told["samples"] == STEPS * BATCH
    assert told["samples_per_s"] == pytest.approx(told["samples"] / told["wall_s"])
    assert 0 < told["wait_s"] < told["wall_s"]
    assert told["loss"] > 0
    assert told["accuracy"] == 0.25
    assert set(told["faults"].values()) == {0}
    assert len(told["weights_sha256"]) == 2
    assert len(set(told["weights_sha256"])) == 1
    assert re.fullmatch("[0-9a-f]{64}", told["weights_sha256"][0])
    assert sum(told["bytes"]["by_scheme"].values()) == (
        told["bytes"]["sent"] + told["bytes"]["received"]
    )


# Each byte is counted once at a worker where the other end is a server, and at both ends where
# workers talk to each other.
@pytest.mark.parametrize(
    ("strategy", "ends", "models"),
    [("push_pull", 1, 2 * 2 / 3), ("allreduce", 2, 2 * 2 / 3), ("all_to_all", 2, 2)],
)
def test_bytes_a_worker_and_step(
    fork_server: ForkServer, strategy: str, ends: int, models: float
) -> None:
    env = {"SLIPSTREAM_JSON": "figures.json", "SLIPSTREAM_STRATEGY": strategy}
    run = fork_server.run(SCRIPT, ranks=3, env=env)
    assert set(run.codes.values()) == {0}, run.told()
    traffic = figures(run.folder)["bytes"]
    moved = (traffic["sent"] + traffic["received"]) / ends
    assert moved / 3 / STEPS == pytest.approx(models * MODEL_BYTES, rel=0.03)
    assert traffic["control"] < 0.03 * moved + 2 * MODEL_BYTES  # and the first copy of the weights


def test_two_workers_bytes(finished: dict[str, Launch]) -> None:
    traffic = figures(finished["run"].folder)["bytes"]
    moved = traffic["sent"] + traffic["received"]
    assert moved / 2 / STEPS == pytest.approx(2 * 1 / 2 * MODEL_BYTES, rel=0.03)


def test_prometheus(scraped: str) -> None:
    for name in ("loss", "accuracy", "samples", "sent_bytes", "received_bytes", "wait_s"):
        assert re.search(rf"^slipstream_{name} [0-9.e+-]+$", scraped, re.MULTILINE), scraped


def test_run_log(finished: dict[str, Launch]) -> None:
    lines = (finished["run"].folder / "run.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert events[0].items() >= {"event": "start", "strategy": "push_pull", "workers": 2}.items()
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(1, STEPS + 1)]
    assert all(event["loss"] > 0 and event["sent_bytes"] >= 0 for event in events[1:-1])
    assert events[-1]["event"] == "end"
    times = [event["elapsed_s"] for event in events]
    assert times == sorted(times)


@pytest.mark.filterwarnings("default")  # tensorboard's own
def test_tensorboard(finished: dict[str, Launch]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(finished["run"].folder / "board"))
    board.Reload()
    assert "slipstream/loss" in board.Tags()["scalars"]
    assert [event.step for event in board.Scalars("slipstream/loss")] == [*range(1, STEPS + 1)]


def test_nothing_is_left(finished: dict[str, Launch]) -> None:
    for name, job in finished.items():
        assert job.remains.left() == [], name
        if name != "torchrun, restarted":
            assert job.own_lines == [], name


def test_a_worker_that_exits_with_0_in_the_middle_fails_the_job(
    launch: Callable[..., Launch],
) -> None:
    """Also where the others can do without it, and nobody but the launcher minds."""
    jobs = [
        launch(*RUN, f"--strategy={strategy}", str(SCRIPT), env={"EXIT_0": "1"})
        for strategy in ("push_pull", "ako")
    ]
    for job in jobs:
        assert job.wait() == 1, job.stderr
        assert job.own_lines[-1].startswith(
            "slipstream: rank 1 exited with code 0 before it had left the job"
        )
