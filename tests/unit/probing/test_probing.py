"""Prober and listener: over loopback, and the listener's mind by itself."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.probing import listener as probe_listener
from slipstream.apps.probing.listener import MOST_SESSIONS, SESSION_S, Listener, Reception
from slipstream.apps.probing.packets import (
    HEAD_NBYTES,
    HEADER,
    LARGEST_NBYTES,
    LOOPBACK,
    MOST_PACKETS,
    PAGE_PACKETS,
    Kind,
    Packet,
    genuine,
    greeting_key,
    parse,
    session_key,
)
from slipstream.apps.probing.probing import _Path, measure, trend_of
from slipstream.apps.probing.udp_streams import (
    FEWEST_PACKETS,
    LONGEST_STREAM_S,
    SHORTEST_STREAM_S,
    STREAM_NBYTES,
    Flight,
    Shape,
    Streams,
)
from slipstream.errors import ConfigError, LaunchError, SecretError, WaitLimit
from slipstream.planning.bandwidth import Knee, Trend

SECRET = b"correct horse battery staple"
GREETING = greeting_key(SECRET)
NONCE = bytes(range(16))


def hello(nonce: bytes = NONCE, key: bytes = GREETING) -> bytes:
    return Packet(Kind.HELLO, nonce).sealed(key, padded_to=HEAD_NBYTES + 16)


def greeted(reception: Reception, nonce: bytes = NONCE, now_s: float = 0.0) -> bytes:
    """A new session's key."""
    welcome = reception.take(hello(nonce), 1, now_s)
    assert welcome is not None
    assert parse(welcome) == Packet(Kind.WELCOME, nonce)
    assert genuine(welcome, GREETING, 16)
    return session_key(GREETING, nonce, welcome[HEAD_NBYTES:])


def a_probe(key: bytes, stream: int, index: int, count: int) -> bytes:
    return Packet(Kind.PROBE, NONCE, stream, index, count).sealed(key, padded_to=200)


def a_question(
    key: bytes, stream: int, page: int, count: int, nbytes: int = LARGEST_NBYTES
) -> bytes:
    return Packet(Kind.ASK, NONCE, stream, page, count).sealed(key, padded_to=nbytes)


def reported(answer: bytes | None, key: bytes) -> list[int]:
    assert answer is not None
    assert genuine(answer, key, 8 * PAGE_PACKETS)
    return list(struct.unpack(f">{PAGE_PACKETS}Q", answer[HEAD_NBYTES:]))


# ---- the listener's mind


def test_arrivals_come_back_by_packet_and_page() -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    count = PAGE_PACKETS + 5
    for index in (3, 0, PAGE_PACKETS + 4, 3):  # out of order, and one twice
        assert (
            reception.take(
                a_probe(key, 1, index, count), 1000 + index + reception.counts.packets, 0
            )
            is None
        )
    first = reported(reception.take(a_question(key, 1, 0, count), 1, 0), key)
    assert first[:5] == [1001, 0, 0, 1003, 0]
    second = reported(reception.take(a_question(key, 1, 1, count), 1, 0), key)
    assert second[4:6] == [1000 + PAGE_PACKETS + 4 + 2, 0]
    assert (reception.counts.streams, reception.counts.malformed) == (1, 0)


def test_a_hello_that_comes_twice_makes_one_session() -> None:
    reception = Reception(SECRET)
    assert greeted(reception) == greeted(reception)
    assert reception.counts.sessions == 1


def test_a_stream_of_which_nothing_came_is_reported_as_that() -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    reception.take(a_probe(key, 1, 0, 100), 77, 0)
    assert reported(reception.take(a_question(key, 2, 0, 100), 1, 0), key) == [0] * PAGE_PACKETS


def test_a_straggler_of_an_earlier_stream_changes_nothing() -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    reception.take(a_probe(key, 2, 0, 100), 77, 0)
    reception.take(a_probe(key, 1, 1, 100), 78, 0)
    assert reception.counts.malformed == 1
    assert reported(reception.take(a_question(key, 2, 0, 100), 1, 0), key)[:2] == [77, 0]
    assert reception.take(a_question(key, 1, 0, 100), 1, 0) is None


