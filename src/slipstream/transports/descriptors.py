"""File descriptors: how many this process may open, and connections that use them up."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from slipstream.errors import OutOfDescriptors

WANTED = 65536
SHARE = 2  # connections are cut when so large a part of the limit is in use
IDLE_MS = 1000  # a member that has just connected is heard before
ERRORS = frozenset({errno.EMFILE, errno.ENFILE})
TCP_INFO_TIMES = struct.Struct("=8B9I4I")  # of tcp_info: up to when data last came in and went out
LAST_DATA_RECEIVED = 19  # in milliseconds, among these


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as the system lets it ask for, up to ``WANTED``.

    A peer costs about ten, and anybody who reaches a port may open connections to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> list[int]:
    place = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [int(name) for name in os.listdir(place)]


def out_of_descriptors(doing: str) -> OutOfDescriptors:
    return OutOfDescriptors(doing, descriptor_limit())


class ConnectionGuard:
    """Keeps connections of people who are not in the job from using up this process's descriptors.

    ZeroMQ and torch's store take any number of connections; ZeroMQ ends those that do not
    authenticate after some seconds, the store never ends one. When descriptors run short, this ends
    idle connections: to the store, which ranks need only until they have met, and to ``link_port``,
    unless a member has spoken over them (``spoken``: the descriptors of those).
    """

    def __init__(self, link_port: int, spoken: Collection[int]) -> None:
        self._link_port, self._spoken = link_port, spoken
        self.store_port: int | None = None
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def look(self) -> int:
        """Call it now and then, always from one thread; how many connections it has ended."""
        self.close()  # looking takes a descriptor, too, and there may be no other
        try:
            opened = open_descriptors()
            if len(opened) <= descriptor_limit() // SHARE:
                return 0
            return sum(self._end(fd) for fd in opened)
        except OSError:
            return 0  # another thread was quicker to use it; the next look may have more luck
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _end(self, fd: int) -> bool:
        with borrowed(fd) as connection:
            if connection is None:
                return False
            port = came_in_at(connection)
            known = port == self._link_port and fd in self._spoken
            ours = port is not None and port in (self._link_port, self.store_port)
            if known or not ours or not is_idle(connection):
                return False
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            return True


@contextmanager
def borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A copy of a socket that other code owns and may close at any time; None if it is none."""
    try:
        # Of a file, closing a copy would release the locks that this process has on it.
        copy = os.dup(fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except OSError:
        copy = None
    if copy is None:
        yield None
        return
    blocking = os.get_blocking(copy)
    with socket.socket(fileno=copy) as connection:
        os.set_blocking(copy, blocking)  # socket's default timeout would change the owner's, too
        yield connection


def came_in_at(connection: socket.socket) -> int | None:
    """The port of this process that a TCP connection was made to; None for anything else."""
    try:
        connection.getpeername()  # raises for a socket that listens
        return int(connection.getsockname()[1])
    except (OSError, IndexError, TypeError, ValueError):
        return None


def is_idle(connection: socket.socket) -> bool:
    """Whether nothing has come in for a while."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_TIMES.size)
        return bool(TCP_INFO_TIMES.unpack(info)[LAST_DATA_RECEIVED] >= IDLE_MS)
    except (OSError, AttributeError, struct.error):
        return True
