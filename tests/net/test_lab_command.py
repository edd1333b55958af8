"""``slipstream lab``: one lab by the command line alone, from up to down."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slipstream.apps.lab import Lab, Network, existing, find, remove, why_unavailable
from slipstream.planning.overlays import read_topology

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

LIMIT_S = 60
ATTEMPTS = 5  # a busy machine sends less than it is asked for
# As from a terminal, even where the tests themselves were started to ignore Ctrl-C.
SLIPSTREAM = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from slipstream.apps.cli import main; main()",
]


def slipstream(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLIPSTREAM, "lab", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"COLUMNS": "60"},  # a congested terminal cuts nothing off
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(text: str) -> list[list[str]]:
    """The cells of every host."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


@pytest.fixture(scope="module")
def lab() -> Iterator[Network]:
    made = slipstream("up", "--tiers=2x2", "--rate=100mbit,none,1gbit,2.5gbit", "--core-rate=1gbit")
    match = re.match(r"lab (slip[0-9a-f]{6}): 2 racks, core 1gbit\n", made.stdout)
    assert match is not None, made.stderr
    try:
        assert [row[4] for row in rows(made.stdout)] == ["100mbit", "none", "1gbit", "2.5gbit"]
        yield find(match[1])
    finally:
        remove(match[1])


def test_a_lab_as_a_topology_file(lab: Network) -> None:
    refused = slipstream("topology", f"--lab={lab.name}")
    assert refused.returncode == 2
    assert "a link without a rate" in refused.stderr
    with Lab(4, "100mbit", racks=2, core_rate="50mbit") as tiers:
        text = told(slipstream("topology", f"--lab={tiers.name}", "--servers=1"))
    network = read_topology(text, "the lab")
    assert [host.rack for host in network.hosts] == [0, 0, 1, 1]
    assert {host.link_bits_s for host in network.hosts} == {1e8}
    assert {rack.uplink_bits_s for rack in network.racks} == {5e7}
    assert (network.workers, network.servers) == ((0, 1, 2), (3,))


