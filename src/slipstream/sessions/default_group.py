"""Torch's default process group over a job's own store, for metrics, samplers and ``gather``."""

from __future__ import annotations

import os
import re
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from slipstream.errors import ConfigError, LaunchError
from slipstream.runtime.process.environment import LOOPBACK, Environment, address_of

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class GroupStore(NamedTuple):
    """Where the ranks of a group meet, the address that they listen on, and the limit of waits."""

    store: Any
    host: str = LOOPBACK
    limit_s: float = 600.0


class DefaultGroup:
    """At most one group per job, from ``open`` to the end of the job.

    Args:
        store_for: gives the store for a backend; every rank calls it.
    """

    def __init__(self, env: Environment, store_for: Callable[[str], GroupStore]) -> None:
        self._env, self._store_for = env, store_for
        self._group: Any = None

    def open(self, backend: str) -> None:
        """Make the group; see ``Job.init_process_group``."""
        if distributed.is_initialized():
            self._keep(backend)
            return
        if self._env.incarnation:
            raise ConfigError(
                "this worker was started again, and torch's process groups take no new members: "
                "call job.init_process_group only in jobs that restart no workers"
            )
        store, host, limit_s = self._store_for(backend)
        bind_gloo(host)
        distributed.init_process_group(
            backend,
            store=store,
            rank=self._env.rank,
            world_size=self._env.world_size,
            timeout=timedelta(seconds=limit_s),
        )
        self._group = distributed.group.WORLD

    def _keep(self, backend: str) -> None:
        """Use the group that is there, if it is what was asked for."""
        found = distributed.get_backend(), distributed.get_rank(), distributed.get_world_size()
        if found != (backend, self._env.rank, self._env.world_size):
            raise ConfigError(
                f"torch.distributed has a default group already: {found[0]}, rank {found[1]} of "
                f"{found[2]}; use it, or end it with torch.distributed.destroy_process_group()"
            )

    def close(self) -> None:
        """End the group that ``open`` made, unless the loop has done it."""
        group, self._group = self._group, None
        if group is not None and distributed.is_initialized() and distributed.group.WORLD is group:
            distributed.destroy_process_group()


def is_of_process_group(error: BaseException) -> bool:
    """Whether torch's own communication has raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    in_group = any(f"torch{os.sep}distributed{os.sep}" in frame.filename for frame in frames)
    return isinstance(error, RuntimeError) and in_group


def is_lost_connection(error: BaseException) -> bool:
    """Whether a process group of torch has failed because a peer is gone."""
    words = "connection|peer|remote|socket|broken pipe|closed|closure"
    return is_of_process_group(error) and re.search(words, str(error), re.IGNORECASE) is not None


def bind_gloo(host: str) -> None:
    """Let gloo listen on the job's address; by default it takes what the host's name resolves to,
    which other hosts may not reach."""
    for _, name in socket.if_nameindex():
        with suppress(LaunchError):
            if address_of(name) == host:
                os.environ.setdefault(GLOO_INTERFACE, name)
                return
