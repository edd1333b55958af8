"""Signals to what runs in a lab, and to nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from slipstream.apps.lab import removal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


def test_only_what_is_in_the_namespaces_still_is_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            # Its number was listed, but by now it is of a process elsewhere, or of nobody.
            removal.signal_all(["slip000000-h0"], {process.pid, 2**22 + 1}, signal.SIGKILL)
            assert process.poll() is None
            # A namespace is a file; that of this process and its children will do.
            monkeypatch.setattr(removal, "NETNS_FOLDER", f"/proc/{os.getpid()}/ns")
            removal.signal_all(["net"], {process.pid}, signal.SIGTERM)
            assert process.wait(60.0) == -signal.SIGTERM
        finally:
            process.kill()
