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
    with child("input()") as waits, child("") as ended:
        children.watch([waits, ended])
        ended.wait()  # a busy machine may need longer than the grace to start it
        children.end(grace_s=0.2)
        assert (waits.poll(), ended.poll()) == (-9, 0)


def test_workers_that_end_in_time_are_not_killed(children: Children) -> None:
    with child("") as ends:
        children.watch([ends])
        children.end(grace_s=60.0)
        assert ends.poll() == 0


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


def test_after_the_job_a_failure_is_not_rank_0s(children: Children) -> None:
    with child("input(); raise SystemExit(3)") as fails:
        children.watch([fails])
        with children.needed():
            children.leave()  # the Trainer still has something to do
            fails.communicate(b"\n")
            for thread in children._threads:
                thread.join(60)
            assert fails.returncode == 3  # and this process goes on


def test_one_that_fails_before_the_job_ends_rank_0() -> None:
    """Ranks are those of the job, also on its second node."""
    code = """
import subprocess, sys
from slipstream.runtime.launch.children import Children
children = Children()
code = "import sys; sys.stdin.read(); sys.exit(3)"
fails = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
children.watch([fails, waits], first=3)
with children.needed():
    fails.stdin.close()
    while True:
        pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "slipstream: rank 3 exited with code 3\n"


@pytest.mark.skipif(sys.platform != "linux", reason="workers do not see rank 0's process elsewhere")
@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_worker_that_needs_rank_0_ends_with_it(begins: str) -> None:
    """Whether it has begun to train before rank 0's script ends, or does so later."""
    worker = """
import sys, time
from slipstream.runtime.launch.children import Children
children = Children()
children.follow(sys.argv[1])
if sys.argv[2] == "after":
    children._parent_ended.wait()
with children.needed():
    print("needs rank 0", flush=True)
    time.sleep(60)
"""
    code = f"""
import subprocess, sys
from slipstream.runtime.launch.children import Children
children = Children()
command = [sys.executable, "-c", {worker!r}, children.parent(), {begins!r}]
worker = subprocess.Popen(command, stdout=subprocess.PIPE)
children.watch([worker])
{begins == "before" and "worker.stdout.readline()"}
sys.exit(5)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50, text=True)
    assert ended.returncode == 5
    said = "slipstream: the script of rank 0 has ended, and rank 1 had more to train: every rank "
    assert ended.stderr.startswith(said), ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="workers do not see rank 0's process elsewhere")
def test_a_fork_that_exits_ends_nobody() -> None:
    worker = """
import sys
from slipstream.runtime.launch.children import Children
children = Children()
children.follow(sys.argv[1])
with children.needed():
    print("needs rank 0", flush=True)
    input()
"""
    code = f"""
import os, subprocess, sys
from slipstream.runtime.launch.children import Children
children = Children()
command = [sys.executable, "-c", {worker!r}, children.parent()]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
children.watch([worker])
worker.stdout.readline()
if (fork := os.fork()) == 0:
    sys.exit(0)
os.waitpid(fork, 0)
worker.communicate(b"\\n")
print(worker.returncode)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, text=True)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
