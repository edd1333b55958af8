"""On the path of tests that need jobs of a known pace, or jobs that fail: replaces two modules.

With SERVICE_CLOCK the clock of every process is off by as many seconds as that file says.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("answers", "learn")


class StandIns(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.rpartition(".")
        if package != "slipstream.apps.service" or name not in NAMES:
            return None
        return importlib.util.spec_from_file_location(fullname, FOLDER / f"{name}.py")


sys.meta_path.insert(0, StandIns())


def set_clock(file: Path) -> None:
    exact_ns = time.time_ns
    time.time_ns = lambda: exact_ns() + int(file.read_text() or "0") * 10**9
    time.time = lambda: time.time_ns() / 1e9


if "SERVICE_CLOCK" in os.environ:
    set_clock(Path(os.environ["SERVICE_CLOCK"]))