STRANGERS = [
    hello(key=greeting_key(b"another secret entirely")),
    hello(key=greeting_key(None)),
    a_probe(GREETING, 1, 0, 100),
    a_question(GREETING, 1, 0, 100),
    Packet(Kind.PROBE, b"?" * 16, 1, 0, 100).sealed(GREETING),
]


@pytest.mark.parametrize("datagram", STRANGERS)
def test_strangers_get_no_answer_and_are_counted(datagram: bytes) -> None:
    reception = Reception(SECRET)
    greeted(reception)
    before = replace(reception.counts)
    assert reception.take(datagram, 1, 0) is None
    assert reception.counts.untracked == 1
    assert reception.counts.sent_nbytes == before.sent_nbytes
    assert (reception.counts.packets, reception.counts.sessions) == (0, 1)


def test_a_header_changed_on_the_way_is_a_strangers() -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    datagram = bytearray(a_probe(key, 1, 0, 100))
    datagram[HEADER.size - 5] ^= 1  # the packet's index
    assert parse(bytes(datagram)) is not None
    assert reception.take(bytes(datagram), 1, 0) is None
    assert (reception.counts.untracked, reception.counts.streams) == (1, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda key: b"",
        lambda key: b"slps",
        lambda key: bytes(LARGEST_NBYTES),
        lambda key: b"slps\x02" + a_probe(key, 1, 0, 100)[5:],
        lambda key: b"slps\x01\x09" + a_probe(key, 1, 0, 100)[6:],
        lambda key: a_probe(key, 1, 0, 100)[: HEAD_NBYTES - 1],
        lambda key: a_probe(key, 1, 0, 100).ljust(LARGEST_NBYTES + 1, b"\0"),
        lambda key: a_probe(key, 1, 100, 100),
        lambda key: a_probe(key, 1, 0, 0),
        lambda key: a_probe(key, 0, 0, 1),
        lambda key: a_probe(key, 1, 0, MOST_PACKETS + 1),
        lambda key: a_probe(key, 1, 0, 2**32 - 1),
        lambda key: a_question(key, 1, 1, PAGE_PACKETS),
        lambda key: a_question(key, 1, 0, MOST_PACKETS + 1),
        lambda key: a_question(key, 1, 0, 100, LARGEST_NBYTES - 1),
        lambda key: a_question(key, 0, 0, 100),
        lambda key: Packet(Kind.HELLO, b"?" * 16).sealed(GREETING),
        lambda key: Packet(Kind.REPORT, NONCE, 1, 0, 100).sealed(key),
        lambda key: Packet(Kind.WELCOME, NONCE).sealed(key),
    ],
)
def test_what_makes_no_sense_gets_no_answer_and_is_counted(make) -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    assert reception.take(make(key), 1, 0) is None
    assert (reception.counts.malformed, reception.counts.untracked) == (1, 0)
    assert reception.counts.streams == 0
    reception.take(a_probe(key, 1, 0, 100), 5, 0)
    assert reported(reception.take(a_question(key, 1, 0, 100), 1, 0), key)[0] == 5


@given(
    packets=st.lists(
        st.tuples(
            st.sampled_from(list(Kind)),
            st.integers(0, 3),
            st.integers(0, 2 * PAGE_PACKETS) | st.integers(0, 2**32 - 1),
            st.sampled_from([0, 100, 300, MOST_PACKETS, MOST_PACKETS + 1, 2**32 - 1]),
            st.integers(0, LARGEST_NBYTES + 50),
            st.booleans(),
        ),
        max_size=30,
    ),
    noise=st.binary(max_size=100),
)
def test_whatever_comes_no_answer_is_larger_than_its_question(packets, noise: bytes) -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    for kind, stream, index, count, nbytes, member in packets:
        packet = Packet(kind, NONCE, stream, index, count)
        datagram = packet.sealed(key if member else GREETING, padded_to=nbytes)
        for question in (datagram, datagram[:nbytes], noise):
            answer = reception.take(question, 9, 0)
            assert len(answer or b"") <= len(question)
    assert reception.counts.sent_nbytes <= reception.counts.received_nbytes


