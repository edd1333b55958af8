"""Every habit of a training loop where workers' weights differ between steps."""

from __future__ import annotations

import pytest
from fork_server import ForkServer
from habit_table import cells, check, run_forked

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("system", "habit"), cells("apart", "ahead", "local", "ako"))
def test_habit_is_exact_documented_or_refused(
    system: str, habit: str, fork_server: ForkServer
) -> None:
    check(run_forked(fork_server, system, habit), system, habit)
