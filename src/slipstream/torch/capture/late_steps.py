"""Notices steps after the end of a job, whose gradients reach no other worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import JobEnded
from slipstream.torch.tensors.script_lines import level_of_the_script


def warn_of_late_steps(optimizer: Optimizer, is_over: Callable[[], bool]) -> None:
    """Warn at the optimizer's first step, if it then ``is_over``.

    Where servers update, such a step cannot be made, and raises ``JobEnded``.
    """
    told = False

    def look(*_: Any) -> None:
        nonlocal told
        if not told and is_over():
            told = True
            warnings.warn(str(JobEnded()), stacklevel=level_of_the_script())

    optimizer.register_step_pre_hook(look)
