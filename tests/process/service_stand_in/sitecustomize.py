"""On the path of tests that need jobs of a known pace, or jobs that fail: replaces two modules."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("answers", "learn")


class StandIns(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        package, _, name = fullname.rpartition(".")
        if package != "slipstream.service" or name not in NAMES:
            return None
        return importlib.util.spec_from_file_location(fullname, FOLDER / f"{name}.py")


sys.meta_path.insert(0, StandIns())