def test_sessions_are_limited_and_forgotten_when_they_are_silent() -> None:
    reception = Reception(SECRET)
    key = greeted(reception)
    for number in range(MOST_SESSIONS - 1):
        greeted(reception, number.to_bytes(16, "big"))
    assert reception.take(hello(b"?" * 16), 1, SESSION_S) is None
    assert reception.counts.turned_away == 1
    reception.take(a_probe(key, 1, 0, 100), 5, SESSION_S)  # this one is not silent
    greeted(reception, b"?" * 16, now_s=SESSION_S + 1)
    assert reception.counts.sessions == MOST_SESSIONS + 1
    assert reception.take(a_question(key, 1, 0, 100), 1, SESSION_S + 1) is not None


# ---- over loopback


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(port=0, secret=SECRET) as running:
        yield running


def test_a_stream_arrives_and_its_times_come_back(listener: Listener) -> None:
    shape = Shape(packets=400, frame_nbytes=1000, gap_ns=50_000)
    with Streams(LOOPBACK, listener.port, SECRET) as streams:
        flight = streams.send(shape, fill=10)
        again = streams.send(Shape(100, 200, 0.0))
    assert None not in flight.arrived_s + again.arrived_s
    assert flight.arrived_s == sorted(flight.arrived_s)  # loopback keeps the order
    # Never early; how late depends on the machine.
    assert all(at >= index * 50e-6 - 1e-9 for index, at in enumerate(flight.sent_s))
    assert flight.arrived_s[-1] > 0.01  # the receiver's clock saw 20 ms pass, too
    counts = listener.counts
    assert (counts.sessions, counts.streams) == (1, 2)
    assert (counts.untracked, counts.malformed) == (0, 0)
    assert counts.packets == 400 + 10 + 100 + (3 + 1)  # and a question for each page
    assert streams.sent_nbytes == counts.received_nbytes + 42 * (counts.packets + 1)


@pytest.mark.parametrize("kernel", [True, False])
def test_stamps_of_the_kernel_or_of_our_own(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    if not kernel:
        monkeypatch.setattr(probe_listener, "_SO_TIMESTAMPNS", None)
    with Listener(port=0) as listener, Streams(LOOPBACK, listener.port) as streams:
        assert listener._stamped is kernel
        flight = streams.send(Shape(100, 200, 0.0))
    assert None not in flight.arrived_s


def test_strangers_and_noise_do_not_disturb_a_stream(listener: Listener) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
        Streams(LOOPBACK, listener.port, SECRET) as streams,
    ):
        stranger.settimeout(0)
        for datagram in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), *STRANGERS):
            stranger.sendto(datagram, (LOOPBACK, listener.port))
        flight = streams.send(Shape(100, 200, 0.0))
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
    assert None not in flight.arrived_s
    assert listener.counts.untracked == len(STRANGERS)
    assert listener.counts.malformed == 3


def test_a_listener_that_keeps_silent_is_named(listener: Listener) -> None:
    with pytest.raises(WaitLimit, match=f"missing: {LOOPBACK}:{listener.port}"):
        measure(LOOPBACK, listener.port, b"another secret entirely", answer_limit_s=0.3)
    deadline_s = time.monotonic() + 60
    while not listener.counts.untracked:  # its thread may be late
        assert time.monotonic() < deadline_s, "it has received nothing"
        time.sleep(0.01)
    assert listener.counts.sent_nbytes == 0


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((LOOPBACK, 0))
        port = taken.getsockname()[1]
    with pytest.raises(WaitLimit, match=rf"probe --listen.*{LOOPBACK}:{port}"):
        measure(LOOPBACK, port, answer_limit_s=0.3)


def test_a_listener_that_goes_away_is_named() -> None:
    with contextlib.ExitStack() as here:
        with Listener(port=0) as listener:
            streams = here.enter_context(Streams(LOOPBACK, listener.port, answer_limit_s=60.0))
            streams.send(Shape(100, 200, 0.0))
        streams._limit_s = 0.3
        with pytest.raises(WaitLimit, match="arrival times of stream 2; missing: 127") as raised:
            streams.send(Shape(100, 200, 0.0))
        assert raised.value.limit_s == 0.3


