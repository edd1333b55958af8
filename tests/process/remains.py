"""What a job may leave behind: processes, shared memory, listening sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

import psutil

SETTLE_S = 5.0
MARK = "SLIPSTREAM_TEST_MARK"
LISTENING = "0A"  # in the kernel's tables of sockets


class Remains:
    """Knows a job's processes by a mark in their environment, whoever their parent is."""

    def __init__(self) -> None:
        self.mark = {MARK: secrets.token_hex(8)}
        self._shared_before = shared_memory()
        self._sockets: dict[str, int] = {}  # and their ports

    def processes(self) -> list[psutil.Process]:
        needle = f"{MARK}={self.mark[MARK]}".encode()
        return [process for process in psutil.process_iter() if needle in environment(process)]

    def note_ports(self, *pids: int) -> None:
        """Sockets the job listens on now; ``left`` looks whether they are still open.

        Not their ports alone: the kernel gives those of an ended job to others, such as jobs of
        tests that run at the same time.
        """
        listening = listening_sockets()
        for pid in (*pids, *(process.pid for process in self.processes())):
            self._sockets |= {s: listening[s] for s in sockets_of(pid) & listening.keys()}

    def left(self) -> list[str]:
        """What is still there after a moment for the kernel to clear up."""
        deadline = time.monotonic() + SETTLE_S
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _look(self) -> list[str]:
        return [
            *(f"process {process.pid}: {command(process)}" for process in self.processes()),
            *(f"/dev/shm/{name}" for name in sorted(shared_memory() - self._shared_before)),
            *(f"port {port}" for s, port in self._sockets.items() if s in listening_sockets()),
        ]

    def clear(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def environment(process: psutil.Process) -> bytes:
    """As it was when the program started; empty for what has ended or is not ours to see."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return b""
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    except (OSError, psutil.Error):
        return b""


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "gone by now"


def shared_memory() -> set[str]:
    """Without that of a database or a browser, which other tests may run at the same time."""
    return {n for n in os.listdir("/dev/shm") if not n.startswith(("PostgreSQL.", ".org.chromium"))}


def listening_ports(pid: int) -> set[int]:
    try:
        links = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return set()
    return {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}


def sockets_of(pid: int) -> set[str]:
    """Their inodes, which no two sockets share."""
    links: set[str] = set()
    with contextlib.suppress(OSError):  # it has just ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                links.add(os.readlink(file))
    return {li.removeprefix("socket:[")[:-1] for li in links if li.startswith("socket:[")}


def listening_sockets() -> dict[str, int]:
    """Ports of all TCP sockets that listen, by inode."""
    found = {}
    for table in filter(Path.exists, (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))):
        for line in table.read_text().splitlines()[1:]:
            _, local, _, state, *more = line.split()
            if state == LISTENING:
                found[more[5]] = int(local.rpartition(":")[2], 16)
    return found
