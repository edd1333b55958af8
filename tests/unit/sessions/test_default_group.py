"""``job.init_process_group``, in a job of one process; see tests/process/test_torch_store.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed
from torch.distributed import c10d_logger

import slipstream
from slipstream.errors import ConfigError
from slipstream.runtime.process.environment import LOOPBACK, Environment
from slipstream.sessions.default_group import (
    DefaultGroup,
    GroupStore,
    bind_gloo,
    is_lost_connection,
    is_of_process_group,
)


@pytest.fixture(autouse=True)
def no_group_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    yield
    assert not distributed.is_initialized()


def test_it_lasts_as_long_as_the_job() -> None:
    with slipstream.init() as job:
        job.init_process_group()
        total = torch.ones(3)
        distributed.all_reduce(total)
        assert (distributed.get_backend(), distributed.get_world_size()) == ("gloo", 1)
    assert not distributed.is_initialized()
    with slipstream.init() as job:
        job.init_process_group("gloo")


def test_it_ends_with_a_job_that_fails() -> None:
    def train() -> None:
        with slipstream.init() as job:
            job.init_process_group()
            raise KeyError("the data")

    with pytest.raises(KeyError):
        train()
    assert not distributed.is_initialized()


def test_the_loop_may_end_it() -> None:
    with slipstream.init() as job:
        job.init_process_group()
        distributed.destroy_process_group()


def test_a_group_of_the_scripts_own_is_used_and_stays() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with slipstream.init() as job:
        job.init_process_group("gloo")
        with pytest.raises(ConfigError, match=r"default group already: gloo, rank 0 of 1; use it"):
            job.init_process_group("nccl")
    assert distributed.is_initialized()
    distributed.destroy_process_group()


def test_a_worker_that_came_back_is_refused() -> None:
    env = Environment(rank=1, world_size=2, incarnation=1)
    group = DefaultGroup(env, lambda _: GroupStore(distributed.HashStore()))
    with pytest.raises(ConfigError, match="this worker was started again"):
        group.open("gloo")


def test_gloo_listens_where_the_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_gloo(LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "the user's")
    bind_gloo(LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "the user's"


def test_an_address_of_no_interface_changes_nothing() -> None:
    bind_gloo("192.0.2.250")
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever it is
        call()
    return caught.value


@pytest.mark.parametrize("said", ["Connection closed by peer", "Socket closed", "Broken pipe"])
def test_which_errors_are_those_of_a_lost_connection(said: str) -> None:
    """A real one is in tests/process/test_torch_store.py."""

    def fail() -> None:
        raise RuntimeError(said)

    def call_in_group() -> None:
        c10d_logger._exception_logger(fail)()

    assert is_lost_connection(raised(call_in_group))
    assert not is_lost_connection(raised(fail))  # the loop's own
    assert not is_lost_connection(raised(distributed.get_rank))  # there is no group


def test_a_collective_that_took_too_long_is_of_the_group_and_nobody_is_lost() -> None:
    def fail() -> None:
        raise RuntimeError("Timed out waiting 600000ms for a pipeline to complete")

    error = raised(lambda: c10d_logger._exception_logger(fail)())
    assert is_of_process_group(error)
    assert not is_lost_connection(error)
    assert not is_of_process_group(raised(fail))
