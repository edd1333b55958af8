from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fork_server import ForkServer
from launches import Launch
from stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    if stage.launcher is not None:
        with stage.launcher as launcher:  # closes its pipes
            launcher.kill()
    stage.remains.clear()


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    fork_server = ForkServer(tmp_path_factory.mktemp("fork_server"))
    yield fork_server
    fork_server.close()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    """Starts a command: ``launch(command, env)``; whatever still runs at the end is ended."""
    with ExitStack() as stack:

        def start(*command: str, env: dict[str, str] | None = None) -> Launch:
            launch = Launch(command, tmp_path_factory.mktemp("launch"), env)
            stack.callback(launch.close)
            return launch

        yield start
