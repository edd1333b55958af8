"""A small stage for the launcher: scripts for workers and servers, and what became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from remains import Remains

LIMIT_S = 60.0

DRIVER = """
import json, sys
from slipstream.errors import SlipstreamError
from slipstream.runtime.launch.launch import launch
from slipstream.runtime.launch.processes import Placement
from slipstream.runtime.launch.supervision import Limits

asked = json.loads(sys.argv[1])
try:
    code = launch(
        [sys.executable, asked["script"]],
        [Placement(tuple(asked["prefix"]), env=asked["env"])] * asked["workers"],
        servers=[Placement()] * asked["servers"],
        limits=Limits(**asked["limits"]),
        server_command=[sys.executable, asked["server"]],
    )
except SlipstreamError as error:
    sys.exit(f"{type(error).__name__}: {error}")
sys.exit(code)
"""

# What every script below starts with; `mark` leaves a file that a test can wait for.
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent
INDEX = os.environ.get("SLIPSTREAM_SERVER_INDEX")
NAME = f"server{INDEX}" if INDEX else "rank" + os.environ["RANK"]

def mark(name, text=""):
    part = HERE / f".{name}.part"
    part.write_text(str(text))
    part.rename(HERE / name)

def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)

def forever():
    while True:
        time.sleep(60)

"""
READY = "mark(f'{NAME}.pid', os.getpid())\n"
SLEEPER = READY + "forever()\n"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
mark(f"child-of-{NAME}.pid", child.pid)
"""
SERVER = (
    READY
    + """
print('{"address": "tcp://127.0.0.1:%d"}' % (7000 + int(INDEX)), flush=True)
sys.stdin.read()
mark(f"{NAME}.ended")
"""
)
MUTE_SERVER = READY + "sys.stdin.read()\n"
QUICK = {"grace_s": 0.2, "term_s": 0.2}
PATIENT = {"grace_s": 600.0, "term_s": 600.0}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Stage:
    """A folder with a worker's and a server's script, and the launcher that runs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher: subprocess.Popen[str] | None = None
        self.remains = Remains()

    def arguments(
        self,
        worker: str,
        *,
        workers: int = 2,
        servers: int = 0,
        server: str = SERVER,
        limits: dict[str, float] = QUICK,
        prefix: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> list[str]:
        for name, text in (("worker.py", worker), ("server.py", server)):
            (self.folder / name).write_text(PRELUDE + text)
        asked = {
            "script": str(self.folder / "worker.py"),
            "server": str(self.folder / "server.py"),
            "workers": workers,
            "servers": servers,
            "limits": limits,
            "prefix": prefix,
            "env": env or {},
        }
        return [sys.executable, "-c", DRIVER, json.dumps(asked)]

    def start(self, worker: str, *, stdin: int = subprocess.DEVNULL, **asked: Any) -> None:
        self.launcher = subprocess.Popen(
            self.arguments(worker, **asked),
            env=os.environ | self.remains.mark,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, text: str | None = None) -> tuple[int, str, str]:
        assert self.launcher is not None
        out, err = self.launcher.communicate(text, timeout=LIMIT_S)
        return self.launcher.returncode, out, err

    def run(self, worker: str, **asked: Any) -> tuple[int, str, str]:
        self.start(worker, **asked)
        return self.finish()

    def pid(self, name: str) -> int:
        file = self.folder / f"{name}.pid"
        until(file.exists, f"{name} to start")
        return int(file.read_text())

    def send(self, signum: signal.Signals) -> None:
        assert self.launcher is not None
        self.launcher.send_signal(signum)

    @property
    def left_running(self) -> list[str]:
        return [f.stem for f in self.folder.glob("*.pid") if runs(int(f.read_text()))]


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("slipstream:")]
