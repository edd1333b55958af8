"""Somebody who sends what nobody should: to listening sockets, with or without the job's secret."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import zmq

from slipstream.transports.credentials import Credentials
from slipstream.transports.wire import (
    AnyBody,
    Beat,
    Configure,
    Fault,
    Fetch,
    Publish,
    Push,
    Ready,
    State,
    checksum,
    encode_header,
)

MEGABYTE = 1 << 20
SEND_S = 60.0
Frames = list[bytes]


class Forger:
    """Makes messages that no member would send, each wrong in at least one way.

    Most come with the process number of the member whose name they bear. Gradients do not: one that
    a member itself sends and that does not fit ends the job.
    """

    def __init__(self, seed: int, processes: Mapping[str, int]) -> None:
        self._random = random.Random(seed)
        self._processes = processes

    def header(self, sender: str, body: AnyBody) -> bytes:
        return encode_header(sender, body, self._processes.get(sender, 0))

    def messages(self, count: int) -> Iterator[Frames]:
        kinds: Sequence[Callable[[], Frames]] = (
            self.noise,
            self.many_frames,
            self.damaged_header,
            self.misplaced_push,
            self.push_in_a_name,
            self.publish_in_a_name,
            self.stranger,
            self.out_of_turn,
            self.piece,
        )
        for number in range(count):
            yield kinds[number % len(kinds)]()

    def bytes_(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randrange(most))

    def noise(self) -> Frames:
        return [self.bytes_(3000)]

    def many_frames(self) -> Frames:
        return [self.bytes_(40) for _ in range(self._random.randrange(1, 200))]

    def damaged_header(self) -> Frames:
        """A header that cannot be read any more: cut, continued, or of wrong types."""
        header = self.header("rank 1", Push(0, 0, 0, [1], 7))
        cut = header[: self._random.randrange(len(header))]
        wrong_type = header.replace(b"push", b"pusc")
        return [self._random.choice([cut, header + b"\0", wrong_type]), self.bytes_(500)]

    def misplaced_push(self) -> Frames:
        """Chunks there are not, rounds long past or far ahead."""
        frame = self.bytes_(500)
        far = self._random.choice([10**6, 2**61])
        body = Push(far, 0, 0, [1], checksum([frame]))
        if self._random.random() < 0.5:
            body = Push(self._random.randrange(3), far, 0, [1], checksum([frame]))
        return [encode_header("rank 1", body), frame]

    def push_in_a_name(self) -> Frames:
        """Plausible but for the size, the segments or the checksum."""
        rank = self._random.choice(["rank 0", "rank 1"])
        chunk, round_ = self._random.randrange(6), self._random.randrange(200)
        size = self._random.choice([0, 1, 1000, 65535, 65536, 65540])
        frame = b"\x7f" * size
        counts = self._random.choice([[], [1], [1, 1], [0, 1], [2], [1] * 100])
        body = Push(chunk, round_, round_, counts, checksum([frame]) ^ 1)
        return [encode_header(rank, body), frame]

    def publish_in_a_name(self) -> Frames:
        frame = b"\x7f" * self._random.choice([0, 1000, 65536])
        chunk, round_ = self._random.randrange(6), self._random.randrange(200)
        sender = self._random.choice(["server 0", "rank 1", "server 9"])
        body = Publish(chunk, 0, round_, [1], checksum([frame]) ^ 1)
        return [self.header(sender, body), frame]

    def stranger(self) -> Frames:
        """Somebody who is in nobody's books, under an ever new name."""
        name = self._random.randbytes(32).hex()
        bodies: Sequence[AnyBody] = (Beat({name: 5}), Beat({}), Ready(), Push(0, 0, 0, [1], 0))
        return [self.header(name, self._random.choice(bodies))]

    def out_of_turn(self) -> Frames:
        """What is somebody's to say, but not this one's, or not now."""
        bodies: Sequence[AnyBody] = (
            Configure(),
            Fault("rank 0", "made up", 0.0),
            Fetch(self._random.choice(["state", "residual", "snapshot", "own weights"])),
            State("first weights", 0, 0, 65536, 0),
            State("state", 0, 0, 4, 0, [(0, "step", "float32")]),
            Ready("no"),
        )
        return [self.header("rank 1", self._random.choice(bodies)), self.bytes_(300)]

    def piece(self) -> Frames:
        """State that nobody asked for; kept, it would fill the memory."""
        frame = bytes(self._random.choice([100, MEGABYTE]))
        sync = self._random.choice([1, 2, 10**6])
        sender = self._random.choice(["rank 0", "rank 1"])
        name = self._random.choice(["copy of rank 0", "own weights", "mean weights", "state"])
        body = State(name, sync, 0, len(frame), checksum([frame]))
        return [self.header(sender, body), frame]


