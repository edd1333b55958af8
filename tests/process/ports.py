"""Ports that a test hands to a job, free until the job itself listens there."""

from __future__ import annotations

import secrets
import socket

# Below what the kernel gives to connections and to listeners without a port of their own: between
# the look and the use, only somebody who names the port could take it.
LOWEST, HIGHEST = 20_000, 32_000


def free_port() -> int:
    while True:
        port = LOWEST + secrets.randbelow(HIGHEST - LOWEST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
