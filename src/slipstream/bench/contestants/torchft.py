"""torchft over gloo: every worker is its own replica group, and commits every step.

Its DDP waits for each bucket of gradients before backward continues, so nothing overlaps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import nn
from torch.distributed import TCPStore

from slipstream.bench.contestants.meeting import LIMIT, meeting_point, own_address
from slipstream.bench.contestants.session import Session


def lighthouse(stack: ExitStack, store: TCPStore, world: int) -> str:
    """The address of the lighthouse, which runs in rank 0's process."""
    if os.environ["RANK"] == "0":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="0.0.0.0:0", min_replicas=world)
        stack.callback(server.shutdown)
        # It would send its host's name, which the others may not resolve.
        port = server.address().rpartition(":")[2]
        store.set("lighthouse", f"http://{own_address()}:{port}")
    return store.get("lighthouse").decode()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Session]:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    world, address = int(os.environ["WORLD_SIZE"]), own_address()
    with ExitStack() as stack:
        shared = meeting_point()  # open as long as the block: others may be late
        own = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=LIMIT),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=world,
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
        wrapped = DistributedDataParallel(manager, model)
        yield Session(wrapped, Optimizer(manager, optimizer), inner=optimizer)
