"""What every transport must do; a new one joins by an entry in ``halls.KINDS``."""

import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from halls import KINDS, SECRET, Hall, MemoryHall, ZmqHall, opened
from zmq.utils.monitor import recv_monitor_message

from slipstream.errors import FrameRefused, LaunchError
from slipstream.transports import descriptors
from slipstream.transports import zmq as zmq_module
from slipstream.transports.credentials import Credentials
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import (
    HEADER_BYTES,
    AnyBody,
    Beat,
    Echo,
    Leave,
    Message,
    Publish,
    encode_header,
)
from slipstream.transports.zmq import IN_FLIGHT, ZmqTransport, place_of

LARGE = 3_000_000
SETTLE_S = 10.0


@pytest.fixture(params=KINDS)
def hall(request: pytest.FixtureRequest) -> Iterator[Hall]:
    with opened(request.param) as hall:
        yield hall


@pytest.fixture(params=["zmq-plain", "zmq-curve"])
def zmq_hall(request: pytest.FixtureRequest) -> Iterator[ZmqHall]:
    with opened(request.param) as hall:
        assert isinstance(hall, ZmqHall)
        yield hall


def contents(message: Message) -> list[bytes]:
    return [bytes(memoryview(frame)) for frame in message.frames]


def numbers(messages: list[Message]) -> list[int]:
    return [m.body.number for m in messages if isinstance(m.body, Echo)]


# ---- what arrives


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"", b"x", b""],
        [bytes([i]) * i for i in range(100)],
        [np.arange(LARGE, dtype=np.uint8).tobytes(), b"tail"],
    ],
    ids=["no frames", "an empty frame", "empty between", "many", "large"],
)
def test_messages_arrive_whole(hall: Hall, frames: list[bytes]) -> None:
    a, _ = hall.join("a", "b")
    body = Publish(7, 2, 1 << 40, [1, 0], 99, [3])
    a.send("b", body, frames)
    (message,) = hall.until_arrived("b", 1)
    assert (message.sender, message.body) == ("a", body)
    assert contents(message) == frames


def test_any_buffer_travels_as_its_bytes(hall: Hall) -> None:
    a, _ = hall.join("a", "b")
    array = np.arange(6, dtype=np.float32)
    a.send("b", Leave(), [array.view(np.uint8), memoryview(b"view"), bytearray(b"array")])
    (message,) = hall.until_arrived("b", 1)
    assert contents(message) == [array.tobytes(), b"view", b"array"]


def test_everybody_can_talk_to_everybody(hall: Hall) -> None:
    members = hall.join("a", "b", "c")
    for sender, receiver in itertools.permutations(members, 2):
        sender.send(receiver.name, Leave(f"to {receiver.name}"))
    hall.until(lambda: all(len(hall.arrived[name]) == 2 for name in "abc"))
    for name in "abc":
        assert {m.sender for m in hall.arrived[name]} == set("abc") - {name}
        assert {m.body for m in hall.arrived[name]} == {Leave(f"to {name}")}


def test_both_ends_count_the_same_bytes(hall: Hall) -> None:
    a, b = hall.join("a", "b")
    for size in (0, 10, 100_000):
        a.send("b", Echo(size), [bytes(size)])
    hall.until_arrived("b", 3)
    headers = sum(len(encode_header("a", Echo(size))) for size in (0, 10, 100_000))
    assert (dict(a.sent), dict(b.received)) == ({"b": headers + 100_010}, {"a": headers + 100_010})
    assert not b.refused


def test_a_sender_learns_what_arrived_and_how_long_it_was_under_way(zmq_hall: ZmqHall) -> None:
    a, _ = zmq_hall.join("a", "b")
    assert a.delivered("b") == (0, 0.0)
    for chunk in range(4):
        a.send("b", Echo(chunk), [bytes(LARGE)])
    zmq_hall.until_arrived("b", 4)
    zmq_hall.until(lambda: a.delivered("b")[0] >= 4 * LARGE)
    assert a.delivered("b")[0] < 4 * LARGE * 1.01

    def busy() -> bool:  # the kernel counts whole ticks, of some milliseconds
        a.send("b", Echo(4), [bytes(LARGE)])
        return a.delivered("b")[1] > 0

    zmq_hall.until(busy)
    assert a.delivered("b")[1] < 100
    zmq_hall.members.pop("b").close(0.0)
    zmq_hall.until(lambda: a.delivered("b") == (0, 0.0))


