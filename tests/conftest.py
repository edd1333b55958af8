from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from postgres_server import PostgresServer, find_binaries

# No test may depend on how fast the machine is.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("steady")

# Under nohup, or in a shell's background, these are ignored, and everything started here would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Many images set it. Without ``slipstream.init``, rank 0 then writes parts of lines, and lines of
# other ranks come in between. One test sets it itself.
os.environ.pop("PYTHONUNBUFFERED", None)


# The longest files come first and short ones last, so that pytest-xdist's workers end together.
LONGEST_FIRST = (
    "test_gadei.py",
    "test_equivalence.py",
    "test_probe_in_lab.py",
    "test_backup_workers.py",
    "test_hosts.py",
    "test_pairs.py",
)
THEN = ("process", "net", "sim")  # the others take moments


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, int]:
        return index_in(LONGEST_FIRST, item.path.name), index_in(THEN, item.path.parent.name)

    items.sort(key=place)


def index_in(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else len(names)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Of two, on cores that other tests use as well, each spins while it waits for the other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_config_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs that need a secret make one in the user's home: here in another one."""
    before = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    yield
    if before is None:
        del os.environ["XDG_CONFIG_HOME"]
    else:
        os.environ["XDG_CONFIG_HOME"] = before


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server: SERVICE_POSTGRES, or one that is started here."""
    if address := os.environ.get("SERVICE_POSTGRES"):
        yield address
        return
    if (binaries := find_binaries()) is None:
        pytest.skip("needs PostgreSQL: its programs are not here, and SERVICE_POSTGRES is not set")
    server = PostgresServer(binaries)
    server.start()
    yield server.address
    server.close()
