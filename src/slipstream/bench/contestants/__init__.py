"""The compared systems: slipstream's own by their names, and those of other libraries.

A contestant makes a model and an optimizer data-parallel for as long as a block runs. If a library
is not installed, the error says what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from slipstream.bench.contestants import ablation, ddp, hivemind, ours, torchft
from slipstream.bench.contestants.session import Session
from slipstream.errors import UnknownStrategy
from slipstream.systems import parse

__all__ = ["PEERS", "Peer", "Session", "check", "training", "why_missing"]

Train = Callable[[nn.Module, torch.optim.Optimizer], Iterator[Session]]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library's system; ``needs`` is a module beyond torch, ``extra`` what installs it."""

    train: Train
    needs: str | None = None
    extra: str = ""


def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    """No exchange at all: the time of the computation."""
    yield Session(model, optimizer)


PEERS: dict[str, Peer] = {
    "local": Peer(alone),
    "ako-accumulation": Peer(ablation.without_accumulation),
    "ddp": Peer(ddp.contestant(ddp.plain)),
    "ddp+fp16": Peer(ddp.contestant(ddp.fp16)),
    "ddp+powersgd": Peer(ddp.contestant(ddp.powersgd, ddp.ONE_BUCKET_MB)),
    "hivemind": Peer(hivemind.train, needs="hivemind", extra="hivemind"),
    "torchft": Peer(torchft.train, needs="torchft", extra="torchft"),
}


def check(system: str) -> None:
    """Refuse a name that is neither another library's nor a strategy of slipstream."""
    if system not in PEERS:
        try:
            parse(system)
        except UnknownStrategy as error:
            raise UnknownStrategy(f"{error}; and beside them {', '.join(PEERS)}") from error


def why_missing(system: str) -> str | None:
    """What has to be installed before this system can take part; None if nothing."""
    peer = PEERS.get(system)
    if peer is None or peer.needs is None or find_spec(peer.needs) is not None:
        return None
    return f"{peer.needs} is not installed: pip install 'slipstream[{peer.extra}]'"


def training(
    system: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[Session]:
    """Train with the contestant of this name within the block."""
    peer = PEERS.get(system)
    train: Train = peer.train if peer is not None else partial(ours.train, system)
    return contextmanager(train)(model, optimizer)
