"""Servers that a launcher, or a worker, starts and ends."""

from __future__ import annotations

import os
import signal

import pytest
from stage import MUTE_SERVER, SERVER, SLEEPER, Stage, own_lines, until

pytestmark = pytest.mark.process


def test_servers_start_first_and_end_last(stage: Stage) -> None:
    worker = """
assert not (HERE / "server0.ended").exists()
print(os.environ["SLIPSTREAM_SERVER_ADDRESSES"])
"""
    code, out, err = stage.run(worker, workers=1, servers=2)
    assert (code, out, err) == (0, "tcp://127.0.0.1:7000,tcp://127.0.0.1:7001\n", "")
    assert (stage.folder / "server0.ended").exists()
    assert (stage.folder / "server1.ended").exists()


def test_server_that_dies_fails_the_job(stage: Stage) -> None:
    stage.start(SLEEPER, servers=2)
    stage.pid("rank0"), stage.pid("rank1")
    os.kill(stage.pid("server1"), signal.SIGKILL)
    code, _, err = stage.finish()
    assert code == 137
    assert own_lines(err) == ["slipstream: server 1 was killed by SIGKILL; the ranks were stopped"]
    assert stage.left_running == []


def test_servers_that_will_not_end_are_killed(stage: Stage) -> None:
    stubborn = SERVER.replace("sys.stdin.read()", "forever()")
    assert stage.run("pass", workers=1, servers=2, server=stubborn)[0] == 0
    assert stage.left_running == []


def test_server_that_does_not_start(stage: Stage) -> None:
    code, _, err = stage.run("mark('started')", servers=1, server="sys.exit('no luck')")
    assert code == 1
    assert "[server 0] no luck" in err
    assert "LaunchError: server 0 did not start" in err or "server 0 exited with code 1" in err
    assert not (stage.folder / "started").exists()


def test_server_that_never_says_where_it_listens(stage: Stage) -> None:
    code, _, err = stage.run(
        "mark('started')", servers=1, server=MUTE_SERVER, limits={"server_start_s": 0.3}
    )
    assert code == 1
    assert "WaitLimit" in err
    assert "missing: server 0" in err
    assert stage.left_running == []


WITH_A_SERVER_BESIDE = """
from slipstream.runtime.launch.processes import start_server
from slipstream.transports.credentials import Credentials
program = [sys.executable, str(HERE / "server.py")]
server = start_server(index=0, credentials=Credentials(b"k", False), command=program)
mark("address", server.address)
"""


def test_server_beside_a_worker_dies_with_it(stage: Stage) -> None:
    stage.start(WITH_A_SERVER_BESIDE + SLEEPER, workers=1)
    pid = stage.pid("rank0")
    assert (stage.folder / "address").read_text() == "tcp://127.0.0.1:7000"
    assert os.getsid(stage.pid("server0")) != os.getsid(pid)
    os.kill(pid, signal.SIGKILL)
    assert stage.finish()[0] == 137
    until(lambda: not stage.left_running, "the server to end")


def test_server_beside_a_worker_is_closed(stage: Stage) -> None:
    assert stage.run(WITH_A_SERVER_BESIDE + "server.close()\n", workers=1) == (0, "", "")
    assert (stage.folder / "server0.ended").exists()


def test_signal_while_servers_start(stage: Stage) -> None:
    stage.start("mark('started')", servers=2, server=MUTE_SERVER)
    stage.pid("server0"), stage.pid("server1")
    stage.send(signal.SIGINT)
    assert stage.finish()[0] == 130
    assert stage.left_running == []
    assert not (stage.folder / "started").exists()
