"""The real learners; a batch takes each a tenth of a second more while there is a file
SERVICE_HOLD.

They train meanwhile, but a job of some thousand updates does not end before a test has done to it
what it wants, however busy the machine is.
"""

from __future__ import annotations

import os
import runpy
import time
from collections.abc import Iterator
from pathlib import Path

from slipstream.apps.service import batches

HOLD = Path(os.environ["SERVICE_HOLD"])
PAUSE_S = 0.1
shuffled = batches.shuffled


def paced(*arguments: object) -> Iterator[list[int]]:
    for batch in shuffled(*arguments):
        if HOLD.exists():
            time.sleep(PAUSE_S)
        yield batch


if __name__ == "__main__":
    batches.shuffled = paced
    real = Path(batches.__file__).with_name("learn.py")
    runpy.run_path(str(real), run_name="__main__")
