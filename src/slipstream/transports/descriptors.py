"""File descriptors: the limit of this process, and connections that use them up."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from slipstream.errors import OutOfDescriptors

WANTED = 65536
SHARE = 2  # connections are closed when 1/SHARE of the limit is in use
IDLE_MS = 1000  # a member sends sooner after it has connected
STUCK_S = 5.0  # longest wait of a member's connection for a descriptor
ERRORS = frozenset({errno.EMFILE, errno.ENFILE})
TCP_INFO_TIMES = struct.Struct("=8B9I4I")  # tcp_info up to the times of the last data in and out
WAITING_CONNECTIONS = 12  # its index among these; of a socket that listens
LAST_DATA_RECEIVED = 19  # another, in milliseconds


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors as far as the system allows, up to ``WANTED``.

    A peer costs about ten, and anyone who reaches a port may open connections to it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> list[int]:
    """Return the descriptors that this process has open."""
    place = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [int(name) for name in os.listdir(place)]


def out_of_descriptors(doing: str) -> OutOfDescriptors:
    """Return the error of an operation that needs one more descriptor."""
    return OutOfDescriptors(doing, descriptor_limit())


class ConnectionGuard:
    """A guard that keeps connections of non-members from using up this process's descriptors.

    ZeroMQ and torch's store accept any number of connections. ZeroMQ closes those that do not
    authenticate after some seconds; the store never closes one. When descriptors run short, the
    guard closes idle connections: to the store, which ranks need only for the rendezvous, and to
    ``link_port``, unless a member has sent messages over them.

    If members and this process itself have used up all descriptors, ZeroMQ tries for ever to accept
    or to open the next connection, and reports nothing. Then the guard raises an error.

    Args:
        link_port: The port at which ZeroMQ listens.
        used: The descriptors of connections over which members have sent messages.
        unconnected: Returns the peers to which ZeroMQ has no connection yet.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        link_port: int,
        used: Collection[int],
        unconnected: Callable[[], Collection[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link_port, self._used = link_port, used
        self._unconnected, self._clock = unconnected, clock
        self.store_port: int | None = None
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Connections are copied to this descriptor to examine them. It is replaced, never closed,
        # because the threads that accept connections would take a descriptor that is free for a
        # moment.
        self._copy = os.dup(self._null)
        self._stuck_since: float | None = None
        self._closed = False

    def tick(self) -> int:
        """Close idle connections; return how many. Call it regularly, always from one thread.

        Raises:
            OutOfDescriptors: A connection has waited too long for a descriptor, and there is none
                to close.
        """
        if self._closed:
            return 0
        limit, none_left = descriptor_limit(), False
        opened: Collection[int] = range(limit)
        try:
            opened = open_descriptors()
        except OSError as error:
            none_left = error.errno in ERRORS  # also for reading the list
        if len(opened) <= limit // SHARE:
            self._stuck_since = None
            return 0
        ended = strangers = waiting = 0
        for fd in opened:
            if fd in (self._null, self._copy):
                continue
            with borrowed(fd, self._copy) as connection:
                if connection is None:
                    continue
                waiting += waiting_at(self._link_port, connection)
                if self._is_strangers(fd, connection):
                    strangers += 1
                    ended += end_if_idle(connection)
        os.dup2(self._null, self._copy, inheritable=False)
        self._check(none_left and not strangers, waiting)
        return ended

    def _is_strangers(self, fd: int, connection: socket.socket) -> bool:
        port = came_in_at(connection)
        known = port == self._link_port and fd in self._used
        return not known and port is not None and port in (self._link_port, self.store_port)

    def _check(self, all_needed: bool, waiting: int) -> None:
        """Raise an error if connections have waited for long, and all descriptors are needed."""
        unconnected = list(self._unconnected()) if all_needed else []
        if not unconnected and not (all_needed and waiting):
            self._stuck_since = None
            return
        now = self._clock()
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since > STUCK_S:
            peer = f"to {unconnected[0]}" if unconnected else "that waits at its port"
            raise out_of_descriptors(f"a connection {peer}")

    def close(self) -> None:
        """Close its own descriptors."""
        if not self._closed:
            self._closed = True
            os.close(self._copy)
            os.close(self._null)


def end_if_idle(connection: socket.socket) -> bool:
    """End a connection over which nothing has come for a while; its owner then closes it."""
    if not is_idle(connection):
        return False
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return True


@contextmanager
def borrowed(fd: int, copy: int) -> Iterator[socket.socket | None]:
    """Yield a socket that other code owns and may close at any time, copied to ``copy``.

    Yields None if ``fd`` is not a socket. The copy stays open afterwards.
    """
    if not copied(fd, copy):
        yield None
        return
    blocking = os.get_blocking(copy)
    connection = socket.socket(fileno=copy)
    try:
        os.set_blocking(copy, blocking)  # socket's default timeout would change the owner's, too
        yield connection
    finally:
        connection.detach()


def copied(fd: int, copy: int) -> bool:
    """Copy a socket to the descriptor ``copy``; False if ``fd`` is not a socket."""
    try:
        # Only sockets: closing a copy of a file would release this process's locks on it.
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        os.dup2(fd, copy, inheritable=False)
    except OSError:
        return False
    return True


def came_in_at(connection: socket.socket) -> int | None:
    """Return the local port of an incoming TCP connection; None for anything else."""
    try:
        connection.getpeername()  # raises for a socket that listens
        return int(connection.getsockname()[1])
    except (OSError, IndexError, TypeError, ValueError):
        return None


def is_idle(connection: socket.socket) -> bool:
    """Return whether nothing was received for a while."""
    idle_ms = tcp_info(connection, LAST_DATA_RECEIVED)
    return idle_ms is None or idle_ms >= IDLE_MS


def waiting_at(port: int, listener: socket.socket) -> int:
    """Return how many connections wait at ``port``, if this socket listens there."""
    try:
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or listener.getsockname()[1] != port:
            return 0
    except (OSError, AttributeError, IndexError, TypeError):
        return 0
    return tcp_info(listener, WAITING_CONNECTIONS) or 0


def tcp_info(connection: socket.socket, index: int) -> int | None:
    """Return one of the kernel's values about a connection; None if it gives none."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_TIMES.size)
        return int(TCP_INFO_TIMES.unpack(info)[index])
    except (OSError, AttributeError, struct.error):
        return None
