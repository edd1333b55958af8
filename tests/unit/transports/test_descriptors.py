"""Descriptors: the limit is raised, connections are cut by number, running out is our error."""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from slipstream.errors import OutOfDescriptors
from slipstream.transports.descriptors import StoreGuard, cut, raise_descriptor_limit


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_connection_that_came_in_is_cut(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as outside:
        inside, _ = listener.accept()
        with inside:
            assert cut(inside.fileno(), port_of(listener))
            assert outside.recv(1) == b""
            assert inside.fileno() >= 0, "its owner closes it"


def test_what_has_got_the_number_since_is_left_alone(listener: socket.socket) -> None:
    port = port_of(listener)
    with socket.create_connection(listener.getsockname()) as outside, tempfile.TemporaryFile() as f:
        before = len(os.listdir("/proc/self/fd"))
        assert not cut(f.fileno(), port)
        assert not cut(listener.fileno(), port)
        assert not cut(outside.fileno(), port)
        assert not cut(10**6, port)
        left, right = socket.socketpair()
        with left, right:
            assert not cut(left.fileno(), port)
            left.send(b"x")
            assert right.recv(1) == b"x"
        assert len(os.listdir("/proc/self/fd")) == before


PROGRAM = """
import json, resource, socket, sys
from slipstream.errors import RuntimeFault
from slipstream.transports.credentials import Credentials
from slipstream.transports.wire import Fetch
from slipstream.transports.zmq import ZmqTransport
peers, limit = int(sys.argv[1]), int(sys.argv[2])
credentials = Credentials(b"key", encrypt=False)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
hub = ZmqTransport("hub", host="127.0.0.1", credentials=credentials)
listener = socket.create_server(("127.0.0.1", 0))
try:
    for peer in range(peers):
        hub.connect(f"peer {peer}", f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        hub.send(f"peer {peer}", Fetch(0))
        hub.send(f"peer {peer}", Fetch(1), priority=-1_000_000)
    hub.receive(0.01)
    print(json.dumps("enough"))
except RuntimeFault as fault:
    print(json.dumps(f"{type(fault).__name__}: {fault}"))
hub.close(0.0)
"""


def with_limit(peers: int, limit: int) -> str:
    command = [sys.executable, "-c", PROGRAM, str(peers), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return str(json.loads(done.stdout))


def test_a_hundred_peers_fit_into_the_usual_limit() -> None:
    assert with_limit(100, 1024) == "enough"


def test_running_out_is_an_error_of_ours() -> None:
    told = with_limit(100, 256)
    assert told.startswith("OutOfDescriptors: a connection to peer ")
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


def test_connections_to_the_store_are_cut_when_descriptors_run_short(
    listener: socket.socket,
) -> None:
    guard = StoreGuard(port_of(listener))
    with socket.create_connection(listener.getsockname()) as outside:
        inside, _ = listener.accept()
        outside.settimeout(0.05)
        guard.look()
        with pytest.raises(TimeoutError):
            outside.recv(1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            few = len(os.listdir("/proc/self/fd")) + 4
            resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
            guard.look()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert outside.recv(1) == b""
        inside.close()
