"""The compared systems: slipstream's own by their names, and those of other libraries.

A contestant makes a model and an optimizer data-parallel for as long as a block runs. If a library
is not installed, the error names the package to install.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from slipstream.apps.bench.contestants import ablation, ddp, hivemind, ours, torchft
from slipstream.apps.bench.contestants.session import Session, Train
from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.systems import parse, read_call

__all__ = ["PEERS", "Peer", "Session", "check", "is_peer", "training", "why_missing"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another project's system; ``needs`` is a module beyond torch, ``extra`` installs it.

    ``make`` is called with the arguments after its name, and refuses invalid ones.
    """

    make: Callable[..., Train]
    needs: str | None = None
    extra: str = ""


def alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    """Train without any exchange, for the time of the computation."""
    yield Session(model, optimizer)


PEERS: dict[str, Peer] = {
    "local": Peer(lambda: alone),
    "ako-accumulation": Peer(lambda: ablation.without_accumulation),
    "ddp": Peer(ddp.plain),
    "ddp+fp16": Peer(ddp.fp16),
    "ddp+powersgd": Peer(ddp.powersgd),
    "hivemind": Peer(lambda: hivemind.train, needs="hivemind", extra="hivemind"),
    "torchft": Peer(torchft.every_step, needs="torchft", extra="torchft"),
    "torchft_local_sgd": Peer(torchft.local_sgd, needs="torchft", extra="torchft"),
    "torchft_diloco": Peer(torchft.diloco, needs="torchft", extra="torchft"),
}


def name_of(system: str) -> str:
    """Return the name without the arguments."""
    return system.partition("(")[0].strip()


def is_peer(system: str) -> bool:
    return name_of(system) in PEERS


def check(system: str) -> None:
    """Check that a system is a peer or a strategy of ours, with arguments that it can have.

    Raises:
        UnknownStrategy: There is no such system, or it does not take these arguments.
        ConfigError: An argument's value is invalid.

    >>> check("ddp+powersgd(rank=2)")
    """
    if is_peer(system):
        _create(system)
        return
    try:
        parse(system)
    except UnknownStrategy as error:
        raise UnknownStrategy(f"{error}; and of other projects {', '.join(PEERS)}") from error


def _create(system: str) -> Train:
    """Return a peer with its arguments: numbers, as ``every=32``."""
    name = name_of(system)
    # Names of peers have characters that no call can have.
    _, arguments = read_call("peer" + system.strip()[len(name) :])
    takes = inspect.signature(PEERS[name].make).parameters
    for key, value in arguments.items():
        if key not in takes:
            known = ", ".join(takes) or "no arguments"
            raise UnknownStrategy(f"{name} does not take {key}: it takes {known}")
        _check_number(name, key, value, takes[key].default)
    return PEERS[name].make(**arguments)


def _check_number(name: str, key: str, value: Any, default: int | float) -> None:
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name}: {key}={value!r} is not {kind}; its default is {default}")


def why_missing(system: str) -> str | None:
    """Return what has to be installed before this one can take part; None if nothing."""
    peer = PEERS.get(name_of(system))
    if peer is None or peer.needs is None or find_spec(peer.needs) is not None:
        return None
    return f"{peer.needs} is not installed: pip install 'slipstream[{peer.extra}]'"


def training(
    system: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> AbstractContextManager[Session]:
    """Return a context in which the contestant of this name trains."""
    train: Train = _create(system) if is_peer(system) else partial(ours.train, system)
    return contextmanager(train)(model, optimizer)
