"""Waits of the training thread for the pump's thread; the job's first fault ends every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slipstream.errors import RuntimeFault

Holds = Callable[[], bool]


class Waiter:
    """The lock that both threads share, the condition on it, and the job's first fault.

    A simulation passes its own to a ``Member``, which waits by delivering messages.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.fault: RuntimeFault | None = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold the lock for a change, then wake the threads that wait for one."""
        with self.changed:
            yield
            self.changed.notify_all()

    def fail(self, fault: RuntimeFault) -> None:
        """Record the first fault; every wait, now or later, ends with it."""
        with self.updating():
            self.fault = self.fault or fault

    def check(self) -> None:
        """Raise the job's fault, if there is one."""
        if self.fault is not None:
            raise self.fault

    def wait(self, holds: Holds, limit_s: float) -> bool:
        """Wait until ``holds()``, a fault or the limit; return whether it holds."""
        with self.changed:
            self.changed.wait_for(lambda: holds() or self.fault is not None, timeout=limit_s)
            return holds()

    def pause(self, seconds: float) -> None:
        """Give queued messages time to be sent."""
        time.sleep(seconds)
