"""Streams of UDP packets that measure the available bandwidth of a path: the protocol.

    prober                                   listener
    HELLO  nonce                 ─────────▶
                                 ◀─────────  WELCOME  nonce of its own
    FILL … PROBE 0 … PROBE K−1   ─────────▶  records when each arrived
    ASK page p                   ─────────▶
                                 ◀─────────  REPORT  arrival times of 168 packets

A packet is a header, a tag and padding. The tag is an HMAC of the header, and of the body if there
is one, with a key derived from the secret and both nonces; a packet without the right tag is
counted and gets no answer. An answer is never larger than its request, which is padded, so a
listener cannot be used to flood another host.

Rates and sizes count whole frames: Ethernet, IP and UDP headers, and the payload.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from slipstream.errors import LaunchError
from slipstream.transports.credentials import Credentials, stretch

LOOPBACK = "127.0.0.1"
PORT = 7998

HEADER = struct.Struct(">5sB2x16sIII")
MAGIC = b"slps\x01"  # the last byte is the version
TAG_NBYTES = 16
NONCE_NBYTES = 16
HEAD_NBYTES = HEADER.size + TAG_NBYTES
LARGEST_NBYTES = 1400  # leaves room for tunnels in a frame of 1500
PAGE_PACKETS = (LARGEST_NBYTES - HEAD_NBYTES) // 8
MOST_PACKETS = 1024
# If a kernel buffer is full, packets are lost that the path would have carried. 4 MiB hold
# MOST_PACKETS even if every packet takes a page.
BUFFER_NBYTES = 4 << 20


class Kind(IntEnum):
    """The type of a packet, in the order of the drawing above."""

    HELLO = 1
    WELCOME = 2
    FILL = 3
    PROBE = 4
    ASK = 5
    REPORT = 6


KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Packet:
    """A header. ``index`` is a probe's place in its stream of ``count``, or a page's number."""

    kind: Kind
    session: bytes
    stream: int = 0
    index: int = 0
    count: int = 0

    def sealed(self, key: bytes, body: bytes = b"", *, padded_to: int = 0) -> bytes:
        head = HEADER.pack(MAGIC, self.kind, self.session, self.stream, self.index, self.count)
        return (head + tag_of(key, head + body) + body).ljust(padded_to, b"\0")


def parse(datagram: bytes) -> Packet | None:
    """Return the header of anything that could be one of our packets; its tag is not checked."""
    if not HEAD_NBYTES <= len(datagram) <= LARGEST_NBYTES:
        return None
    magic, kind, session, stream, index, count = HEADER.unpack_from(datagram)
    if magic != MAGIC or kind not in KINDS:
        return None
    return Packet(Kind(kind), session, stream, index, count)


def genuine(datagram: bytes, key: bytes, body_nbytes: int = 0) -> bool:
    """Return whether the tag was made with the key."""
    body = datagram[HEAD_NBYTES : HEAD_NBYTES + body_nbytes]
    tag = datagram[HEADER.size : HEAD_NBYTES]
    return hmac.compare_digest(tag_of(key, datagram[: HEADER.size] + body), tag)


def greeting_key(secret: bytes | None) -> bytes:
    """Return the key of a greeting. Without a secret, on loopback, it prevents accidents only."""
    master = stretch(secret) if secret else b""
    return Credentials.for_run(master, b"probe", encrypt=False).derive("greeting")


def session_key(greeting: bytes, nonce: bytes, answer: bytes) -> bytes:
    return hmac.digest(greeting, nonce + answer, "sha256")


def tag_of(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")[:TAG_NBYTES]


def resolve(host: str, port: int) -> tuple[int, Any]:
    if not 0 <= port <= 65535:
        raise LaunchError(f"port {port}: give one from 0 to 65535")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchError(f"no host {host!r}: {error.strerror}; give a name or address") from error
    return family, where


def is_loopback(where: tuple[Any, ...]) -> bool:
    return ipaddress.ip_address(where[0].partition("%")[0]).is_loopback


def open_socket(family: int) -> socket.socket:
    new = socket.socket(family, socket.SOCK_DGRAM)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        new.setsockopt(socket.SOL_SOCKET, option, BUFFER_NBYTES)
    return new
