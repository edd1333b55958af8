"""hivemind's GradientAverager: one group of all workers, formed again for every step over its DHT.

Its Optimizer lets a worker continue while others have not yet reported their samples, so it would
not average every step; the averager beneath it does. Groups form while the model computes;
gradients are sent after backward, encrypted like everything in libp2p.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from slipstream.apps.bench.contestants.meeting import LIMIT, meeting_point, own_address
from slipstream.apps.bench.contestants.session import Session
from slipstream.apps.bench.fork_server import die_with_parent

MATCHMAKING_S = 3.0  # hivemind's advice for small local runs
REQUEST_LIMIT_S = 1.0  # two peers that request each other at once wait this long; must be shorter


def tidy(stack: ExitStack) -> None:
    """Let hivemind's processes, shared memory and sockets end with this process, even if killed."""
    os.register_at_fork(after_in_child=die_with_parent)
    os.environ["HIVEMIND_MEMORY_SHARING_STRATEGY"] = "file_descriptor"  # read when it is imported
    from hivemind.p2p import P2P

    folder = tempfile.TemporaryDirectory(prefix="hivemind-", dir=os.environ.get("TMPDIR"))
    P2P._UNIX_SOCKET_PREFIX = f"/unix{stack.enter_context(folder)}/"


def joined_dht(stack: ExitStack, store: TCPStore) -> Any:
    """Return a node of the DHT; the others join by rank 0's."""
    from hivemind import DHT

    first = os.environ["RANK"] == "0"
    dht = DHT(
        initial_peers=None if first else store.get("peers").decode().split(),
        host_maddrs=[f"/ip4/{own_address()}/tcp/0"],
        start=True,
        # No worker is behind a router.
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )
    stack.callback(dht.shutdown)
    if first:
        store.set("peers", " ".join(map(str, dht.get_visible_maddrs())))
    return dht


class Rounds:
    """One round of averaging per step: prepared at its forward, done before its update."""

    def __init__(self, averager: Any, world: int) -> None:
        self._averager, self._world = averager, world
        self._next: Any = None
        self._averaged = ExitStack()

    def prepare(self, *_: object) -> None:
        if self._next is None:
            self._next = self._averager.schedule_step(timeout=LIMIT.total_seconds())

    def average(self, *_: object) -> None:
        control, self._next = self._next, None
        self._averager.accumulate_grads_(batch_size=1)  # all count equally
        group = self._averager.step(control=control, timeout=LIMIT.total_seconds())
        if len(group) < self._world:
            raise RuntimeError(f"averaged among {len(group)} of {self._world} workers")
        self._averaged.enter_context(self._averager.use_averaged_gradients())

    def done(self, *_: object) -> None:
        self._averaged.close()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    world = int(os.environ["WORLD_SIZE"])
    with ExitStack() as stack:
        tidy(stack)
        from hivemind.optim.grad_averager import GradientAverager

        shared = meeting_point()  # open as long as the block: others may be late
        averager = GradientAverager(
            [p for p in model.parameters() if p.requires_grad],
            dht=joined_dht(stack, shared),
            prefix="bench",
            start=True,
            reuse_grad_buffers=True,
            target_group_size=world,
            min_group_size=world,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_LIMIT_S,
            allreduce_timeout=LIMIT.total_seconds(),
        )
        stack.callback(averager.shutdown)
        rounds = Rounds(averager, world)
        stack.callback(rounds.close)
        model.register_forward_pre_hook(rounds.prepare)
        optimizer.register_step_pre_hook(rounds.average)
        optimizer.register_step_post_hook(rounds.done)
        yield Session(model, optimizer)