def test_a_peer_that_listens_elsewhere_now_is_found_there(zmq_hall: ZmqHall) -> None:
    """Also by what was sent to the old place a moment before."""
    a, b = zmq_hall.join("a", "b")
    a.send("b", Echo(0))
    zmq_hall.until_arrived("b", 1)
    b.close(0.0)
    elsewhere = zmq_hall.members["b"] = zmq_hall.make("b")
    a.send("b", Echo(1))
    a.send("b", Echo(2), priority=CONTROL)
    a.connect("b", elsewhere.address)
    a.send("b", Echo(3))
    assert numbers(zmq_hall.until_arrived("b", 2)) == [0, 3]
    zmq_hall.until(lambda: a.delivered("b")[0] > 0)


# ---- in what order


@pytest.mark.parametrize("size", [0, 200_000])
def test_equals_keep_their_order(hall: Hall, size: int) -> None:
    a, _ = hall.join("a", "b")
    for chunk in range(40):
        a.send("b", Echo(chunk), [bytes(size)], priority=5)
    assert numbers(hall.until_arrived("b", 40)) == list(range(40))


def test_of_what_waits_the_most_urgent_goes_first(hall: Hall) -> None:
    a, _ = hall.join("a", "b")
    urgencies = [7, 3, 9, 3, -1, 7, 0]
    for chunk, priority in enumerate(urgencies):
        a.send("b", Echo(chunk), priority=priority)
    expected = sorted(range(len(urgencies)), key=lambda i: (urgencies[i], i))
    assert numbers(hall.until_arrived("b", len(urgencies))) == expected


def test_an_urgent_message_overtakes_a_queue_that_is_already_moving(hall: Hall) -> None:
    a, _ = hall.join("a", "b")
    for chunk in range(12):
        a.send("b", Echo(chunk), [bytes(LARGE)], priority=5)
    if isinstance(hall, MemoryHall):
        hall.network.deliver()
    else:
        for _ in range(5):  # b does not even answer yet: nothing but a queue fills
            hall.turn("a")
    a.send("b", Echo(99), priority=1)
    order = numbers(hall.until_arrived("b", 13))
    assert order.index(99) <= IN_FLIGHT
    assert [chunk for chunk in order if chunk != 99] == list(range(12))


def test_control_message_leaves_while_data_waits_for_a_peer_that_does_not_read(
    zmq_hall: ZmqHall,
) -> None:
    a, _ = zmq_hall.join("a", "b")
    a.send("b", Echo(0))
    a.send("b", Beat({}), priority=CONTROL)
    zmq_hall.until_arrived("b", 2)
    data = [a.send("b", Echo(chunk), [bytes(100_000)]) for chunk in range(1, 400)]
    left, still = 0, 0
    while still < 20:  # until what ZeroMQ and the kernel take is full
        zmq_hall.turn("a")
        before, left = left, sum(ticket.done for ticket in data)
        still = still + 1 if left == before else 0
    # Large, so that it is done only when the kernel has taken it.
    control = a.send("b", Leave("reason"), [bytes(100_000)], priority=CONTROL)
    for _ in range(1000):
        if control.done:
            break
        zmq_hall.turn("a")
    assert control.done, "it waits behind data"
    zmq_hall.until(lambda: Leave("reason") in [m.body for m in zmq_hall.arrived["b"]])
    assert len(zmq_hall.arrived["b"]) < len(data)


def test_link_is_alive_from_the_first_control_message_until_the_peer_is_gone(
    zmq_hall: ZmqHall,
) -> None:
    a, _ = zmq_hall.join("a", "b")
    a.send("b", Echo(0))
    zmq_hall.until_arrived("b", 1)
    assert not a.link_alive("b")
    a.send("b", Beat({}), priority=CONTROL)
    zmq_hall.until(lambda: a.link_alive("b"))
    zmq_hall.members.pop("b").close(0.0)
    zmq_hall.until(lambda: not a.link_alive("b"))


