"""torch's DistributedDataParallel over gloo, plain and with its own gradient compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.apps.bench.contestants.session import Session, Train
from slipstream.errors import ConfigError

POWERSGD_STARTS_AT = 2  # the earliest step it allows; a warm-up has to be longer
ONE_BUCKET_MB = 1 << 14  # with several, PowerSGD's hook breaks off over gloo
LIMIT = timedelta(seconds=120)

Hook = Callable[[DistributedDataParallel], None]


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain() -> Train:
    """Send gradients unchanged."""
    return contestant(lambda _model: None)


def fp16() -> Train:
    """Send gradients in half precision."""

    def hook(model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model.register_comm_hook(None, fp16_compress_hook)

    return contestant(hook)


def powersgd(*, rank: int = 4) -> Train:
    """Send low-rank gradients with error feedback (Vogels and others, 2019)."""
    if rank < 1:
        raise ConfigError(f"ddp+powersgd: rank={rank}; take at least 1")

    def hook(model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_STARTS_AT,
        )
        model.register_comm_hook(state, powerSGD_hook)

    return contestant(hook, ONE_BUCKET_MB)


def contestant(hook: Hook, bucket_mb: int | None = None) -> Train:
    """Return DDP whose gradients are sent by ``hook``, in buckets of this size or torch's own."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        with group():
            wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            hook(wrapped)
            yield Session(wrapped, optimizer)

    return train
