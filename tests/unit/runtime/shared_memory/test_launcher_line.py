"""A learner's line to the launcher, whose end the test holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.errors import WaitLimit
from slipstream.runtime.shared_memory import launcher_line
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.runtime.shared_memory.messages import Awaited, Final, FromLearner, Trained
from slipstream.transports.local_socket import LocalSocket, socket_pair

Lines = tuple[LauncherLine, LocalSocket[Any]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(launcher_line, "TICK_S", 0.001)
    theirs, ours = socket_pair()
    launcher: LocalSocket[Any] = LocalSocket(theirs, FromLearner)
    with ours:
        line = LauncherLine(ours.fileno(), start_s=60.0, wait_s=0.05)
    yield line, launcher
    line.close()
    launcher.close()


def test_end_training_without_progress_names_the_learners_that_still_train(lines: Lines) -> None:
    line, launcher = lines
    launcher.send(Awaited([0, 1, 2]))
    launcher.send(Awaited([1, 2]))
    with pytest.raises(WaitLimit, match=r"rank 1, rank 2"):
        line.end_training(lambda: 7)
    assert launcher.receive() == (Trained(), None)


def test_end_training_while_others_make_progress_waits_on(lines: Lines) -> None:
    line, launcher = lines
    steps = itertools.count()

    def progress() -> int:
        if (step := next(steps)) == 200:  # far beyond the limit
            launcher.send(Final())
        return step

    line.end_training(progress)
    assert next(steps) > 200
