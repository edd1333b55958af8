"""A process that is killed when the one that started it dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable


def death_signal(parent: int) -> Callable[[], None] | None:
    """Return a function that a child calls before or after exec, to be killed with its parent.

    It is None on other systems than Linux.

    The kernel treats the *thread* that started the child as its parent.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    set_death_signal, kill = 1, int(signal.SIGKILL)

    def arm() -> None:
        prctl(set_death_signal, kill, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os._exit(128 + kill)

    return arm
