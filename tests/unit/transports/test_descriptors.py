"""Descriptors: the limit is raised, connections are cut by number, running out is our error."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from slipstream.errors import OutOfDescriptors
from slipstream.transports import descriptors
from slipstream.transports.credentials import Credentials
from slipstream.transports.descriptors import ConnectionGuard, raise_descriptor_limit
from slipstream.transports.wire import Echo
from slipstream.transports.zmq import ZmqTransport

LIMIT_S = 60.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few descriptors are left, and nothing has to be idle for long."""
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 1)
    monkeypatch.setattr(descriptors, "IDLE_MS", 0)


@pytest.mark.usefixtures("short")
def test_idle_connections_are_ended_but_not_those_of_members(listener: socket.socket) -> None:
    with (
        socket.create_connection(listener.getsockname()) as member,
        socket.create_connection(listener.getsockname()) as stranger,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(other.getsockname()) as elsewhere,
    ):
        inside = [listener.accept()[0], listener.accept()[0], other.accept()[0]]
        guard = ConnectionGuard(port_of(listener), {inside[0].fileno()})
        assert guard.tick() == 1
        assert stranger.recv(1) == b""
        for connection in (member, elsewhere):
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)
        guard.store_port = port_of(other)
        assert guard.tick() >= 1
        elsewhere.setblocking(True)
        assert elsewhere.recv(1) == b""
        guard.close()
        for connection in inside:
            connection.close()


def test_who_has_just_connected_is_given_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 1)
    monkeypatch.setattr(descriptors, "IDLE_MS", 60_000)
    with socket.create_connection(listener.getsockname()):
        inside, _ = listener.accept()
        guard = ConnectionGuard(port_of(listener), ())
        assert guard.tick() == 0
        guard.close()
        inside.close()


@pytest.mark.usefixtures("short")
def test_nothing_else_is_touched(listener: socket.socket) -> None:
    """Whatever has got the number of a connection since."""
    guard = ConnectionGuard(port_of(listener), ())
    left, right = socket.socketpair()
    with left, right, tempfile.TemporaryFile() as file:
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert guard.tick() == 0
        assert sorted(os.listdir("/proc/self/fd")) == before
        left.send(b"x")
        assert right.recv(1) == b"x"
        file.write(b"x")
        fcntl.lockf(file, fcntl.LOCK_EX)
        blocking = socket.create_connection(listener.getsockname())
        socket.setdefaulttimeout(5)
        guard.tick()
        socket.setdefaulttimeout(None)
        assert os.get_blocking(blocking.fileno()), "its owner wants it so"
        assert os.get_blocking(left.fileno())
        blocking.close()
        name = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        probe = f"import fcntl; fcntl.lockf(open({name!r}, 'rb+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        held = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
        assert b"BlockingIOError" in held.stderr, "the lock of this process is gone"
        with socket.create_connection(listener.getsockname()):
            listener.accept()[0].close()
    guard.close()


def test_a_look_works_when_nothing_is_left(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "IDLE_MS", 0)
    guard = ConnectionGuard(port_of(listener), ())
    guard.store_port = port_of(listener)
    outside = socket.create_connection(listener.getsockname())
    inside, _ = listener.accept()
    with all_descriptors_taken():
        assert guard.tick() == 1
    assert outside.recv(1) == b""
    guard.close()
    for connection in (inside, outside):
        connection.close()


@contextlib.contextmanager
def all_descriptors_taken() -> Iterator[None]:
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("waits", ["to be accepted", "to be opened", "none"])
@pytest.mark.parametrize("stranger", [False, True])
def test_a_connection_that_cannot_be_made_ends_the_job_if_none_can_be_closed(
    listener: socket.socket, waits: str, stranger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "IDLE_MS", 60_000)  # a stranger's connection is new
    now = [0.0]
    accepted = socket.create_connection(listener.getsockname())
    inside, _ = listener.accept()
    pending = socket.socket()
    if waits == "to be accepted":
        pending.connect(listener.getsockname())
    guard = ConnectionGuard(
        port_of(listener),
        () if stranger else {inside.fileno()},
        lambda: ["rank 2"] if waits == "to be opened" else [],
        lambda: now[0],
    )
    told = ""
    with all_descriptors_taken():
        try:
            for now[0] in (0.0, 0.9 * descriptors.STUCK_S, 1.1 * descriptors.STUCK_S):
                assert guard.tick() == 0
        except OutOfDescriptors as error:
            told = str(error)
    named = {"to be accepted": "that waits at its port", "to be opened": "to rank 2"}.get(waits, "")
    expected = f"a connection {named} needs" if named and not stranger else ""
    assert told.partition(" a file descriptor")[0] == expected
    assert not told or now[0] > descriptors.STUCK_S
    guard.close()
    for connection in (accepted, inside, pending):
        connection.close()


PROGRAM = """
import json, resource, sys
from slipstream.errors import RuntimeFault
from slipstream.transports.credentials import Credentials
from slipstream.transports.wire import Echo
from slipstream.transports.zmq import ZmqTransport
peers, limit, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
hub = ZmqTransport("hub", host="127.0.0.1", credentials=Credentials(b"key", False))
try:
    for peer in range(peers):
        hub.connect(f"peer {peer}", address)
        hub.send(f"peer {peer}", Echo(0))
        hub.send(f"peer {peer}", Echo(1), priority=-1_000_000)
    hub.receive(0.01)
    print(hub.address, flush=True)
    heard = set()
    while len(heard) < 2 * peers:
        message = hub.receive(0.1)
        hub.guard.tick()
        if message is not None:
            heard.add(message.body.number)
    print(json.dumps("enough"))
except RuntimeFault as fault:
    print(json.dumps(f"{type(fault).__name__}: {fault}"))
hub.close(0.0)
"""


def with_limit(peers: int, limit: int) -> str:
    """What a process says that has so many peers, each with two links either way."""
    raise_descriptor_limit()
    everybody = ZmqTransport("peer", host="127.0.0.1", credentials=Credentials(b"key", False))
    command = [sys.executable, "-c", PROGRAM, str(peers), str(limit), everybody.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hub:
        assert hub.stdout is not None
        said = hub.stdout.readline().strip()
        if said.startswith("tcp://"):
            for peer in range(peers):
                everybody.connect(f"hub {peer}", said)
                everybody.send(f"hub {peer}", Echo(peer))
                everybody.send(f"hub {peer}", Echo(peers + peer), priority=-1_000_000)
            deadline = time.monotonic() + LIMIT_S
            while hub.poll() is None and time.monotonic() < deadline:
                everybody.receive(0.05)
            hub.kill()
            said = hub.stdout.readline() or json.dumps("nothing")
    everybody.close(0.0)
    return str(json.loads(said))


def test_a_hundred_peers_take_a_thousand_descriptors() -> None:
    assert with_limit(100, 1040) == "enough"


def test_running_out_is_an_error_of_ours() -> None:
    told = with_limit(40, 256)
    # Of this process, or of ZeroMQ's thread: whoever needs the last descriptor.
    assert re.match("OutOfDescriptors: a connection (to peer [0-9]+|that waits at its port) ", told)
    assert "all 256" in told
    assert "ulimit -n" in told


def test_it_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(OutOfDescriptors("a connection to rank 1", 64)))
    assert (error.doing, error.limit) == ("a connection to rank 1", 64)
    assert "rank 1" in str(error)


def test_the_limit_is_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, before[1]))
        raise_descriptor_limit()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised > 500
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
