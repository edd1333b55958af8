"""On the path of a service whose learners a test may slow down: see ``learn.py``."""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LEARN = "slipstream.apps.service.learn"


class Paced(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != LEARN:
            return None
        return importlib.util.spec_from_file_location(fullname, FOLDER / "learn.py")


def load(file: Path) -> None:
    spec = importlib.util.spec_from_file_location("light", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


load(FOLDER.parents[1] / "light" / "sitecustomize.py")  # as without this folder
sys.meta_path.insert(0, Paced())
