"""Many small jobs quickly: one process loads torch once and forks the ranks of every job.

``ForkServer`` is the tests' side. Run as a program, this file is the process that forks; a rank
then runs its script as ``python script.py`` would, uncaught errors and exit code included. Ranks
that ask for it (see ``forked_servers``) get their servers from here, too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_servers import FORKS, MOST_BYTES
from remains import Remains

LIMIT_S = 120.0
START_S = 120.0


@dataclass
class Run:
    """The ranks of one job, and what became of them."""

    folder: Path
    pids: list[int]
    remains: Remains
    begun: float
    codes: dict[int, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, rank: int, code: int) -> None:
        with self.changed:
            self.codes[rank] = code
            self.ended[rank] = time.monotonic()
            self.changed.notify_all()

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Exit codes by rank (a negative one is a signal), when all have ended."""
        with self.changed:
            ended = self.changed.wait_for(lambda: len(self.codes) == len(self.pids), limit_s)
        if not ended:
            late = [rank for rank in range(len(self.pids)) if rank not in self.codes]
            self.kill()
            raise AssertionError(f"ranks {late} still run after {limit_s:.0f} s:\n{self.told()}")
        return [self.codes[rank] for rank in range(len(self.pids))]

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)

    def marked(self, name: str) -> bool:
        """Whether ranks have left files of this name, each ending in its rank."""
        return all((self.folder / f"{name}.{rank}").exists() for rank in range(len(self.pids)))

    def stdout(self, rank: int) -> str:
        return self._output(f"rank{rank}.out")

    def stderr(self, rank: int) -> str:
        return self._output(f"rank{rank}.err")

    def _output(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def own_lines(self) -> list[str]:
        """What slipstream itself said, on whichever rank."""
        return [
            line
            for rank in range(len(self.pids))
            for line in self.stderr(rank).splitlines()
            if line.startswith("slipstream:")
        ]

    def told(self) -> str:
        """Everything the ranks wrote, for the message of a test that fails."""
        return "\n".join(
            f"--- rank {rank} ({self.codes.get(rank, 'runs')})\n"
            f"{self.stdout(rank)}{self.stderr(rank)}"
            for rank in range(len(self.pids))
        )


class ForkServer:
    """Starts jobs of forked ranks; several may run at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: list[Run] = []
        self._started: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "pids" in event:
                self._started.put(event["pids"])
            else:
                self._runs[event["run"]].take(event["rank"], event["code"])

    def start(
        self,
        script: Path,
        *arguments: str,
        ranks: Sequence[Mapping[str, str]] | int,
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """One process for each of ``ranks``: how many, or what each finds in its environment."""
        each = [{}] * ranks if isinstance(ranks, int) else ranks
        folder = self._folder / f"run{len(self._runs)}"
        folder.mkdir()
        remains = Remains()
        request = {
            "script": str(script),
            "arguments": arguments,
            "folder": str(folder),
            "ranks": [{**(env or {}), **remains.mark, **own} for own in each],
        }
        run = Run(folder, [], remains, time.monotonic())
        self._runs.append(run)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        run.pids.extend(self._started.get(timeout=START_S))
        return run

    def run(
        self,
        script: Path,
        *arguments: str,
        ranks: Sequence[Mapping[str, str]] | int,
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
    ) -> Run:
        run = self.start(script, *arguments, ranks=ranks, env=env)
        run.wait(limit_s)
        return run

    def close(self) -> None:
        with self._process as process:
            process.kill()  # its ranks die with it
        self._reader.join(timeout=10)
        for run in self._runs:
            run.remains.clear()


# ---- the process that forks


class Forks:
    """Reads requests from stdin, forks, reports pids and exit codes on stdout."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, int]] = {}  # pid: run, rank
        self._servers: dict[int, socket.socket] = {}  # pid: to whoever asked for it
        self._runs = 0
        self._text = b""
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.environ[FORKS] = f"slipstream-test-{os.getpid()}"
        self._requests.bind("\0" + os.environ[FORKS])
        self._requests.listen(128)

    def serve(self) -> list[str] | None:
        """Returns the command line of a rank or server in that process, and None here when all is
        over."""
        while True:
            readable, _, _ = select.select([0, self._requests], [], [], 0.02)
            self._reap()
            if self._requests in readable:
                command = self._fork_server()
                if command is not None:
                    return command
            if 0 not in readable:
                continue
            more = os.read(0, 1 << 16)
            if not more:
                return None
            self._text += more
            while b"\n" in self._text:
                line, _, self._text = self._text.partition(b"\n")
                command = self._fork_all(json.loads(line))
                if command is not None:
                    return command

    def _fork_all(self, request: dict[str, Any]) -> list[str] | None:
        pids = []
        with socket.create_server(("127.0.0.1", 0), backlog=512) as meeting_point:
            for rank, env in enumerate(request["ranks"]):
                pid = os.fork()
                if pid == 0:
                    self._become(request, rank, env, meeting_point)
                    return [request["script"], *request["arguments"]]
                pids.append(pid)
                self._ranks[pid] = (self._runs, rank)
        self._runs += 1
        print(json.dumps({"pids": pids}), flush=True)
        return None

    def _fork_server(self) -> list[str] | None:
        link, _ = self._requests.accept()
        request, streams, _, _ = socket.recv_fds(link, MOST_BYTES, 3)
        pid = os.fork() if len(streams) == 3 else -1  # else whoever asked has died meanwhile
        if pid == 0:
            self._become_server(link, json.loads(request), streams)
            return [json.loads(request)["module"]]
        for stream in streams:
            os.close(stream)
        if pid < 0:
            link.close()
        else:
            self._servers[pid] = link
        return None

    def _become_server(
        self, link: socket.socket, request: dict[str, Any], streams: list[int]
    ) -> None:
        die_with_parent()
        os.setsid()
        self._let_go()
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
            os.close(stream)
        os.environ.clear()
        os.environ |= request["env"]
        threading.Thread(target=end_with, args=(link,), daemon=True).start()

    def _become(
        self, request: dict[str, Any], rank: int, env: dict[str, str], meeting_point: socket.socket
    ) -> None:
        die_with_parent()
        os.setsid()
        self._let_go()
        folder = Path(request["folder"])
        os.chdir(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for fd, name in ((0, os.devnull), (1, f"rank{rank}.out"), (2, f"rank{rank}.err")):
            opened = os.open(folder / name, flags if fd else os.O_RDONLY)
            os.dup2(opened, fd)
            os.close(opened)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(request["ranks"])),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(meeting_point.getsockname()[1]),
            **env,
        }
        for name in [name for name, value in os.environ.items() if not value]:
            del os.environ[name]  # how a test says that a variable is not set
        if os.environ.get("RANK") == "0" and "MASTER_PORT" not in env:
            os.environ["SLIPSTREAM_STORE_FD"] = str(meeting_point.detach())
        meeting_point.close()

    def _let_go(self) -> None:
        """What only the process that forks may hold: it would seem to live on in others."""
        self._requests.close()
        for link in self._servers.values():
            link.close()

    def _reap(self) -> None:
        while self._ranks or self._servers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._servers:
                with self._servers.pop(pid) as link, contextlib.suppress(OSError):
                    link.send(str(code).encode())
                continue
            run, rank = self._ranks.pop(pid)
            print(json.dumps({"run": run, "rank": rank, "code": code}), flush=True)


def die_with_parent() -> None:
    import ctypes

    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0)


def end_with(link: socket.socket) -> None:
    """Whoever holds the other end does not send anything, but may die."""
    link.recv(1)
    os._exit(128 + signal.SIGKILL)


def end_well() -> None:
    """What Python does at the end of a program that did not fail, but for taking torch apart: that
    would copy all the memory it shares with the other forks, a third of a second for each."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def load() -> None:
    """What every rank would otherwise import for itself; nothing here starts a thread."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.optim
    import torch.utils.checkpoint

    import slipstream.initialization

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()
    assert slipstream.init is not None
    # What all ranks share is not theirs to collect, which makes their end a short one.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    load()
    command = Forks().serve()
    if command is not None:
        script, *_ = sys.argv[:] = command
        if not script.endswith(".py"):
            script = str(importlib.util.find_spec(script).origin)
        runpy.run_path(script, run_name="__main__")
        end_well()
