"""torch's DistributedDataParallel over gloo, plain and with its own gradient compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.bench.contestants.session import Session

POWERSGD_RANK = 4
POWERSGD_STARTS_AT = 2  # the earliest it allows; the warm-up must be longer
ONE_BUCKET_MB = 1 << 14  # with several, PowerSGD's hook fails over gloo
LIMIT = timedelta(seconds=120)

Hook = Callable[[DistributedDataParallel], None]


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain(_model: DistributedDataParallel) -> None:
    """Send gradients unchanged."""


def fp16(model: DistributedDataParallel) -> None:
    """Send gradients in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)


def powersgd(model: DistributedDataParallel) -> None:
    """Low-rank gradients with error feedback (Vogels and others, 2019)."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_STARTS_AT,
    )
    model.register_comm_hook(state, powerSGD_hook)


def contestant(
    hook: Hook, bucket_mb: int | None = None
) -> Callable[[nn.Module, torch.optim.Optimizer], Iterator[Session]]:
    """DDP with this communication hook, in buckets of this size or torch's own."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        with group():
            wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            hook(wrapped)
            yield Session(wrapped, optimizer)

    return train
