"""The removal of labs, whatever happens to the process that made them.

A lab is found by its name alone: namespaces ``slip1a2b3c-…`` belong to lab ``slip1a2b3c``. Removing
it ends the processes inside, then deletes the namespaces, and with them every link.

Run as a script, this file is a lab's watchdog: a process in its own session that waits for its
maker to close a pipe or to die (also by SIGKILL), and then removes what is left. It therefore
imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

NAME_PREFIX = "slip"
NETNS_FOLDER = "/run/netns"
_NAMESPACE = re.compile(rf"({NAME_PREFIX}[0-9a-f]{{6}})-(?:sw|h[0-9]+)")
_COMMAND_LIMIT_S = 20.0


def lab_of(namespace: str) -> str | None:
    """Return the lab of a namespace, or None if it is not a lab's namespace."""
    match = _NAMESPACE.fullmatch(namespace)
    return match[1] if match else None


def namespaces() -> list[str]:
    """Return every namespace of every lab on this machine."""
    if shutil.which("ip") is None:
        return []  # no lab can exist
    listed = (line.split()[0] for line in _output("ip", "netns", "list").splitlines() if line)
    return [name for name in listed if lab_of(name) is not None]


def existing() -> list[str]:
    """Return the names of all labs on this machine, in use or left behind."""
    return sorted({name for name in map(lab_of, namespaces()) if name is not None})


def remove(lab: str, *, grace_s: float = 2.0) -> None:
    """Remove one lab; do nothing if it is removed already."""
    own_namespaces = [name for name in namespaces() if lab_of(name) == lab]
    _end_processes(own_namespaces, grace_s=grace_s)
    for name in own_namespaces:
        # The maker and its watchdog may both remove a lab: the second finds nothing to do.
        _output("ip", "netns", "delete", name)


def remove_all() -> list[str]:
    """Remove every lab on this machine, those in use as well; return their names."""
    names = existing()
    for name in names:
        remove(name)
    return names


def _end_processes(names: list[str], *, grace_s: float) -> None:
    killing_from = time.monotonic() + grace_s
    giving_up_at = killing_from + 5.0
    signalled: set[int] = set()
    while (pids := pids_in(names)) and time.monotonic() < giving_up_at:
        if time.monotonic() >= killing_from:
            signal_all(names, pids, signal.SIGKILL)
        else:
            signal_all(names, pids - signalled, signal.SIGTERM)
            signalled |= pids
        time.sleep(0.02)


def pids_in(names: list[str]) -> set[int]:
    """Return every process in these namespaces, except this one."""
    inside = {int(pid) for name in names for pid in _output("ip", "netns", "pids", name).split()}
    return inside - {os.getpid()}


def signal_all(names: list[str], pids: set[int], number: signal.Signals) -> None:
    """Send a signal to all processes that are still in these namespaces.

    A process may have ended since it was listed, and its number may be reused. So each one is
    checked again through a pidfd, which stays with one process.
    """
    inside = {identity for name in names if (identity := _identity(f"{NETNS_FOLDER}/{name}"))}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), _held(pid) as send:
            if _identity(f"/proc/{pid}/ns/net") in inside:
                send(number)


@contextlib.contextmanager
def _held(pid: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that signals the process that has this number now, and no later one."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # Linux before 5.3
        yield partial(os.kill, pid)
        return
    try:
        yield partial(signal.pidfd_send_signal, pidfd)
    finally:
        os.close(pidfd)


def _identity(namespace: str) -> tuple[int, int] | None:
    """Return a namespace's identity; None if it no longer exists."""
    try:
        status = os.stat(namespace)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _output(*command: str) -> str:
    # In its own session, so that Ctrl-C does not interrupt a removal.
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=_COMMAND_LIMIT_S,
        start_new_session=True,
        check=False,
    )
    return result.stdout


def start_watchdog(lab: str) -> subprocess.Popen[bytes]:
    """Start a process that removes ``lab`` once its stdin is closed or this process has ended."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, lab, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _watch(lab: str, maker: int) -> None:
    # The pipe alone is not enough: a child of the maker holds a copy of its end.
    waiting_on = [sys.stdin.fileno()]
    with contextlib.suppress(OSError):
        waiting_on.append(os.pidfd_open(maker))
    select.select(waiting_on, [], [])
    remove(lab, grace_s=0.5)


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
