"""Checks of a message's sender at a server; a wrong one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from slipstream.errors import FrameRefused
from slipstream.runtime.members.member import HUB
from slipstream.transports.wire import Message
from slipstream.types import Cluster, Node, Rank, rank_of

COORDINATOR = "server 0"  # decides which contributions make a round, and leases batches
B = TypeVar("B")


def server_of(name: str) -> int:
    """Return the number in a server's name: 2 for ``server 2``; -1 for anything else."""
    return rank_of(name, "server")


def worker_of(message: Message[Any], cluster: Cluster) -> Node:
    """Return the worker of the cluster that sent a message.

    Raises:
        FrameRefused: The sender is none. If hosts are the workers, only one rank of a host is.
    """
    worker = cluster.worker(message.sender)
    if worker < 0:
        raise FrameRefused(f"{type(message.body).__name__} from {message.sender}")
    return worker


def asking_rank(message: Message[Any], cluster: Cluster) -> Rank:
    """Return the rank that sent a message, whichever rank represents it in rounds.

    Raises:
        FrameRefused: The sender is not of this job, so there is no link back to it.
    """
    rank = rank_of(message.sender)
    if not 0 <= rank < cluster.ranks:
        raise FrameRefused(f"{type(message.body).__name__} from {message.sender}")
    return rank


def require_rank(rank: Rank, cluster: Cluster) -> None:
    """Check that the cluster has the worker that a message is about."""
    if rank >= cluster.workers:
        raise FrameRefused(f"there is no rank {rank}")


def require_coordinator(message: Message[Any]) -> None:
    """Check that a decision comes from the coordinator."""
    if message.sender != COORDINATOR:
        raise FrameRefused(f"a decision from {message.sender}")


def from_hub(handler: Callable[[Message[B]], None]) -> Callable[[Message[B]], None]:
    """Return a handler for a request that only rank 0 may make."""

    def handle(message: Message[B]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{type(message.body).__name__} from {message.sender}")
        handler(message)

    return handle
