"""``slipstream run --lab``: a job on hosts that are made for it, and are gone after it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.apps.lab import Lab, existing, why_unavailable

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
WORKER = Path(__file__).with_name("lab_worker.py")
BYTES_WORKER = Path(__file__).with_name("host_bytes_worker.py")
LIGHT = str(Path(__file__).parents[1] / "light")  # so that workers start sooner; see there
LIMIT_S = 90
SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
with open(f"rank{os.environ['RANK']}.pids.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, file.name.removesuffix(".part"))
time.sleep(1000)
"""
GROUP = """
import torch, slipstream
with slipstream.init() as job:
    job.init_process_group()
    total = torch.tensor([job.rank + 1.0])
    torch.distributed.all_reduce(total)
    assert torch.distributed.new_group([0, 1]) is not None
    print("sum", total.item())
"""
WHERE = "import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'])"


def command(*arguments: object) -> list[str]:
    return [SLIPSTREAM, "run", *map(str, arguments)]


def environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
    return own | {"PYTHONPATH": LIGHT}


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def figures(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text()) for file in folder.glob("rank*.json")]
    return sorted(found, key=lambda told: told["rank"])


def until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.02)


def lab_of(addresses: str) -> str | None:
    """The lab that has this address, if it is still there: its name says its subnet."""
    _, high, low, _ = re.findall(r"\d+", addresses)[:4]
    named = f"slip{int(high):02x}{int(low):02x}"
    return next((name for name in existing() if name.startswith(named)), None)


def test_torchs_default_group_spans_hosts(tmp_path: Path) -> None:
    """By itself gloo takes the address of the host's name, which is often one of loopback."""
    script = tmp_path / "group.py"
    script.write_text(GROUP)
    done = run(tmp_path, "--lab=2x1gbit", script)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("sum 3.0", done.stdout)) == ["sum 3.0"] * 2


def test_workers_and_servers_have_hosts_of_their_own_and_stats_agree_with_the_kernel(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "--lab=3x200mbit", "--servers=1", "--no-encrypt", WORKER)
    assert done.returncode == 0, done.stderr
    first, second = figures(tmp_path)  # as many workers as the server leaves hosts
    here = os.readlink("/proc/self/ns/net")
    assert len({first["namespace"], second["namespace"], here}) == 3
    assert re.fullmatch(r"tcp://10\.\d+\.\d+\.3:\d+", first["servers"])
    for told in (first, second):
        assert told["stats"]["servers"] == 1
        counted = told["stats"]["bytes"]
        on_link = told["moved"]["sent"] + told["moved"]["received"]
        assert counted["sent"] > 8 * 1_000_000
        assert counted["sent"] + counted["received"] + counted["control"] == pytest.approx(
            on_link, rel=0.05
        )
    assert lab_of(first["servers"]) is None


def test_a_failing_script_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{WHERE}\nif os.environ['RANK'] == '1': raise SystemExit(5)")
    done = run(tmp_path, "--lab=2xnone", script)
    assert done.returncode == 5
    assert "rank 1 exited with code 5" in done.stderr
    address = done.stdout.split()[-1]
    assert re.fullmatch(r"10\.\d+\.\d+\.1", address)
    assert lab_of(address) is None


def test_learners_on_hosts_of_their_own_are_told_the_way_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import slipstream, torch\n"
        "with slipstream.init() as job:\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    job.distribute(model, optimizer, slipstream.gadei())\n"
    )
    done = run(tmp_path, "--lab=2xnone", script)
    assert done.returncode != 0
    assert done.stderr.count("leave out --lab and --servers") == 1, done.stderr


def test_a_lab_that_is_up_is_used_and_stays(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WHERE)
    with Lab(hosts=2, rate=None) as lab:
        done = run(tmp_path, f"--lab={lab.name}", script)
        assert (done.returncode, done.stderr) == (0, "")
        lines = sorted(line.removeprefix("[rank 1] ") for line in done.stdout.splitlines())
        assert lines == [f"{rank} {lab.hosts[0].address}" for rank in range(2)]
        assert lab.name in existing()
        for workers, servers, says in (
            (3, 0, "3 workers on 2 hosts: take a multiple of 2, so that all hosts have equally"),
            (2, 1, "all 2 workers on one host would not be reached by servers on others"),
            (1, 2, "2 servers need a host each, and leave none of the lab's 2 for workers"),
        ):
            done = run(
                tmp_path, f"--lab={lab.name}", f"--workers={workers}", "--servers", servers, script
            )
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(f"slipstream: {says}")


def test_a_host_with_several_workers_moves_no_more_bytes_than_with_one(tmp_path: Path) -> None:
    on_link = []
    for workers in (2, 4):
        folder = tmp_path / str(workers)
        folder.mkdir()
        done = run(folder, "--lab=2x200mbit", "--workers", workers, "--no-encrypt", BYTES_WORKER)
        assert done.returncode == 0, done.stderr
        told = figures(folder)
        assert [one["local"] for one in told] == [str(r % (workers // 2)) for r in range(workers)]
        assert len({one["digest"] for one in told}) == 1
        on_link.append([max(o["moved"] for o in told if o["host"] == h) for h in range(2)])
    for alone, several in zip(*on_link, strict=True):
        assert several == pytest.approx(alone, rel=0.03)


def test_a_killed_command_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEPER)
    with subprocess.Popen(
        command("--lab=2xnone", script), cwd=tmp_path, env=environment(), start_new_session=True
    ) as launcher:
        notes = [tmp_path / f"rank{rank}.pids" for rank in range(2)]
        until(lambda: all(note.exists() for note in notes), "both workers")
        pids = [int(pid) for note in notes for pid in note.read_text().split()]
        assert len(pids) == 4
        namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(namespaces) == 2
        name = next(n for n in existing() if set(pids) & lab_pids(n))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(LIMIT_S)
        until(lambda: name not in existing(), "the lab to be removed")
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "its programs to end")


def lab_pids(name: str) -> set[int]:
    listed = [
        subprocess.run(
            ["ip", "netns", "pids", f"{name}-h{host}"], capture_output=True, text=True, check=False
        ).stdout
        for host in range(2)
    ]
    return {int(pid) for text in listed for pid in text.split()}
