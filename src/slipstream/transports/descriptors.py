"""File descriptors: how many this process may open, and connections that use them up."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

from slipstream.errors import OutOfDescriptors

WANTED = 65536
STORE_SHARE = 2  # connections to the store are cut when so large a part of the limit is in use
ERRORS = frozenset({errno.EMFILE, errno.ENFILE})


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system lets it ask for, up to ``WANTED``.

    A peer costs about ten, and anybody who reaches a port may open connections to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> list[int]:
    """All that are open now."""
    place = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [int(name) for name in os.listdir(place)]


def out_of_descriptors(doing: str) -> OutOfDescriptors:
    return OutOfDescriptors(doing, descriptor_limit())


def cut(fd: int, port: int) -> bool:
    """End a connection that came in at ``port`` and that other code owns; whether there was one.

    The owner may have closed the descriptor, and something else may have got its number: what is
    looked at and shut down is a copy, which nobody else can close.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        return False
    try:
        with socket.socket(fileno=copy) as connection:
            if connection.getsockname()[1] != port:
                return False
            connection.getpeername()  # raises for the socket that listens
            connection.shutdown(socket.SHUT_RDWR)
            return True
    except (OSError, IndexError, TypeError):  # no socket, or not of this kind
        with contextlib.suppress(OSError):
            os.close(copy)
        return False


class StoreGuard:
    """Keeps connections to torch's store from using up the descriptors of rank 0.

    The store takes any number of connections and never ends one. Once the ranks have met they need
    none of them, so that all can be cut when descriptors run short.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def look(self) -> None:
        """Call it now and then, from any thread."""
        opened = open_descriptors()
        if len(opened) > descriptor_limit() // STORE_SHARE:
            for fd in opened:
                cut(fd, self._port)
