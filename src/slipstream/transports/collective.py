"""Collectives by torch.distributed: slipstream's own process group, independent of the user's."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from slipstream.errors import WaitLimit

LOOK_AROUND = timedelta(seconds=1)


class Collectives:
    """All-reduce over gloo (CPU) or NCCL (CUDA); waits also check for faults of the job.

    Args:
        store: The store in which the ranks meet.
        key: The prefix of this group's keys in the store.
        rank: This rank.
        world_size: The number of ranks.
        host: This host's address, for gloo.
        device: The device of the tensors.
        limit_s: The longest wait for an operation.
        check: Raises the fault of the job, if there is one; called while waiting.
        grace_s: The time after a broken connection in which the heartbeat may name the lost rank.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        rank: int,
        world_size: int,
        *,
        host: str,
        device: torch.device,
        limit_s: float,
        check: Callable[[], None],
        grace_s: float,
    ) -> None:
        self.device = device
        self._limit_s = limit_s
        self._check = check
        self._grace_s = grace_s
        store = distributed.PrefixStore(key, store)
        limit = timedelta(seconds=limit_s)
        if device.type == "cuda":
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = limit
            self._group: Any = distributed.ProcessGroupNCCL(store, rank, world_size, nccl)
        else:
            gloo: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
            gloo._timeout = limit
            self._group = distributed.ProcessGroupGloo(store, rank, world_size, gloo)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start to sum a tensor over all ranks, in place; finish with ``wait``."""
        return self._group.allreduce([tensor])

    def wait(self, work: Any) -> None:
        """Wait for an operation; raise the fault of the job, or WaitLimit."""
        deadline = time.monotonic() + self._limit_s
        if self.device.type == "cuda":
            # NCCL treats a timeout of wait() as the operation's own limit, and aborts at it.
            while not work.is_completed() and time.monotonic() < deadline:
                self._check()
                time.sleep(0.0005)
            work.wait()
            return
        while True:
            try:
                work.wait(LOOK_AROUND)
                return
            except RuntimeError as error:
                self._check()
                if work.is_completed():
                    self._explain(error)
            if time.monotonic() > deadline:
                raise WaitLimit("a collective", self._limit_s, [])

    def _explain(self, error: RuntimeError) -> None:
        """Raise the fault behind a broken connection, which names no rank itself."""
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline:
            time.sleep(0.05)
            self._check()
        raise WaitLimit("a collective, which broke off", self._grace_s, []) from error

    def close(self) -> None:
        """End the process group, and running operations."""
        self._group.abort()
