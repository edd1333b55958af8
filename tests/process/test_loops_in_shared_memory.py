"""Every habit of a training loop where learners train on weights in shared memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from habit_table import cells, check, run_learners
from launches import Launch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's"),
]


@pytest.mark.parametrize(("system", "habit"), cells("gadei"))
def test_habit_is_exact_documented_or_refused(
    system: str, habit: str, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    check(run_learners(launch, tmp_path, system, habit), system, habit)