def send_as_member(address: str, credentials: Credentials, messages: Iterator[Frames]) -> None:
    """Over one link, and until everything has been taken."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as link:
        credentials.present(link, address)
        link.sndtimeo = round(SEND_S * 1000)
        link.linger = round(SEND_S * 1000)
        link.connect(address)
        for frames in messages:
            link.send_multipart(frames)


def send_oversized(address: str, credentials: Credentials) -> None:
    """More than a frame may have: the link is cut, so nobody can wait for it to arrive."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as link:
        credentials.present(link, address)
        link.linger = 0
        link.sndtimeo = 2000
        link.connect(address)
        with contextlib.suppress(zmq.Again):
            link.send_multipart([encode_header("rank 1", Fetch("state")), bytes(70 * MEGABYTE)])
            link.send(bytes(2 * MEGABYTE))


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)


def garbage(seed: int) -> Iterator[bytes]:
    """What a stranger may say to a port: noise, half a greeting, impossible lengths, nothing."""
    chance = random.Random(seed)
    two_gigabytes = b"\x06" + struct.pack(">Q", 2 << 30)
    while True:
        yield chance.randbytes(chance.randrange(1, 4000))
        yield GREETING[: chance.randrange(1, len(GREETING))]
        yield GREETING + two_gigabytes + chance.randbytes(2000)
        yield GREETING + b"\x04\x40" + b"\x05HELLO" + b"\xff" + chance.randbytes(50)
        yield struct.pack(">Q", 1 << 62) + chance.randbytes(100)
        yield b"GET / HTTP/1.1\r\n\r\n"
        yield b""


def is_open(link: socket.socket) -> bool:
    """Whether the other end has not closed a connection; drops what it has sent."""
    try:
        while link.recv(65536, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class Crowd:
    """Connections from untracked; some stay open and silent until ``close``."""

    def __init__(self) -> None:
        self._open: dict[socket.socket, int] = {}  # and their port

    def connect(self, ports: Sequence[int], count: int, seed: int) -> None:
        said = garbage(seed)
        for number in range(count):
            content = next(said)
            port = ports[number % len(ports)]
            try:
                link = socket.create_connection(("127.0.0.1", port), 10)
            except OSError:
                time.sleep(0.05)  # the queue for new connections is full; the next one may do
                continue
            with contextlib.suppress(OSError):
                link.sendall(content)
            if content and number % 2:
                link.close()
            else:
                self._open[link] = port

    def idle(self, port: int, count: int) -> None:
        """Connections that never say anything, until no more are taken."""
        with contextlib.suppress(OSError):
            for _ in range(count):
                self._open[socket.create_connection(("127.0.0.1", port), 0.5)] = port

    def not_ended(self, ports: Collection[int]) -> int:
        """Connections to these ports that the other end has not closed; also if it has not
        accepted them yet."""
        return sum(is_open(link) for link, port in self._open.items() if port in ports)

    def close(self) -> None:
        for link in self._open:
            link.close()