@contextlib.contextmanager
def forgetful_relay(to_port: int) -> Iterator[int]:
    """Passes datagrams on, but loses every second answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as relay:
        relay.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        relay.bind((LOOPBACK, 0))
        over = threading.Event()

        def pass_on() -> None:
            asker, answers = None, 0
            while True:
                datagram, sender = relay.recvfrom(2000)
                if over.is_set():
                    return
                if sender[1] != to_port:
                    asker = sender
                    relay.sendto(datagram, (LOOPBACK, to_port))
                else:
                    answers += 1
                    if answers % 2 == 0:
                        relay.sendto(datagram, asker)

        thread = threading.Thread(target=pass_on)
        thread.start()
        try:
            yield relay.getsockname()[1]
        finally:
            over.set()
            relay.sendto(b"", relay.getsockname())
            thread.join()


def test_answers_that_are_lost_are_asked_for_again(listener: Listener) -> None:
    with forgetful_relay(listener.port) as port, Streams(LOOPBACK, port, SECRET) as streams:
        flight = streams.send(Shape(3 * PAGE_PACKETS, 200, 0.0))
    assert len(flight.arrived_s) == 3 * PAGE_PACKETS
    assert None not in flight.arrived_s


# ---- what counts of a stream


def held_up(lag_s: list[float], queue_s: list[float]) -> Flight:
    """A stream of one packet a millisecond that left late, and found such queues."""
    sent = [0.001 * index + lag for index, lag in enumerate(lag_s)]
    arrived = [500.0 + at + queue for at, queue in zip(sent, queue_s, strict=True)]
    return Flight(Shape(len(sent), 1000, 1e6), sent, list(arrived))


def test_packets_that_left_late_do_not_vote() -> None:
    growing = [1e-4 * index for index in range(200)]
    assert trend_of(held_up([0.0] * 200, growing)) is Trend.INCREASING
    # Held up for 40 ms, five times: what then leaves at once finds an empty queue.
    lag = [max(0.0, 0.040 - 0.001 * (index % 40)) * (index % 40 < 15) for index in range(200)]
    queues = [0.0 if late > 0.001 else queue for late, queue in zip(lag, growing, strict=True)]
    assert trend_of(held_up([0.0] * 200, queues)) is not Trend.INCREASING
    assert trend_of(held_up(lag, queues)) is Trend.INCREASING


def test_a_train_knows_how_fast_it_left_and_whether_it_was_held_up() -> None:
    even = Flight(Shape(100, 1000, 0.0), [1e-5 * index for index in range(100)], [None] * 100)
    assert even.unbroken
    assert even.sent_bytes_s == pytest.approx(1e8)
    broken = replace(even, sent_s=[at + 0.004 * (at > 5e-4) for at in even.sent_s])
    assert not broken.unbroken
    assert broken.sent_bytes_s == pytest.approx(99_000 / 0.00499)


def test_a_stream_that_was_mostly_late_does_not_vote() -> None:
    lag = ([0.0] * 24 + [0.002] * 76) * 2
    assert trend_of(held_up(lag, [1e-4 * index for index in range(200)])) is None


def test_a_stream_that_never_caught_up_does_not_vote() -> None:
    growing = [1e-4 * index for index in range(200)]
    assert trend_of(held_up([0.0] * 140 + [0.002] * 60, growing)) is None
    assert trend_of(held_up([0.0] * 70 + [0.002] * 40 + [0.0] * 90, growing)) is Trend.INCREASING


def test_what_went_before_a_stream_does_not_count() -> None:
    drains = [0.010 - 2e-4 * index for index in range(60)]
    level = [0.001] * 140
    growing = [1e-4 * index for index in range(140)]
    assert trend_of(held_up([0.0] * 200, drains + level)) is Trend.LEVEL
    assert (
        trend_of(held_up([0.0] * 200, [0.020 + at for at in drains] + growing)) is Trend.INCREASING
    )
    assert trend_of(held_up([0.0] * 200, [0.0] * 60 + growing)) is Trend.INCREASING


@pytest.mark.parametrize("rate_bytes_s", [1e6, 3e7, 9e7])
def test_what_goes_before_a_stream_empties_the_bucket_while_that_fills(rate_bytes_s: float) -> None:
    path = _Path(fastest_bytes_s=1e8, seen=Knee(rate_bytes_s, 100_000, 300_000))
    fill_nbytes = path.fill(1000) * 1000
    at_full_speed_s = fill_nbytes / (1e8 / 0.8)
    assert path.emptied(fill_nbytes, at_full_speed_s)
    assert not path.emptied(fill_nbytes, at_full_speed_s + fill_nbytes / rate_bytes_s)
    assert _Path(1e8, None).fill(1000) == 0
    assert _Path(1e8, None).emptied(0, 5.0)


# ---- a measurement


def test_a_measurement_keeps_to_what_it_may_send(listener: Listener) -> None:
    # Any fleet takes a megabyte at the least, and this resolution eight fleets, whatever they find.
    rates = {"least_bytes_s": 3e6, "most_bytes_s": 4e6, "resolution": 0.001}
    limits = {"at_most_nbytes": 10_000_000, "limit_s": 600.0, "answer_limit_s": 60.0}
    found = measure(LOOPBACK, listener.port, SECRET, **rates, **limits)
    assert found.sent_nbytes <= 10_000_000
    assert listener.counts.received_nbytes <= found.sent_nbytes
    assert listener.counts.sent_nbytes <= listener.counts.received_nbytes
    assert 0 <= found.low_bytes_s <= found.high_bytes_s <= 4e6
    assert found.ended == "traffic"
    assert found.fastest_bytes_s > 0


def test_a_measurement_keeps_to_its_time(listener: Listener) -> None:
    found = measure(LOOPBACK, listener.port, SECRET, most_bytes_s=1e6, limit_s=4.0)
    assert found.ended == "time"
    assert found.seconds < 4.0 + 60.0  # and the answer that was waited for last
    with pytest.raises(WaitLimit, match=r"path's rate.*127\.0\.0\.1"):
        measure(LOOPBACK, listener.port, SECRET, limit_s=0.0)


@pytest.mark.parametrize("bytes_s", [12_500, 125_000, 1.25e6, 5e6, 2e7, 125e6])
def test_streams_have_the_rate_and_packets_within_limits(bytes_s: float) -> None:
    shape = Streams(LOOPBACK).shape(bytes_s)
    assert shape.frame_nbytes * 1e9 / shape.gap_ns == pytest.approx(bytes_s)
    assert FEWEST_PACKETS <= shape.packets <= MOST_PACKETS
    assert HEAD_NBYTES + 42 <= shape.frame_nbytes <= LARGEST_NBYTES + 42
    assert shape.seconds > SHORTEST_STREAM_S * 0.99
    assert shape.seconds < LONGEST_STREAM_S * 1.01 or shape.packets == FEWEST_PACKETS
    assert shape.nbytes < 1.01 * STREAM_NBYTES or shape.seconds < SHORTEST_STREAM_S * 1.01


@pytest.mark.parametrize(
    ("error", "says", "attempt"),
    [
        (SecretError, "listening on 0.0.0.0 lets", lambda: Listener("0.0.0.0", 0)),
        (SecretError, "192.0.2.1 is another host", lambda: measure("192.0.2.1")),
        (LaunchError, "no host", lambda: measure("no such host")),
        (LaunchError, "port 70000", lambda: measure(LOOPBACK, 70000)),
        (
            LaunchError,
            "cannot listen on 192.0.2.1",
            lambda: Listener("192.0.2.1", 0, SECRET).__enter__(),
        ),
        (ConfigError, "at most 1.0 MiB", lambda: measure(LOOPBACK, at_most_nbytes=2**20)),
        (ConfigError, "fleet=0", lambda: measure(LOOPBACK, fleet=0)),
        (ConfigError, "the lower first", lambda: measure(LOOPBACK, most_bytes_s=1000)),
    ],
)
def test_what_cannot_work_is_refused(error: type[Exception], says: str, attempt) -> None:
    with pytest.raises(error, match=says):
        attempt()


def test_a_port_that_is_taken(listener: Listener) -> None:
    with pytest.raises(LaunchError, match=f"UDP port {listener.port}"):
        Listener(port=listener.port).__enter__()
