"""Whole jobs over real links between hosts, as a scheduler would start them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.apps.lab import Host, Lab, why_unavailable

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

WORKER = Path(__file__).with_name("hosts_worker.py")
SECRET = "a secret of this test, long enough"
LIMIT_S = 200
LIGHT = str(Path(__file__).parents[1] / "light")  # so that workers start sooner; see there


def run_jobs(lab: Lab, *strategies: str, encrypt: bool) -> list[dict[str, Any]]:
    """One worker a host, told what a scheduler tells it and the secret; figures by strategy."""
    shared = {
        "WORLD_SIZE": str(len(lab.hosts)),
        "MASTER_ADDR": lab.hosts[0].address,
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": LIGHT,
        "SLIPSTREAM_SECRET": SECRET,
        "SLIPSTREAM_ENCRYPT": "1" if encrypt else "0",
    }
    workers = [
        host.popen(
            [sys.executable, WORKER, *strategies],
            env={**shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(lab.hosts)
    ]
    said = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    errors = "\n".join(stderr for _, stderr in said)
    assert [worker.returncode for worker in workers] == [0] * len(workers), errors
    return [json.loads(stdout) for stdout, _ in said]


def test_hosts_train_together_encrypted_or_not_and_stats_agree_with_the_kernel() -> None:
    strategies = ("push_pull", "push_pull(update='server')", "allreduce")
    with Lab(hosts=3, rate=None) as lab:
        encrypted = run_jobs(lab, *strategies, encrypt=True)
        before = lab.bytes()
        plain = run_jobs(lab, "push_pull", encrypt=False)
        moved = [after - earlier for after, earlier in zip(lab.bytes(), before, strict=True)]
    for strategy in strategies:
        assert len({said[strategy]["weights_sha256"][0] for said in encrypted}) == 1
        assert encrypted[0][strategy]["servers"] == (0 if strategy == "allreduce" else 3)
    servers_or_not = [said["push_pull"]["weights_sha256"] for said in [*encrypted, *plain]]
    servers_or_not += [encrypted[0]["push_pull(update='server')"]["weights_sha256"]]
    assert all(hashes == servers_or_not[0] for hashes in servers_or_not)

    # A link carries its worker's bytes and those of the server beside it; over all hosts every
    # byte is sent by one and received by another.
    on_links = sum(traffic.sent for traffic in moved)
    told = [said["push_pull"]["bytes"] for said in plain]
    assert sum(b["sent"] + b["received"] + b["control"] for b in told) == pytest.approx(
        on_links, rel=0.05
    )


def test_a_job_on_one_host_listens_on_loopback_whatever_master_addr_says() -> None:
    """Without a secret the token lies in the store, which nobody elsewhere may reach."""
    with Lab(hosts=2, rate=None) as lab:
        host, elsewhere = lab.hosts
        shared = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": host.address,
            "MASTER_PORT": "29500",
            "SLIPSTREAM_INTERFACE": host.address,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": LIGHT,
        }
        workers = [
            host.popen(
                [sys.executable, WORKER, "push_pull"],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "HOLD": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        begun = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
        listening = said_by(host, "ss", "-Hltn").splitlines()
        reached = said_by(elsewhere, sys.executable, "-c", KNOCK, host.address).strip()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        said = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert begun == ["joined\n"] * 2
    places = [line.split()[3] for line in listening]
    assert len(places) == 3  # the store and two workers
    assert [place for place in places if not place.startswith("127.0.0.1:")] == []
    assert reached == "refused"


def said_by(host: Host, *command: str) -> str:
    process = host.popen(command, stdout=subprocess.PIPE)
    return process.communicate(timeout=LIMIT_S)[0]


KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 29500), 5)
    print("let in")
except ConnectionRefusedError:
    print("refused")
"""
