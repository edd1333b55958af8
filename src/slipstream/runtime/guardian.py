"""A small process that outlives the launcher, to clear away what it started.

The kernel kills a worker whose launcher dies, but not the worker's own children. This script is
told of every process group, and of directories, through its stdin; when that ends without ``done``,
the launcher has been killed, and all that goes with it. It runs by its path, standard library only,
so that it costs next to nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable

LINGER_S = 1.0


def sweep(groups: Iterable[int], linger_s: float = LINGER_S) -> None:
    """Kills what is left of process groups whose leader has ended.

    They get a moment first: multiprocessing's resource tracker, for one, ends by itself once its
    parent has, and it is the one that removes forgotten shared memory.
    """
    left = set(groups)
    deadline = time.monotonic() + linger_s
    while left := {group for group in left if _send(group, 0)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for group in left:
        _send(group, signal.SIGKILL)


def _send(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main() -> None:
    groups: list[int] = []
    directories: list[str] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        if line.startswith("/"):
            directories.append(line.rstrip("\n"))
        else:
            groups.append(int(line))
    for leader in groups:
        try:
            os.kill(leader, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    sweep(groups)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
