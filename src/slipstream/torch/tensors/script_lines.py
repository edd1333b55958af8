"""The line of the user's script in a warning that is given deep within torch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

LIBRARIES = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))


def level_of_the_script() -> int:
    """The ``stacklevel`` at which the caller's warning names a line outside of both libraries.

    On a GPU, hooks of a backward pass run on a thread of torch, which has no such line.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    return level
