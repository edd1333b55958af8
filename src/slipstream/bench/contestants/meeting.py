"""Where peers that bring no launcher of their own find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

LIMIT = timedelta(seconds=120)


def own_address() -> str:
    """The address under which rank 0's host sees this one; names of hosts lead nowhere in a lab."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def meeting_point() -> TCPStore:
    """A store that all workers share; rank 0 keeps it."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=LIMIT,
    )