def test_status_shows_every_host(lab: Network) -> None:
    shown = told(slipstream("status", "--lab", lab.name))
    assert shown.startswith(f"lab {lab.name}: 2 racks, core 1gbit")
    for index, (row, host) in enumerate(zip(rows(shown), lab.hosts, strict=True)):
        assert row[:4] == [str(index), host.name, host.address, str(index // 2)]
        assert row[5:7] == ["up", "0"]
    broken = "slip00dead"
    subprocess.run(["ip", "netns", "add", f"{broken}-sw"], check=True)
    try:
        everything = told(slipstream("status"))
    finally:
        remove(broken)
    assert f"lab {broken} is broken; `slipstream lab down {broken}` removes it" in everything
    assert lab.hosts[3].address in everything


def test_status_shows_the_others_while_a_lab_is_removed(lab: Network) -> None:
    with Lab(2, None) as going:
        subprocess.run(["ip", "netns", "delete", going.hosts[0].name], check=True)
        until(lambda: len(find(going.name).hosts) == 1)  # the port goes with its host
        everything = told(slipstream("status"))
        named = slipstream("status", "--lab", going.name)
    reason = f"lab {going.name} has no port {going.name}-p0 any more"
    assert reason in everything
    assert lab.hosts[3].address in everything
    assert named.returncode == 2
    assert reason in named.stderr
    assert f"`slipstream lab down {going.name}`" in named.stderr


def test_exec_runs_there_and_hands_on_output_and_code(lab: Network) -> None:
    program = ("sh", "-c", "ip -brief address show; exit 7")
    for words in (("--", *program), program):
        done = slipstream("exec", "--lab", lab.name, "1", *words)
        assert done.returncode == 7
        assert f"{lab.hosts[1].address}/24" in done.stdout
    by_name = slipstream("exec", "--lab", lab.name, lab.hosts[2].name, "--", "ip", "address")
    assert lab.hosts[2].address in told(by_name)
    killed = slipstream("exec", "--lab", lab.name, "0", "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL
    missing = slipstream("exec", "--lab", lab.name, "4", "--", "true")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == f"slipstream: no host '4'; lab {lab.name} has 0 to 3\n"


def test_rates_of_hosts_and_core_change(lab: Network) -> None:
    told(slipstream("rate", "--lab", lab.name, "1", "50mbit"))
    told(slipstream("rate", "--lab", lab.name, "2", "none"))
    told(slipstream("rate", "--lab", lab.name, "core", "200mbit"))
    assert lab.rates == (1e8, 5e7, None, 2.5e9)
    assert lab.core_rate == 2e8
    refused = slipstream("rate", "--lab", lab.name, "0", "fast")
    assert refused.returncode == 2
    assert "'fast'" in refused.stderr
    assert lab.rates[0] == 1e8


def test_a_cable_is_pulled_and_plugged_in(lab: Network) -> None:
    told(slipstream("link", "--lab", lab.name, "3", "down"))
    assert lab.links_up() == (True, True, True, False)
    assert [row[5] for row in rows(told(slipstream("status", "--lab", lab.name)))][2:] == [
        *("up", "down")
    ]
    told(slipstream("link", "--lab", lab.name, "3", "up"))
    assert all(lab.links_up())


def test_a_host_freezes_and_thaws(lab: Network) -> None:
    sleeper = lab.hosts[0].popen(["sleep", "1000"])
    try:
        until(lambda: sleeper.pid in lab.hosts[0].pids())
        assert rows(told(slipstream("status", "--lab", lab.name)))[0][6] == "1"
        told(slipstream("freeze", "--lab", lab.name, "0"))
        becomes(sleeper.pid, "T")
        told(slipstream("thaw", "--lab", lab.name, "0"))
        becomes(sleeper.pid, "S")
    finally:
        sleeper.kill()
        sleeper.wait()


def becomes(pid: int, state: str) -> None:
    """A busy kernel lets it be stopped, and sleep again, a moment later."""
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_traffic_for_a_time_and_until_ctrl_c(lab: Network) -> None:
    most = 0
    for _ in range(ATTEMPTS):
        before = lab.bytes()
        told(slipstream("traffic", "--lab", lab.name, "0", "3", "20mbit", "--seconds=0.5"))
        moved = [b - a for a, b in zip(before, lab.bytes(), strict=True)]
        assert moved[0].sent < 1_500_000  # half a second of 2.5 MB/s
        assert moved[3].received == pytest.approx(moved[0].sent, rel=0.1)
        most = max(most, moved[0].sent)
        if most > 500_000:
            break
    assert most > 500_000
    with subprocess.Popen(
        [*SLIPSTREAM, "lab", "traffic", "--lab", lab.name, "0", "1", "5mbit"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as endless:
        seen = lab.bytes()[0].sent
        until(lambda: lab.bytes()[0].sent > seen + 50_000)
        os.killpg(endless.pid, signal.SIGINT)  # what a terminal does: all of them get it
        _, errors = endless.communicate(timeout=LIMIT_S)
    assert endless.returncode == 130
    assert "Traceback" not in errors
    until(lambda: lab.hosts[0].pids() | lab.hosts[1].pids() == set())
    itself = slipstream("traffic", "--lab", lab.name, "0", "0", "5mbit")
    assert itself.returncode == 2
    assert "name two hosts" in itself.stderr


def test_down_ends_what_runs_and_removes_the_lab(lab: Network) -> None:
    """The last of this file: the lab is gone after it."""
    sleeper = lab.hosts[2].popen(["sleep", "1000"])
    until(lambda: sleeper.pid in lab.hosts[2].pids())
    assert told(slipstream("down", lab.name)) == f"removed {lab.name}\n"
    assert sleeper.wait(LIMIT_S) == -signal.SIGTERM
    assert lab.name not in existing()
    again = slipstream("down", lab.name)
    assert (again.returncode, again.stdout) == (2, "")
    assert f"there is no lab '{lab.name}'" in again.stderr
