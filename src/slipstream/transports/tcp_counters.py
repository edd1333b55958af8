"""Linux's counters of a TCP connection that other code owns."""

from __future__ import annotations

import os
import socket
import struct
import sys

# Bytes acknowledged and microseconds busy, in struct tcp_info as it is since Linux 4.10.
_BYTES_ACKED_AT, _BUSY_US_AT, _NBYTES = 120, 168, 176
_COUNTER = struct.Struct("@Q")


def acknowledged(fd: int, port: int) -> tuple[int, float]:
    """Return the bytes that the other end has acknowledged, and the seconds with data in flight.

    Both are 0 if the kernel does not count them, or if the descriptor is no longer the
    connection to this port.
    """
    if sys.platform != "linux":
        return 0, 0.0
    try:
        duplicate = os.dup(fd)
    except OSError:
        return 0, 0.0
    try:
        return _read(duplicate, port)
    except OSError:
        return 0, 0.0
    finally:
        os.close(duplicate)


def _read(fd: int, port: int) -> tuple[int, float]:
    connection = socket.socket(fileno=fd)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NBYTES)
        if connection.getpeername()[1] != port or len(info) < _NBYTES:
            return 0, 0.0
    finally:
        connection.detach()
    (nbytes,) = _COUNTER.unpack_from(info, _BYTES_ACKED_AT)
    (busy_us,) = _COUNTER.unpack_from(info, _BUSY_US_AT)
    return nbytes, busy_us / 1e6
