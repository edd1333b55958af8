"""Messages between two processes of one machine over a socket that both inherited.

No other process can connect: such a socket has no address. A message is a typed msgpack body, and
may carry a descriptor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from slipstream.errors import FrameRefused

LARGEST = 64 * 1024 * 1024
HEAD = struct.Struct("<IB")  # number of following bytes, and of descriptors
Body = TypeVar("Body")


class Hangup(Exception):
    """An error that the other side has closed, or died."""


class LocalSocket(Generic[Body]):
    """One end of a local connection. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket, bodies: type[Body]) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(bodies)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._received = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self._end.fileno()

    def send(self, body: object, descriptor: int | None = None) -> None:
        """Send a message; raise ``Hangup`` if the other end is closed, ``TimeoutError`` if late."""
        content = self._encoder.encode(body)
        frame = HEAD.pack(len(content), int(descriptor is not None)) + content
        with self._sending:
            try:
                if descriptor is not None:
                    sent = socket.send_fds(self._end, [frame], [descriptor])
                    frame = frame[sent:]
                self._end.sendall(frame)
            except BlockingIOError:
                raise TimeoutError from None
            except OSError as error:
                raise Hangup(str(error)) from error

    def has_input(self) -> bool:
        """Return whether there is something to receive; two messages may arrive as one."""
        return bool(self._received) or bool(select.select([self._end], [], [], 0)[0])

    def receive(self, limit_s: float | None = None) -> tuple[Body, int | None]:
        """Return the next message, and its descriptor. Raise ``Hangup`` if the other side is
        closed, ``TimeoutError`` if no message arrives in time."""
        self._fill(HEAD.size, limit_s)
        nbytes, descriptors = HEAD.unpack_from(self._received)
        if nbytes > LARGEST:
            raise FrameRefused(f"a message of {nbytes} bytes; the limit is {LARGEST}")
        self._fill(HEAD.size + nbytes, limit_s)
        content = bytes(self._received[HEAD.size : HEAD.size + nbytes])
        del self._received[: HEAD.size + nbytes]
        if descriptors > len(self._descriptors):
            raise FrameRefused("a message that lacks its descriptor")
        try:
            body = self._decoder.decode(content)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise FrameRefused(f"a message that cannot be decoded: {error}") from error
        return body, self._descriptors.pop(0) if descriptors else None

    def _fill(self, nbytes: int, limit_s: float | None) -> None:
        while len(self._received) < nbytes:
            self._end.settimeout(limit_s)
            try:
                content, descriptors, _, _ = socket.recv_fds(self._end, 1 << 16, 4)
            except TimeoutError:
                raise
            except OSError as error:
                raise Hangup(str(error)) from error
            finally:
                self._end.settimeout(None)
            if not content:
                raise Hangup("it has closed")
            self._received += content
            self._descriptors += descriptors

    def hang_up(self) -> None:
        """End the connection for both sides, even if other processes have this end too."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end, and descriptors that were never taken."""
        self._end.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def is_socket(descriptor: int) -> bool:
    """Return whether a descriptor is a socket. It is not in a worker's child, which only inherits
    the environment variable."""
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def socket_pair(send_s: float | None = None) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets; sends of the first raise ``TimeoutError`` after ``send_s``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if send_s is not None:
        limit = struct.pack("ll", int(send_s), int(send_s % 1 * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return ours, theirs
