"""torchft over gloo: every worker is a replica group of its own.

Its DDP commits every step, and waits for each bucket of gradients before backward continues, so
nothing overlaps. LocalSGD and DiLoCo commit when workers exchange, once in several steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from slipstream.apps.bench.contestants.meeting import LIMIT, meeting_point, own_address
from slipstream.apps.bench.contestants.session import Session, Train
from slipstream.errors import ConfigError


def lighthouse(stack: ExitStack, store: TCPStore, world: int) -> str:
    """Return the address of the lighthouse, which runs in rank 0's process."""
    if os.environ["RANK"] == "0":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="0.0.0.0:0", min_replicas=world)
        stack.callback(server.shutdown)
        # Its own address has its host's name, which the others may not resolve.
        port = server.address().rpartition(":")[2]
        store.set("lighthouse", f"http://{own_address()}:{port}")
    return store.get("lighthouse").decode()


@contextmanager
def managed(*, async_quorum: bool = True) -> Iterator[Any]:
    """Yield this worker's manager, with the stores that the others need of it."""
    from torchft import Manager, ProcessGroupGloo

    world, address = int(os.environ["WORLD_SIZE"]), own_address()
    with ExitStack() as stack:
        shared = meeting_point()  # open as long as the block: others may be late
        own = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=LIMIT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=world,
            use_async_quorum=async_quorum,
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=own.port,
            lighthouse_addr=lighthouse(stack, shared, world),
            replica_id=f"worker{os.environ['RANK']}",
            hostname=address,
            init_sync=False,  # all begin with the same weights
            max_retries=0,  # a step that is not committed does not count
        )
        stack.callback(manager.shutdown)
        yield manager


def every_step() -> Train:
    """Average and commit gradients in every step."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        from torchft import DistributedDataParallel, Optimizer

        with managed() as manager:
            wrapped = DistributedDataParallel(manager, model)
            yield Session(wrapped, Optimizer(manager, optimizer), inner=optimizer)

    return train


def local_sgd(*, every: int = 32) -> Train:
    """Let workers step alone, and average their weights once in ``every`` steps (Stich, 2019)."""
    check_at_least("torchft_local_sgd", 1, every=every)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        from torchft.local_sgd import LocalSGD

        with managed(async_quorum=False) as manager, LocalSGD(manager, model, optimizer, every):
            yield Session(model, optimizer)

    return train


def diloco(
    *,
    every: int = 32,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> Train:
    """Apply an outer Nesterov optimizer to workers' differences (Douillard and others, 2023).

    Each of the fragments is exchanged once in ``every`` steps, in turn. Its result is waited for
    ``delay`` steps later, and mixed with the worker's own weights, whose share is ``mix``.
    """
    check_at_least("torchft_diloco", 1, every=every, fragments=fragments)
    check_at_least("torchft_diloco", 0, lr=lr, momentum=momentum, delay=delay, mix=mix)
    if every % fragments or delay >= every // fragments or mix > 1:
        raise ConfigError(
            f"torchft_diloco: every={every}, fragments={fragments}, delay={delay}, mix={mix}; "
            "torchft wants a multiple of the fragments for every, a delay shorter than "
            "every / fragments, and a mix of at most 1"
        )

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
        from torchft.local_sgd import DiLoCo

        parts = split_evenly(model, fragments)
        outer = [
            torch.optim.SGD(part, lr=lr, momentum=momentum, nesterov=momentum > 0) for part in parts
        ]
        with managed(async_quorum=False) as manager:
            local_steps = DiLoCo(
                manager,
                parts,
                optimizer,
                outer,
                sync_every=every,
                fragment_sync_delay=delay,
                fragment_update_alpha=mix,
            )
            with local_steps:
                yield Session(model, optimizer, weights=partial(outer_weights, local_steps, model))

    return train


def split_evenly(model: nn.Module, count: int) -> list[nn.ParameterList]:
    """Return the model's parameters in order, in ``count`` parts of about as many numbers each.

    Raises:
        ConfigError: There are fewer parameters than parts.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if count > len(parameters):
        raise ConfigError(
            f"torchft_diloco: {count} fragments of {len(parameters)} tensors; take fewer fragments"
        )
    total = sum(p.numel() for p in parameters)
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before, place = 0, 0
    for num_left, parameter in zip(range(len(parameters), 0, -1), parameters, strict=True):
        wanted = min(count - 1, before * count // total)
        # One at a time, so that no part is empty; and soon enough that one is left for each.
        if parts[place] and (place < wanted or num_left <= count - 1 - place):
            place += 1
        parts[place].append(parameter)
        before += parameter.numel()
    return [nn.ParameterList(part) for part in parts]


@contextmanager
def outer_weights(local_steps: Any, model: nn.Module) -> Iterator[None]:
    """Use the weights that all workers agree on, instead of this worker's own, in the block."""
    own = [(p, p.detach().clone()) for p in model.parameters()]
    local_steps._restore_parameters()
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in own:
                parameter.copy_(value)


def check_at_least(name: str, least: int, **arguments: float) -> None:
    """Check the smallest values of arguments.

    Raises:
        ConfigError: An argument is smaller.
    """
    for key, value in arguments.items():
        if not least <= value < math.inf:
            raise ConfigError(f"{name}: {key}={value}; take at least {least}")