# ---- when memory may be used again


def test_a_ticket_is_done_when_the_message_may_be_changed_and_not_before(hall: Hall) -> None:
    a, _ = hall.join("a", "b")
    memory = np.full(LARGE, 1, np.uint8)
    ticket = a.send("b", Echo(0), [memory])
    assert not ticket.done
    if isinstance(hall, ZmqHall):
        for _ in range(20):  # b has not let anybody in: no byte has left
            hall.turn("a")
        assert not ticket.done
    hall.until(lambda: ticket.done)
    memory[:] = 2
    (message,) = hall.until_arrived("b", 1)
    assert contents(message) == [b"\1" * LARGE]
    assert ticket.done


def test_in_memory_delivery_and_ticket_are_one() -> None:
    with opened("memory") as hall:
        assert isinstance(hall, MemoryHall)
        a, b = hall.join("a", "b")
        first, second = (a.send("b", Echo(i), [bytearray(b"before")]) for i in range(2))
        assert (first.done, second.done) == (False, False)
        assert hall.network.deliver() == "b"
        assert (first.done, second.done) == (True, False)
        assert hall.network.deliver() == "b"
        assert hall.network.deliver() is None
        assert (first.done, second.done) == (True, True)
        assert [b.receive(0), b.receive(0), b.receive(0)][-1] is None


def test_in_memory_frames_are_read_when_they_are_delivered() -> None:
    with opened("memory") as hall:
        a, _ = hall.join("a", "b")
        memory = bytearray(b"before")
        a.send("b", Echo(0), [memory])
        memory[:] = b"after!"
        assert contents(hall.until_arrived("b", 1)[0]) == [b"after!"]


def test_in_memory_a_seed_decides_the_order_between_links() -> None:
    def order(seed: int) -> list[str]:
        hall = MemoryHall()
        hall.network.__init__(seed)  # type: ignore[misc]
        hall.join("a", "b", "c", "d")
        for name in "bcd":
            for chunk in range(5):
                hall.members[name].send("a", Echo(chunk))
        return [message.sender for message in hall.until_arrived("a", 15)]

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


# ---- what does not fit

GARBAGE = [
    b"",
    b"\xc1",
    b"GET / HTTP/1.1\r\n\r\n",
    encode_header("a", Echo(1))[:-1],
    encode_header("a", Echo(1)) + b"\0",
    bytes(HEADER_BYTES + 1),
]


def test_what_cannot_be_read_is_counted_and_forgotten(hall: Hall) -> None:
    a, b = hall.join("a", "b")
    for header in GARBAGE:
        hall.inject("b", header, b"payload")
    hall.until(lambda: sum(b.refused.values()) == len(GARBAGE))
    a.send("b", Echo(5))
    assert numbers(hall.until_arrived("b", 1)) == [5]
    assert b.refused == {FrameRefused.__name__: len(GARBAGE)}
    assert dict(b.received) == {"a": len(encode_header("a", Echo(5)))}


