"""Where ranks meet: names that come later, and what is said when ranks do not come."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from torch import distributed

from slipstream.errors import LaunchError, WaitLimit
from slipstream.runtime.members import store
from slipstream.runtime.members.rendezvous import Rendezvous
from slipstream.runtime.members.store import (
    await_name,
    connect_store,
    default_group_store,
    only_this_host,
    require_same_world,
    unreachable,
)
from slipstream.runtime.process.environment import Environment

PODS = Environment(rank=1, world_size=2, master_addr="job-0.job", master_port=29500)


class Names:
    """Resolves a name from the n-th try on; sleeping takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known_after: float) -> None:
        self.tries, self.now, self._known_after = 0, 0.0, known_after
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def _look_up(self, *_: Any) -> list[Any]:
        self.tries += 1
        if self.now < self._known_after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_name_that_is_announced_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, known_after=90.0)
    await_name(PODS, 120.0)
    assert 90.0 <= names.now < 91.0


def test_a_name_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, known_after=float("inf"))
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=job-0\.job has not .* within 120 s \(Name"):
        await_name(PODS, 120.0)
    assert 120.0 <= names.now < 121.0


def test_on_one_host_no_name_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, known_after=float("inf"))
    await_name(Environment(world_size=2, local_world_size=2, master_addr="node7"), 120.0)
    assert names.tries == 0


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_an_address_of_this_host_only_is_named_when_ranks_are_missing(address: str) -> None:
    env = Environment(rank=1, world_size=2, master_addr=address, master_port=29500)
    assert f"MASTER_ADDR={address} is this host, for this host only" in only_this_host(env)
    assert only_this_host(env) in str(unreachable(env, 5.0))


def test_nothing_is_added_where_all_ranks_are_here_or_the_address_is_another() -> None:
    here = Environment(world_size=2, local_world_size=2, master_addr="localhost", master_port=1)
    assert only_this_host(here) == only_this_host(PODS) == ""


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torch had a default group: rank 1 of 4."""
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(store.distributed.distributed_c10d, "_get_default_store", lambda: "store")


@pytest.mark.usefixtures("group")
def test_only_a_group_of_the_same_rank_and_size_is_met_in() -> None:
    assert default_group_store(Environment(rank=1, world_size=4)) == "store"
    assert default_group_store(Environment(rank=0, world_size=4)) is None
    assert default_group_store(Environment(rank=1, world_size=3)) is None


@pytest.mark.usefixtures("group")
def test_several_processes_of_torch_do_not_train_each_alone() -> None:
    with pytest.raises(LaunchError, match="default group of 4 processes, but RANK and WORLD_SIZE"):
        require_same_world(Environment())
    require_same_world(Environment(rank=0, world_size=2))


def test_without_torchs_group_there_is_nothing_to_meet_in() -> None:
    assert default_group_store(Environment()) is None
    require_same_world(Environment())


def test_rank_0_says_that_its_address_is_of_this_host_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    env = Environment(0, 2, master_addr="localhost", master_port=port, secret=b"0123456789abcdef")
    rendezvous = Rendezvous(env, limit_s=0.1)
    with pytest.raises(WaitLimit, match=r"localhost is this host, .*; missing: rank 1"):
        rendezvous.meet()
    rendezvous.close()


def reserved_port() -> socket.socket:
    """As a launcher reserves it: bound, not listening."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def test_a_reserved_port_at_which_somebody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    reserved = reserved_port()
    port = reserved.getsockname()[1]
    env = Environment(0, 2, master_port=port, store_fd=reserved.detach(), secret=b"x" * 16)
    monkeypatch.setattr(store, "_used_fds", set())
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(LaunchError, match=rf"rank 0 cannot listen on 127\.0\.0\.1:{port}: .*free"),
    ):
        connect_store(env, 5.0)


@pytest.mark.parametrize("torch_first", [True, False])
def test_a_process_has_one_server_for_torch_and_slipstream(
    monkeypatch: pytest.MonkeyPatch, torch_first: bool
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(store, "_used_fds", set())
    reserved = reserved_port()
    port = reserved.getsockname()[1]
    env = Environment(0, 2, master_port=port, store_fd=reserved.detach(), secret=b"x" * 16)

    def of_torch() -> Any:
        """As env:// opens it on rank 0."""
        return distributed.TCPStore("127.0.0.1", port, None, True, multi_tenant=True)

    first = of_torch() if torch_first else connect_store(env, 5.0)
    first.set("key", "value")
    second = connect_store(env, 5.0) if torch_first else of_torch()
    del first
    assert second.get("key") == b"value"
    del second
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
