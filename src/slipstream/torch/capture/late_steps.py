"""Notices steps after the end of a job, whose gradients reach no other worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import JobEnded
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer
from slipstream.torch.tensors.script_lines import level_of_the_script


def watch_late_steps(optimizer: Optimizer, is_over: Callable[[], bool], *, warns: bool) -> None:
    """Warn at the optimizer's first step when it ``is_over``.

    A step that another process would make raises ``JobEnded``, on every worker and before anything
    else is found wrong with it: the job has written its last weights into the model, say.

    Args:
        warns: Whether this worker is the one that warns.
    """
    told = not warns

    def look(stepped: Optimizer, *_: Any) -> None:
        nonlocal told
        if isinstance(stepped, RemoteOptimizer) and is_over():
            raise JobEnded
        if not told and is_over():
            told = True
            warnings.warn(str(JobEnded()), stacklevel=level_of_the_script())

    optimizer.register_step_pre_hook(look)
