"""The store in which ranks meet is open to whoever reaches it; a job does not suffer from that."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from attacker import Crowd
from fork_server import ForkServer, Run
from launches import SLIPSTREAM, TORCHRUN, Launch, until
from ports import free_port
from remains import listening_ports
from torch import distributed

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("store_worker.py")
SECRET = {"SLIPSTREAM_SECRET": "the secret of a job whose store is open"}
SHARES = 30


def open_store(port: str) -> Any:
    """As somebody without the secret opens it."""
    return distributed.TCPStore(
        "127.0.0.1", int(port), None, is_master=False, timeout=timedelta(seconds=10)
    )


def held(fork_server: ForkServer, tag: str, env: Mapping[str, str], *more: str) -> Run:
    """A job that waits until ``go`` is there: all have met, and nothing is distributed yet."""
    return waiting(fork_server, "joined", tag, env, "hold early", *more)


def training(fork_server: ForkServer, tag: str, env: Mapping[str, str]) -> Run:
    """The same in the middle of its training."""
    return waiting(fork_server, "training", tag, env, "hold")


def waiting(
    fork_server: ForkServer, where: str, tag: str, env: Mapping[str, str], *more: str
) -> Run:
    run = fork_server.start(WORKER, tag, *more, ranks=2, env={**SECRET, **env})
    until(lambda: run.marked(where) or run.codes, where)
    assert not run.codes, run.told()
    return run


def finish(run: Run) -> None:
    (run.folder / "go").touch()
    run.wait()


def shared(run: Run, rank: int) -> list[str]:
    told: list[str] = json.loads((run.folder / f"shared.{rank}").read_text())
    return told


def assert_undisturbed(run: Run, tag: str) -> None:
    assert run.codes == {0: 0, 1: 0}, run.told()
    for rank in range(2):
        assert shared(run, rank) == [f"{tag} {step}" for step in range(SHARES)]
    assert run.own_lines() == []
    assert run.remains.left() == []


@contextmanager
def writing(port: str, values: Callable[[Any], Mapping[str, bytes]]) -> Iterator[None]:
    """Within, somebody writes values to the store over and over."""
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                store = open_store(port)
                while not over.is_set():
                    for key, value in values(store).items():
                        store.set(key, value)
                    time.sleep(0.001)
            except (OSError, RuntimeError):
                time.sleep(0.005)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_nothing_but_meeting_data_lies_in_the_store(fork_server: ForkServer) -> None:
    port = str(free_port())
    run = held(fork_server, "a marker", {"MASTER_PORT": port})
    kept: dict[str, bytes] = {}

    def tick(store: Any) -> dict[str, bytes]:
        kept.update({key: store.get(key) for key in store.list_keys()})
        return {}

    with writing(port, tick):
        until(lambda: kept, "a look into the store")
        finish(run)
    assert_undisturbed(run, "a marker")
    assert [key for key in kept if not is_place(key) and not key.startswith("init/")] == []
    assert all(b"marker" not in value for value in kept.values())


def test_garbage_in_the_store_does_not_touch_a_job_that_has_begun(fork_server: ForkServer) -> None:
    port = str(free_port())
    run = held(fork_server, "mine", {"MASTER_PORT": port})
    spoilt: set[str] = set()

    def garbage(store: Any) -> dict[str, bytes]:
        keys = store.list_keys()
        spoilt.update(keys)
        return dict.fromkeys(keys, b"garbage")

    with writing(port, garbage):
        until(lambda: spoilt, "garbage")
        finish(run)
    assert_undisturbed(run, "mine")


def test_nobody_listens_at_the_port_while_a_job_trains(fork_server: ForkServer) -> None:
    """So another job may meet there."""
    port = str(free_port())
    run = training(fork_server, "first", {"MASTER_PORT": port})
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), 5).close()
    second = fork_server.run(WORKER, "second", ranks=2, env={**SECRET, "MASTER_PORT": port})
    assert_undisturbed(second, "second")
    finish(run)
    assert_undisturbed(run, "first")


@pytest.mark.parametrize("kept", ["everything", "all but places and addresses"])
def test_values_of_an_earlier_run_are_worth_nothing(fork_server: ForkServer, kept: str) -> None:
    """Whoever kept them may keep the ranks from meeting, but not have them believe anything."""
    port = str(free_port())
    first = held(fork_server, "yesterday", {"MASTER_PORT": port})
    old: dict[str, bytes] = {}

    def more(store: Any) -> dict[str, bytes]:
        keys = [k for k in store.list_keys() if kept == "everything" or not is_place(k)]
        old.update({key: store.get(key) for key in keys if not key.startswith("init/")})
        return {}

    with writing(port, more):
        until(lambda: old or kept != "everything", "a look into the store")
        finish(first)
    env = {**SECRET, "MASTER_PORT": port}
    if kept == "everything":
        second = met_by_old_values(fork_server, env, old)
    else:
        with writing(port, lambda _: old):
            second = fork_server.run(WORKER, "today", ranks=2, env=env)
    for rank, code in second.codes.items():
        if code == 0:
            assert shared(second, rank) == [f"today {step}" for step in range(SHARES)]
    if kept == "everything":
        assert set(second.codes.values()) == {1}, second.told()
        assert "has joined the job at" in second.told()
    else:
        assert_undisturbed(second, "today")


def met_by_old_values(fork_server: ForkServer, env: dict[str, str], old: dict[str, bytes]) -> Run:
    """Rank 1 comes when its old place is in the store; the rest follows when it has ended, since
    the store ends with rank 0."""
    runs: list[Run] = []
    stores: list[Any] = []
    place = {key: value for key, value in old.items() if key.endswith("place/1")}
    assert place, old.keys()

    def values(store: Any) -> dict[str, bytes]:
        if store in stores and runs:  # whose values of the last time are written
            (runs[0].folder / "written").touch()
        stores.append(store)
        return old if runs and 1 in runs[0].codes else place

    with writing(env["MASTER_PORT"], values):
        runs.append(fork_server.start(WORKER, "today", "hold rank 1", ranks=2, env=env))
        runs[0].wait()
    return runs[0]


def is_place(key: str) -> bool:
    """Whether it is about who is there and where, and not about what they say."""
    return any(part in key for part in ("address/", "place/", "joined/"))


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, "has joined the job at"),
        ({"RANK": "2", "WORLD_SIZE": "3"}, "WORLD_SIZE=3: set the same everywhere"),
        ({"SLIPSTREAM_SECRET": "not the secret of that job"}, "not signed with this job's secret"),
    ],
    ids=["same secret", "more ranks", "another secret"],
)
def test_a_second_job_on_the_port_refuses_by_itself(
    fork_server: ForkServer, env: dict[str, str], says: str
) -> None:
    port = str(free_port())
    run = held(fork_server, "first", {"MASTER_PORT": port})
    own = {**SECRET, "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **env}
    second = fork_server.run(WORKER, "second", ranks=[own])
    finish(run)
    assert second.codes[0] != 0
    assert [says in line for line in second.own_lines()] == [True], second.told()
    assert "Traceback" not in second.told()
    assert_undisturbed(run, "first")


def test_idle_connections_do_not_use_up_the_descriptors(fork_server: ForkServer) -> None:
    run = held(fork_server, "mine", {}, "few descriptors")
    with closing(Crowd()) as crowd:
        ports = {pid: listening_ports(pid) for pid in run.pids}
        for port in itertools.chain(*ports.values()):
            crowd.idle(port, 1100)
        # Those that wait to be accepted count, too: they take descriptors as soon as there are any.
        until(
            lambda: all(crowd.not_ended(own) < 550 for own in ports.values()),
            "connections to be ended",
        )
        finish(run)
    assert_undisturbed(run, "mine")


def test_torchrun_takes_the_users_own_secret(launch: Callable[..., Launch], tmp_path: Path) -> None:
    """Torchrun's store listens on all addresses, so no token may lie there."""
    elastic = (TORCHRUN, "--nproc-per-node=2")
    homes = {"XDG_CONFIG_HOME": str(tmp_path)}, {"XDG_CONFIG_HOME": "/dev/null/config"}, SECRET
    own, refused, given = (
        launch(*elastic, f"--master-port={free_port()}", str(WORKER), "tag", env=env)
        for env in homes
    )
    assert own.wait() == 0, own.stderr
    assert given.wait() == 0, given.stderr
    assert (own.folder / "shared.1").exists()
    made = tmp_path / "slipstream" / "secret"
    assert made.stat().st_mode & 0o777 == 0o600
    assert list(made.parent.iterdir()) == [made], "of two ranks that made one, one counts"
    assert refused.wait() != 0
    assert any("SLIPSTREAM_SECRET=" in line for line in refused.own_lines), refused.stderr
    assert any("/dev/null/config/slipstream/secret" in line for line in refused.own_lines)


def test_hosts_whose_own_secrets_differ_are_told_so(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    interface = {"MASTER_ADDR": "localhost", "SLIPSTREAM_INTERFACE": "127.0.0.1"}
    ranks = [interface | {"XDG_CONFIG_HOME": str(tmp_path / str(rank))} for rank in range(2)]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    run = fork_server.run(WORKER, "tag", ranks=ranks)
    assert all(run.codes.values()), run.told()
    told = " ".join(run.own_lines())
    assert "not signed with this job's secret: this rank took your own, " in told
    assert "copy it to all hosts, or set SLIPSTREAM_SECRET" in told


def test_the_launcher_needs_no_secret_from_the_user(launch: Callable[..., Launch]) -> None:
    job = launch(SLIPSTREAM, "run", "--workers=2", str(WORKER), "tag")
    assert job.wait() == 0, job.stderr
    assert json.loads((job.folder / "shared.1").read_text())[0] == "tag 0"
