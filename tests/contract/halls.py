"""Places where transports of one kind meet; the contract is checked in each of them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq

from slipstream.transports.credentials import Credentials
from slipstream.transports.memory import MemoryNetwork, MemoryTransport
from slipstream.transports.wire import Message
from slipstream.transports.zmq import ZmqTransport

SECRET = b"correct horse battery staple"
# Far more turns than anything takes: a test that needs all of them has failed.
TURNS = 3000


class Hall:
    """Transports that know each other; ``arrived`` is what each has received so far."""

    def __init__(self) -> None:
        self.members: dict[str, MemoryTransport | ZmqTransport] = {}
        self.arrived: defaultdict[str, list[Message]] = defaultdict(list)

    def make(self, name: str) -> MemoryTransport | ZmqTransport:
        raise NotImplementedError

    def inject(self, target: str, header: bytes, *frames: bytes) -> None:
        """A message of raw parts, as from a member gone mad."""
        raise NotImplementedError

    def join(self, *names: str) -> Sequence[MemoryTransport | ZmqTransport]:
        for name in names:
            self.members[name] = self.make(name)
        for member in self.members.values():
            for peer, other in self.members.items():
                if peer != member.name:
                    member.connect(peer, other.address)
        return [self.members[name] for name in names]

    def turn(self, *only: str) -> None:
        """Everybody looks once."""
        for name in only or tuple(self.members):
            if (message := self.members[name].receive(0.01)) is not None:
                self.arrived[name].append(message)

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if holds():
                return
            self.turn()
        pytest.fail(f"it never came to this; arrived: {dict(self.arrived)}")

    def until_arrived(self, name: str, count: int) -> list[Message]:
        self.until(lambda: len(self.arrived[name]) >= count)
        return self.arrived[name]

    def close(self) -> None:
        for member in self.members.values():
            member.close(0.0)
        self.members.clear()


class MemoryHall(Hall):
    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork(seed=3)

    def make(self, name: str) -> MemoryTransport:
        return self.network.endpoint(name)

    def inject(self, target: str, header: bytes, *frames: bytes) -> None:
        self.network.post("mad", target, header, frames, 0)


class ZmqHall(Hall):
    def __init__(self, *, encrypt: bool) -> None:
        super().__init__()
        self.credentials = Credentials.for_run(SECRET, b"job", encrypt=encrypt)
        self._context = zmq.Context()
        self._raw: list[zmq.Socket[bytes]] = []
        self.events: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}

    def make(self, name: str) -> ZmqTransport:
        return ZmqTransport(name, host="127.0.0.1", credentials=self.credentials)

    def raw(self, target: str, credentials: Credentials | None) -> zmq.Socket[bytes]:
        """A bare socket connected to a member; ``events`` tells how it fares."""
        socket = self._context.socket(zmq.PUSH)
        self._raw.append(socket)
        self.events[socket] = socket.get_monitor_socket()
        if credentials is not None:
            credentials.present(socket, self.members[target].address)
        socket.connect(self.members[target].address)
        return socket

    def inject(self, target: str, header: bytes, *frames: bytes) -> None:
        if not self._raw:
            self.raw(target, self.credentials)
        self._raw[0].send_multipart([header, *frames])

    def close(self) -> None:
        super().close()
        for socket in self._raw:
            socket.disable_monitor()
            self.events.pop(socket).close(0)
            socket.close(0)
        self._context.term()


KINDS: dict[str, Callable[[], Hall]] = {
    "memory": MemoryHall,
    "zmq-plain": lambda: ZmqHall(encrypt=False),
    "zmq-curve": lambda: ZmqHall(encrypt=True),
}


@contextlib.contextmanager
def opened(kind: str) -> Iterator[Hall]:
    hall = KINDS[kind]()
    try:
        yield hall
    finally:
        hall.close()
