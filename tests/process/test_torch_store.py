"""Torch's default group and slipstream share one store, whichever comes first."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer, Run
from launches import SLIPSTREAM, TORCHRUN, Launch
from ports import free_port

from slipstream.errors import LaunchError
from slipstream.runtime.process.environment import (
    ELSEWHERE,
    address_towards,
    is_loopback,
    resolves_to_loopback,
)

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("torch_store_worker.py")
SECRET = {"SLIPSTREAM_SECRET": "torch's store is open to all"}
TALKS = {
    "torch first": ["before", "within", "afterwards", "again"],
    "slipstream first": ["before", "within", "afterwards", "again"],
    "torch after distribute": ["within", "afterwards", "again"],
    "torch afterwards": ["afterwards", "again"],
    "job's": ["before", "within"],
    "job's, after distribute": ["within"],
}
BY_LAUNCHER = ("torch first", "slipstream first", "torch after distribute", "job's")
BY_TORCHRUN = ("torch first", "slipstream first")


@pytest.fixture(scope="module")
def launched(launch: Callable[..., Launch]) -> dict[tuple[str, str], Launch]:
    """All started at a time: most of each is spent importing torch."""
    run = (SLIPSTREAM, "run", "--workers=2")
    jobs = {("run", case): launch(*run, str(WORKER), case) for case in BY_LAUNCHER}
    for case in BY_TORCHRUN:
        elastic = (TORCHRUN, "--nproc-per-node=2", f"--master-port={free_port()}")
        jobs["torchrun", case] = launch(*elastic, str(WORKER), case, env=SECRET)
    return jobs


def expected(case: str) -> list[str]:
    return [f"{when} 3 [0, 1]" for when in TALKS[case]]


def said(text: str) -> list[str]:
    return re.findall(r"^\w+ 3 \[0, 1\]$", text, re.MULTILINE)


def weights(folder: Path) -> set[str]:
    return {(folder / f"weights.{rank}").read_text() for rank in range(2)}


@pytest.mark.parametrize("case", BY_LAUNCHER)
def test_under_the_launcher(launched: dict[tuple[str, str], Launch], case: str) -> None:
    job = launched["run", case]
    assert job.wait() == 0, job.stderr
    assert said(job.stdout) == expected(case)
    assert len(weights(job.folder)) == 1
    assert job.own_lines == []
    assert job.remains.left() == []


@pytest.mark.parametrize("case", BY_TORCHRUN)
def test_under_torchrun(launched: dict[tuple[str, str], Launch], case: str) -> None:
    job = launched["torchrun", case]
    assert job.wait() == 0, job.stderr
    assert sorted(said(job.stdout)) == sorted(2 * expected(case))
    assert weights(job.folder) == weights(launched["run", case].folder)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [*((case, "push_pull") for case in TALKS), ("slipstream first", "allreduce"), ("job's", "ako")],
)
def test_under_a_scheduler(fork_server: ForkServer, case: str, strategy: str) -> None:
    """Rank 0 opens the port itself; with ako the job keeps its store open."""
    env = {**SECRET, "MASTER_PORT": str(free_port())}
    run = fork_server.run(WORKER, case, strategy, ranks=2, env=env)
    assert_talked(run, case)


def assert_talked(run: Run, case: str) -> None:
    assert set(run.codes.values()) == {0}, run.told()
    for rank in range(2):
        assert said(run.stdout(rank)) == expected(case)
    assert run.own_lines() == []


def test_a_name_of_this_host_is_no_hindrance(fork_server: ForkServer) -> None:
    """All ranks on one host: the store listens on loopback, whatever MASTER_ADDR is."""
    env = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": "192.0.2.77", "LOCAL_WORLD_SIZE": "2"}
    run = fork_server.run(WORKER, "slipstream first", ranks=2, env=SECRET | env)
    assert_talked(run, "slipstream first")


def has_own_name() -> bool:
    """Whether this host's name resolves to loopback, though it has an address that others reach."""
    try:
        return resolves_to_loopback(socket.gethostname()) and not is_loopback(
            address_towards(ELSEWHERE, 9)
        )
    except LaunchError:
        return False


@pytest.mark.skipif(not has_own_name(), reason="this host's name is not one of loopback")
def test_a_host_whose_own_name_is_one_of_loopback(fork_server: ForkServer) -> None:
    env = {"MASTER_PORT": str(free_port()), "MASTER_ADDR": socket.gethostname()}
    run = fork_server.run(WORKER, "slipstream first", ranks=2, env=SECRET | env)
    assert_talked(run, "slipstream first")


def test_learners_have_a_group_too(launch: Callable[..., Launch]) -> None:
    job = launch(SLIPSTREAM, "run", "--workers=2", str(WORKER), "job's, after distribute", "gadei")
    assert job.wait() == 0, job.stderr
    assert said(job.stdout) == expected("job's, after distribute")


def test_a_collective_that_a_peer_has_left_tells_why(fork_server: ForkServer) -> None:
    """Torch says only that the connection is closed."""
    env = {**SECRET, "MASTER_PORT": str(free_port())}
    run = fork_server.run(WORKER, "fails", ranks=2, env=env)
    assert 0 not in run.codes.values(), run.told()
    assert "ZeroDivisionError: rank 1 has enough" in run.stderr(1)
    assert "Traceback" not in run.stderr(0), run.told()


def test_torchs_store_takes_the_users_own_secret(fork_server: ForkServer, tmp_path: Path) -> None:
    """It listens on all addresses, so no token may lie there."""
    env = {"MASTER_PORT": str(free_port()), "XDG_CONFIG_HOME": str(tmp_path)}
    assert_talked(fork_server.run(WORKER, "torch first", ranks=2, env=env), "torch first")
    assert (tmp_path / "slipstream" / "secret").exists()


def test_torchs_store_without_a_secret_is_refused(fork_server: ForkServer) -> None:
    env = {"MASTER_PORT": str(free_port()), "XDG_CONFIG_HOME": "/dev/null/config"}
    run = fork_server.run(WORKER, "torch first", ranks=2, env=env)
    assert 0 not in run.codes.values(), run.told()
    assert any("init_process_group) listens on every address" in line for line in run.own_lines())
