"""Every habit of a training loop where all workers hold the same weights after each step."""

from __future__ import annotations

import pytest
from fork_server import ForkServer
from habit_table import KINDS, WORDS, Documented, cells, check, guide, run_forked

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("system", "habit"), cells("mean", "compact", "server", "first"))
def test_habit_is_exact_documented_or_refused(
    system: str, habit: str, fork_server: ForkServer
) -> None:
    check(run_forked(fork_server, system, habit), system, habit)


def test_table_has_no_other_kinds() -> None:
    assert set(WORDS.values()) == set(KINDS)


@pytest.mark.parametrize("word", [w for w, k in KINDS.items() if isinstance(k, Documented)])
def test_documented_difference_is_in_the_guide(word: str) -> None:
    kind = KINDS[word]
    assert isinstance(kind, Documented)
    assert kind.sentence in guide()
