"""The rendezvous of libraries without their own launcher."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

LIMIT = timedelta(seconds=120)


def own_address() -> str:
    """Return this host's address as seen from rank 0's; host names do not resolve in a lab."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


def meeting_point() -> TCPStore:
    """Return a store that all workers share; rank 0 hosts it."""
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
        timeout=LIMIT,
    )
