from __future__ import annotations

import subprocess
import sys

import pytest

from slipstream.errors import LaunchError
from slipstream.runtime.launch.children import Children


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    monkeypatch.setattr("atexit.register", lambda _: None)
    return Children()


def test_workers_that_do_not_end_are_killed(children: Children) -> None:
    with child("input()") as waits, child("") as ends:
        children.watch([waits, ends])
        children.end(grace_s=0.2)
        assert (waits.poll(), ends.poll()) == (-9, 0)


def test_a_worker_that_has_ended_is_named(children: Children) -> None:
    with child("raise SystemExit(3)") as ended:
        children.watch([ended])
        ended.wait()
        said = r"rank 1 has ended \(exit code 3\)"
        with pytest.raises(LaunchError, match=said), children.needed():
            pass


def test_a_failure_after_the_training_is_not_rank_0s(children: Children) -> None:
    with child("input(); raise SystemExit(3)") as fails:
        children.watch([fails])
        with children.needed():
            pass
        fails.communicate(b"\n")
        assert fails.returncode == 3  # and this process goes on


def test_one_that_fails_before_the_job_ends_rank_0() -> None:
    code = """
import subprocess, sys
from slipstream.runtime.launch.children import Children
children = Children()
code = "import sys; sys.stdin.read(); sys.exit(3)"
fails = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
children.watch([fails, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)])
with children.needed():
    fails.stdin.close()
    while True:
        pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "slipstream: rank 1 exited with code 3\n"