def failed_handshake(link: zmq.Socket[bytes], hall: ZmqHall) -> bool:
    """Whether a connection was turned away; while it tries, the members go on."""
    failures = {
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_DISCONNECTED,
    }
    while True:
        hall.turn()
        while hall.events[link].poll(0):
            event = recv_monitor_message(hall.events[link])["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return False
            if event in failures:
                return True


STRANGERS = {
    "another secret": lambda encrypt: Credentials.for_run(
        b"some other secret", b"job", encrypt=encrypt
    ),
    "another job": lambda encrypt: Credentials.for_run(SECRET, b"yesterday's job", encrypt=encrypt),
    "the other mechanism": lambda encrypt: Credentials.for_run(SECRET, b"job", encrypt=not encrypt),
    "no credentials": lambda encrypt: None,
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_gets_nothing_in(zmq_hall: ZmqHall, who: str) -> None:
    a, b = zmq_hall.join("a", "b")
    stranger = zmq_hall.raw("b", STRANGERS[who](zmq_hall.credentials.encrypt))
    stranger.send(encode_header("a", Echo(666)))
    assert failed_handshake(stranger, zmq_hall)
    a.send("b", Echo(1))
    assert numbers(zmq_hall.until_arrived("b", 1)) == [1]
    assert not b.refused


def test_a_member_is_known_by_the_same_test(zmq_hall: ZmqHall) -> None:
    zmq_hall.join("b")
    link = zmq_hall.raw("b", zmq_hall.credentials)
    link.send(encode_header("a", Echo(3)))
    assert not failed_handshake(link, zmq_hall)
    assert numbers(zmq_hall.until_arrived("b", 1)) == [3]


def test_garbage_connections_disturb_nobody(zmq_hall: ZmqHall) -> None:
    a, b = zmq_hall.join("a", "b")
    host, port = b.address.removeprefix("tcp://").split(":")
    noise = np.random.default_rng(1)
    for length in (0, 1, 10, 64, 5000):
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(noise.bytes(length))
    a.send("b", Echo(1))
    assert numbers(zmq_hall.until_arrived("b", 1)) == [1]


def test_a_connection_that_stays_silent_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_module, "HANDSHAKE_S", 0.05)
    with opened("zmq-plain") as hall:
        (b,) = hall.join("b")
        host, port = b.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as silent:
            while silent.recv(100):  # its greeting, then the end
                pass


def test_a_frame_above_the_limit_is_not_taken_in(zmq_hall: ZmqHall) -> None:
    a, c = zmq_hall.join("a", "c")
    b = ZmqTransport(
        "b", host="127.0.0.1", credentials=zmq_hall.credentials, largest_frame_bytes=HEADER_BYTES
    )
    zmq_hall.members["b"] = b
    for member in (a, c):
        member.connect("b", b.address)
    c.send("b", Echo(0), [bytes(HEADER_BYTES - 1000)])  # encryption needs some room
    zmq_hall.until_arrived("b", 1)
    a.send("b", Echo(1), [bytes(HEADER_BYTES + 1000)])
    c.send("b", Echo(3))

    def came_through() -> bool:
        a.send("b", Echo(2))  # what is in the kernel when the link is cut goes with it
        return {2, 3} <= set(numbers(zmq_hall.arrived["b"]))

    zmq_hall.until(came_through)
    assert set(numbers(zmq_hall.arrived["b"])) == {0, 2, 3}


# ---- threads, and the end


def test_any_thread_may_send(zmq_hall: ZmqHall) -> None:
    a, _ = zmq_hall.join("a", "b")

    def speak(thread: int) -> None:
        for chunk in range(20):
            a.send("b", Echo(1000 * thread + chunk))

    threads = [threading.Thread(target=speak, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    order = numbers(zmq_hall.until_arrived("b", 80))
    for thread in threads:
        thread.join()
    for thread_number in range(4):
        own = [chunk % 1000 for chunk in order if chunk // 1000 == thread_number]
        assert own == list(range(20))


def test_a_receive_under_way_can_be_woken(zmq_hall: ZmqHall) -> None:
    (a,) = zmq_hall.join("a")
    woken = threading.Thread(target=lambda: a.receive(timeout_s=10_000), daemon=True)
    woken.start()
    a.wake()
    woken.join(timeout=100)
    assert not woken.is_alive()


def test_what_is_queued_still_leaves_when_a_member_closes(zmq_hall: ZmqHall) -> None:
    a, _ = zmq_hall.join("a", "b")
    a.send("b", Echo(0))
    zmq_hall.until_arrived("b", 1)
    for chunk in range(1, 9):
        a.send("b", Echo(chunk), [bytes(100_000)])
    zmq_hall.members.pop("a").close(linger_s=60)
    assert numbers(zmq_hall.until_arrived("b", 9)) == list(range(9))


def test_what_could_not_leave_yet_does_so_within_the_time_given_to_close(zmq_hall: ZmqHall) -> None:
    a, _ = zmq_hall.join("a", "b")
    count = IN_FLIGHT + 3  # more than ZeroMQ takes while b has not let anybody in
    for chunk in range(count):
        a.send("b", Echo(chunk), [bytes(LARGE)])
    closing = threading.Thread(target=zmq_hall.members.pop("a").close, args=(1e6,), daemon=True)
    closing.start()
    assert numbers(zmq_hall.until_arrived("b", count)) == list(range(count))
    closing.join(60.0)
    assert not closing.is_alive(), "it still waits, though everything has left"


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(most: tuple[int, int]) -> bool:
    """Whether there are no more than these, soon: the kernel lists a thread for a moment after it
    was joined. So ``most`` itself may count such a thread."""
    deadline = time.monotonic() + SETTLE_S
    while any(now > before for now, before in zip(resources(), most, strict=True)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("encrypt", [False, True])
def test_closing_frees_sockets_and_threads(encrypt: bool) -> None:
    credentials = Credentials.for_run(SECRET, b"job", encrypt=encrypt)
    first = None
    for _ in range(4):
        a, b = (ZmqTransport(n, host="127.0.0.1", credentials=credentials) for n in "ab")
        a.connect("b", b.address)
        a.connect("nobody", "tcp://127.0.0.1:1")
        a.send("b", Echo(1), [bytes(LARGE)])
        a.send("nobody", Echo(2), [bytes(LARGE)])
        a.send("b", Beat({}), priority=-1_000_000)
        message = None
        while message is None:
            a.receive(0.01)
            message = b.receive(0.01)
        del message
        a.close(0.0)
        b.close(0.0)
        # The first zero-copy message starts a thread of pyzmq's that stays.
        first = first or resources()
        assert settled(first), f"{resources()} after {first}"


@needs_proc
def test_an_address_that_is_not_ours_is_refused_and_nothing_is_left() -> None:
    before = resources()
    with pytest.raises(LaunchError, match=r"rank 3 cannot listen on 192\.0\.2\.1: .*INTERFACE"):
        ZmqTransport(
            "rank 3",
            host="192.0.2.1",
            credentials=Credentials.for_run(SECRET, b"job", encrypt=False),
        )
    assert settled(before), f"{resources()} after {before}"


def test_a_closed_endpoint_in_memory_sends_no_more() -> None:
    with opened("memory") as hall:
        a, _ = hall.join("a", "b")
        a.close(0.0)
        with pytest.raises(KeyError):
            a.send("b", Echo(0))


def accepted_by(member: ZmqTransport) -> set[tuple[str, int]]:
    """Where connections come from that this process has accepted."""
    _, port = place_of(member.address)
    links = psutil.Process().net_connections("tcp")
    return {tuple(link.raddr) for link in links if link.laddr.port == port and link.raddr}


@needs_proc
@pytest.mark.parametrize("encrypt", [False, True])
def test_idle_connections_are_ended_when_descriptors_run_short(
    encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of members, who lose nothing; and a member may still come."""
    credentials = Credentials.for_run(SECRET, b"job", encrypt=encrypt)
    a, b, late = (ZmqTransport(n, host="127.0.0.1", credentials=credentials) for n in "abc")
    monkeypatch.setattr(descriptors, "IDLE_MS", 20)

    def next_from(sender: ZmqTransport) -> AnyBody:
        for _ in range(10_000):
            sender.receive(0.001)
            if (message := b.receive(0.001)) is not None:
                return message.body
        pytest.fail("nothing came")

    for peer in (a, late):
        peer.connect("b", b.address)
    a.send("b", Echo(0))
    assert next_from(a) == Echo(0)
    idle = [socket.create_connection(place_of(b.address), 10) for _ in range(100)]
    try:
        there = {connection.getsockname() for connection in idle}
        deadline = time.monotonic() + 60
        while not accepted_by(b) >= there and time.monotonic() < deadline:
            b.receive(0.001)
        assert b.guard.tick() == 0, "there are enough left"
        few = 2 * len(os.listdir("/proc/self/fd")) - 100
        monkeypatch.setattr(descriptors, "descriptor_limit", lambda: few)
        for number in range(200):
            a.send("b", Echo(number))
            if number == 100:
                time.sleep(0.05)
                assert b.guard.tick() == 100
        assert [next_from(a) for _ in range(200)] == [Echo(number) for number in range(200)]
        for connection in idle:
            connection.settimeout(10)
            while connection.recv(100):  # ZeroMQ's greeting, and then the end
                pass
        late.send("b", Echo(7))
        assert next_from(late) == Echo(7)
    finally:
        for connection in idle:
            connection.close()
        for each in (a, b, late):
            each.close(0.0)
