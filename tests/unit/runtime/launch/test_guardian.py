"""Process groups that are signalled, and those that must not be."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.runtime.launch import guardian
from slipstream.runtime.launch.guardian import ChildGroup, sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfds are Linux's")

Processes = list[subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Processes]:
    processes: Processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def start(started: Processes, command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True
    )
    started.append(process)
    return process


@pytest.fixture(params=["by pidfd", "before Linux 6.9"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "before Linux 6.9":
        monkeypatch.setattr(guardian, "TO_GROUP", 1 << 30)  # a flag that no kernel knows


def number_given_away(started: Processes) -> tuple[ChildGroup, subprocess.Popen[bytes]]:
    """A group that has ended, and the process that has its number now."""
    ended = start(started, "exit")
    group = ChildGroup.led_by(ended.pid)
    ended.wait()
    newcomer = start(started, "sleep 600")
    group.leader = newcomer.pid  # as if the kernel had given it the number
    return group, newcomer


@pytest.mark.usefixtures("kernel")
def test_a_process_with_the_number_of_an_ended_group_lives(started: Processes) -> None:
    group, newcomer = number_given_away(started)
    assert not group.send(0)
    sweep([group], linger_s=0.0)
    group.kill_leader()
    group.close()
    assert newcomer.poll() is None


@pytest.mark.usefixtures("kernel")
def test_what_an_ended_leader_has_left_is_killed(started: Processes) -> None:
    leader = start(started, "sleep 600 & echo $!")
    group = ChildGroup.led_by(leader.pid)
    assert leader.stdout is not None
    child = os.pidfd_open(int(leader.stdout.readline()))
    leader.wait()
    assert group.send(0)
    sweep([group], linger_s=0.0)
    group.close()
    # A pidfd becomes readable when its process has ended.
    assert select.select([child], [], [], 60.0)[0]
    os.close(child)


def test_a_closed_group_is_signalled_no_more(started: Processes) -> None:
    process = start(started, "sleep 600")
    group = ChildGroup.led_by(process.pid)
    group.close()
    group.close()
    assert not group.send(signal.SIGKILL)
    assert process.poll() is None


def test_the_guardian_acts_on_groups_and_not_on_numbers(started: Processes, tmp_path: Path) -> None:
    group, newcomer = number_given_away(started)
    worker = start(started, "sleep 600")
    directory = tmp_path / "temporary"
    directory.mkdir()
    ours, theirs = socket.socketpair()
    script = [sys.executable, "-I", "-S", guardian.__file__]
    with theirs:
        process = subprocess.Popen(script, stdin=theirs.fileno(), start_new_session=True)
    started.append(process)
    with ours:  # when it closes, the launcher is gone
        guardian.announce_group(ours, group)
        guardian.announce_group(ours, ChildGroup.led_by(worker.pid))
        guardian.announce_directory(ours, directory)
    assert process.wait(60.0) == 0
    assert worker.wait(60.0) == -signal.SIGKILL
    assert not directory.exists()
    assert newcomer.poll() is None


def test_a_guardian_that_is_dismissed_does_nothing(started: Processes) -> None:
    worker = start(started, "sleep 600")
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, guardian.__file__], stdin=theirs.fileno())
    started.append(process)
    with ours:
        guardian.announce_group(ours, ChildGroup.led_by(worker.pid))
        guardian.announce_end(ours)
    assert process.wait(60.0) == 0
    assert worker.poll() is None
