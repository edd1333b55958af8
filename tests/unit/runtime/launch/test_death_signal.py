"""A process that ends with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's death signal")
def test_a_process_whose_parent_is_another_ends_at_once() -> None:
    code = (
        "from slipstream.runtime.launch.death_signal import death_signal\n"
        "import sys\ndeath_signal(int(sys.argv[1]))()\nprint('goes on')"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code, str(pid)], stdout=subprocess.PIPE, check=False)
        for pid in (os.getpid(), 1)
    ]
    assert [run.stdout for run in runs] == [b"goes on\n", b""]
    assert [run.returncode for run in runs] == [0, 128 + signal.SIGKILL]
