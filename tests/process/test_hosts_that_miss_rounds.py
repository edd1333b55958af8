"""Rounds of the first N hosts: the mean over the workers of those hosts, and of nobody else."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fork_server import ForkServer
from host_rounds_worker import optimizer_of
from mix_worker import batch, build, weights
from test_mixes import vector
from test_two_levels import environments

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("host_rounds_worker.py")
STEPS = 12
HOSTS = (0, 0, 1)  # by rank: its host
EVEN, UNEVEN = (0, 1, 2, 0, 1, 2), (0, 0, 0, 1, 1, 2)
FIRST = "backup_workers(first=2, hierarchical=True, chunk_bytes=2048)"
ALL = "push_pull(update='server', averaged=0.8, chunk_bytes=2048)"


def ranks_of(hosts: tuple[int, ...]) -> list[list[int]]:
    return [[r for r, host in enumerate(hosts) if host == h] for h in range(max(hosts) + 1)]


def train(
    fork_server: ForkServer,
    folder: Path,
    hosts: tuple[int, ...],
    strategy: str,
    late: Sequence[int] = (),
    **asked: Any,
) -> list[dict[str, Any]]:
    options = json.dumps({"late": late, "steps": STEPS, **asked})
    ranks = environments(hosts)
    run = fork_server.run(WORKER, strategy, str(folder), options, ranks=ranks)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(hosts))]


def alone(
    hosts: tuple[int, ...], makers: list[tuple[int, ...]], decay: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One process, in each round on the union of the batches of the hosts that made it.

    Returns:
        The weights, and their average over rounds.
    """
    model = build(torch.float64)
    optimizer = optimizer_of(model)
    average = now = vector(weights(model))
    for round_, made in enumerate(makers):
        ranks = [rank for host in made for rank in ranks_of(hosts)[host]]
        given = [batch(rank, round_, torch.float64) for rank in ranks]
        inputs, targets = (torch.cat(each) for each in zip(*given, strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        now = vector(weights(model))
        average = decay * average + (1 - decay) * now
    return now, average


def makers_of(told: list[dict[str, Any]], hosts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which hosts made each round, named by their lowest ranks; all servers say the same."""
    lists = [
        [(t, tuple(hosts[r] for r in ranks)) for t, ranks in each] for each in told[0]["makers"]
    ]
    assert all(each == lists[0] for each in lists)
    assert [round_ for round_, _ in lists[0]] == list(range(len(lists[0])))
    return [made for _, made in lists[0]]


@pytest.mark.parametrize("hosts", [EVEN, UNEVEN])
def test_a_round_is_one_process_on_the_batches_of_the_first_hosts(
    hosts: tuple[int, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    told = train(fork_server, tmp_path, hosts, FIRST, late=ranks_of(hosts)[2])
    makers = makers_of(told, hosts)
    assert len(makers) == STEPS
    assert {len(made) for made in makers} == {2}
    assert makers[:2] == [(0, 1), (0, 1)], "the third host was held back"
    assert len({each["digest"] for each in told}) == 1
    wanted, _ = alone(hosts, makers)
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    for ranks in ranks_of(hosts):
        assert len({tuple(told[rank]["rounds"]) for rank in ranks}) == 1, "a host is in one round"
    late = told[ranks_of(hosts)[2][0]]["rounds"]
    assert late[0] == 0
    assert late == sorted(set(late))
    assert {each["step"] for each in told} == {STEPS}


def test_a_host_that_loses_a_worker_is_lost_and_the_others_go_on(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Rank 1 speaks for the second host, and rank 4 of that host dies. The server is rank 0's: one
    that rank 1 had started would end with it."""
    asked = {"late": [], "steps": STEPS, "silence_s": 10, "dies": [4, 0], "servers": 1}
    options = json.dumps(asked)
    run = fork_server.start(WORKER, FIRST, str(tmp_path), options, ranks=environments(EVEN))
    codes = run.wait()
    assert codes[4] == -signal.SIGKILL, run.told()
    assert codes[1] == 69, run.told()
    assert [codes[rank] for rank in (0, 2, 3, 5)] == [0] * 4, run.told()
    assert "the others went on without this host" in run.told()
    assert run.remains.left() == []
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 2, 3, 5)]
    makers = makers_of(told, EVEN)
    assert len(makers) == STEPS
    assert set(makers) == {(0, 2)}
    assert len({each["digest"] for each in told}) == 1
    wanted, _ = alone(EVEN, makers)
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12


def test_servers_that_update_are_exact(fork_server: ForkServer, tmp_path: Path) -> None:
    told = train(fork_server, tmp_path, UNEVEN, ALL)
    assert len({each["digest"] for each in told}) == 1
    wanted, average = alone(UNEVEN, [(0, 1, 2)] * STEPS, decay=0.8)
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert all((vector(e["averaged"]) - average).abs().max() <= 1e-12 for e in told)


@pytest.mark.parametrize("strategy", [ALL, FIRST.replace("first=2", "backup=0")])
def test_a_checkpoint_of_hosts_continues_as_the_run_did(
    strategy: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    file = str(tmp_path / "saved.safetensors")
    through = train(fork_server, tmp_path, HOSTS, strategy, save=file)
    resumed = train(fork_server, tmp_path, HOSTS, strategy, load=file)
    assert {each["digest"] for each in resumed} == {through[0]["digest"]}
    assert all(each["rounds"] == list(range(STEPS // 2, STEPS)) for each in resumed)
