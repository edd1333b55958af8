"""Messages over ZeroMQ: one listening socket per member, an outgoing connection to each peer.

All socket work happens inside ``receive``, on the thread that calls it; ``send`` only queues and
wakes that thread. ZeroMQ gets only a few messages of a link at a time, so that an urgent one queued
later can still overtake the rest.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

# It stops working at the process's end, by an exit handler that its import registers. Handlers run
# in reverse order: import it before that of a job without a ``with`` block, which sends.
import zmq.utils.garbage
from zmq.utils.monitor import recv_monitor_message

from slipstream.errors import FrameRefused, JobEnded, LaunchError, OutOfDescriptors
from slipstream.transports.credentials import Credentials
from slipstream.transports.descriptors import ERRORS, ConnectionGuard, out_of_descriptors
from slipstream.transports.protocol import CONTROL
from slipstream.transports.tcp_counters import acknowledged
from slipstream.transports.wire import (
    HEADER_BYTES,
    AnyBody,
    Message,
    decode_header,
    encode_header,
)
from slipstream.types import LARGEST_CHUNK_BYTES, Buffer

IN_FLIGHT = 2  # messages of a link that ZeroMQ holds
RECEIVE_QUEUE = 32  # messages of a link that may wait to be read
PING_S, PONG_LIMIT_S = 0.5, 3.0  # a link that does not answer a ping is down
REFUSALS = 3  # failed connections in a row, before the port is checked
ASKING_S = 0.2
MAKE_ROOM_S = 3.0  # time to wait for a descriptor; shorter than the silence limit
HANDSHAKE_S = 5.0  # a connection that does not authenticate sooner is closed
MOST_SOCKETS = 65535  # ZeroMQ's own limit is 1023; a peer takes six
LARGEST_FRAME_BYTES = LARGEST_CHUNK_BYTES
# A server's port receives a flow from each worker, and vice versa. With the kernel's own, much
# larger buffers these flows overrun the switch's queue, and one flow of a round waits for
# retransmissions. Flows share a link in proportion to their buffers: a worker's are larger than
# those of a colocated server, because a server can answer only when it has every worker's part;
# when answers delay parts, links become idle (6% of a step at 200 Mbit/s).
WORKER_SEND_BUFFER_BYTES = 192 * 1024
SERVER_SEND_BUFFER_BYTES = 64 * 1024
Lane = tuple[str, bool]  # a peer, and True for its control messages
LINK_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
LOOPBACK = "//127.0.0.1:"  # in an address
_ZAP = "inproc://zeromq.zap.01"


class SendTicket:
    """A ticket that is done when ZeroMQ has passed every byte of every frame to the kernel."""

    __slots__ = ("tracker",)

    def __init__(self) -> None:
        self.tracker: zmq.MessageTracker | None = None

    @property
    def done(self) -> bool:
        return self.tracker is not None and self.tracker.done


@dataclass(slots=True)
class Posted:
    """A message in flight; sorts by urgency, then by age."""

    priority: int
    order: int
    parts: list[Buffer]
    ticket: SendTicket

    def __lt__(self, other: Posted) -> bool:
        return (self.priority, self.order) < (other.priority, other.order)


class Outbound:
    """One lane to one peer: a socket and its queue, most urgent first."""

    def __init__(self, link: zmq.Socket[bytes]) -> None:
        self.link = link
        self.waiting: list[Posted] = []

    def flush(self) -> bool:
        """Pass as many messages to ZeroMQ as it takes; return True when the queue is empty."""
        while self.waiting:
            first = self.waiting[0]
            # Small frames are copied and done at once; each is tracked, not only the last.
            frames = [zmq.Frame(part, track=True) for part in first.parts]
            try:
                self.link.send_multipart(frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            first.ticket.tracker = zmq.MessageTracker(*(frame.tracker for frame in frames))
            heapq.heappop(self.waiting)
        return True


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of an address: ``tcp://[::1]:5555`` → ``("::1", 5555)``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def refuses(address: str) -> bool:
    """Return whether the host is reachable and refuses connections to the port."""
    try:
        socket.create_connection(place_of(address), ASKING_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class ZmqTransport:
    """A transport over ZeroMQ; implements ``Transport``.

    Args:
        name: This member's name.
        host: The address to listen on.
        credentials: The credentials of this run.
        process: The number of this process; see ``wire.Envelope``.
        largest_frame_bytes: A larger frame closes its connection.
        send_buffer_bytes: The kernel's send buffer of each data link.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str,
        credentials: Credentials,
        process: int = 0,
        largest_frame_bytes: int = LARGEST_FRAME_BYTES,
        send_buffer_bytes: int = WORKER_SEND_BUFFER_BYTES,
    ) -> None:
        self.name = name
        self.process = process
        self._send_buffer_bytes = send_buffer_bytes
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._credentials = credentials
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._posted: deque[tuple[str, Posted | str]] = deque()
        self._addresses: dict[str, str] = {}
        self._outbound: dict[Lane, Outbound] = {}
        self._monitors: dict[zmq.Socket[bytes], Lane] = {}
        self._connections: dict[str, int] = {}  # descriptors of data lanes, which ZeroMQ owns
        self._alive: set[str] = set()
        self._retried: Counter[str] = Counter()  # failed connections in a row
        self._blocked: set[Lane] = set()
        self._waking = False
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._inbound = self._listen(host, largest_frame_bytes)
        self.address: str = bytes(self._inbound.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._used: set[int] = set()  # descriptors of connections that brought a message
        self.guard = ConnectionGuard(place_of(self.address)[1], self._used, self._unconnected)
        self._poller = zmq.Poller()
        for readable in (self._zap, self._inbound, self._woken):
            self._poller.register(readable, zmq.POLLIN)

    def _listen(self, host: str, largest_frame_bytes: int) -> zmq.Socket[bytes]:
        inbound = self._context.socket(zmq.PULL)
        inbound.linger = 0
        inbound.rcvhwm = RECEIVE_QUEUE
        inbound.maxmsgsize = max(largest_frame_bytes, HEADER_BYTES)
        inbound.handshake_ivl = int(HANDSHAKE_S * 1000)
        inbound.backlog = 1024
        inbound.ipv6 = ":" in host
        self._credentials.guard(inbound)
        place = f"[{host}]" if ":" in host else host
        try:
            inbound.bind(f"tcp://{place}:*")
        except zmq.ZMQError as error:
            inbound.close()
            self._zap.close(0)
            self._woken.close()
            self._wake.close()
            self._context.term()
            raise LaunchError(
                f"{self.name} cannot listen on {host}: {error.strerror}; "
                "set SLIPSTREAM_INTERFACE to an interface or address of this host"
            ) from error
        return inbound

    def connect(self, peer: str, address: str) -> None:
        """Set a peer's address; messages sent later open the link."""
        self._posted.append((peer, address))
        self.wake()

    def _open(self, lane: Lane) -> Outbound:
        """Open a link; if no descriptor is free, connections of non-members are closed first."""
        deadline = time.monotonic() + MAKE_ROOM_S
        while True:
            try:
                return self._try_open(lane)
            except OutOfDescriptors:
                if time.monotonic() > deadline:
                    raise
                self.guard.tick()
                time.sleep(MAKE_ROOM_S / 50)

    def _try_open(self, lane: Lane) -> Outbound:
        try:
            link = self._context.socket(zmq.PUSH)
            try:
                self._set_up(lane, link)
            except zmq.ZMQError:
                link.close(0)
                raise
        except zmq.ZMQError as error:
            if error.errno not in ERRORS:
                raise
            raise out_of_descriptors(f"a connection to {lane[0]}") from error
        return Outbound(link)

    def _set_up(self, lane: Lane, link: zmq.Socket[bytes]) -> None:
        peer, for_control = lane
        address = self._addresses[peer]
        link.sndhwm = IN_FLIGHT
        if LOOPBACK not in address:
            link.sndbuf = self._send_buffer_bytes
        link.ipv6 = "[" in address
        self._credentials.present(link, address)
        if for_control:
            # ZeroMQ's own thread answers, so also while Python is busy. Not on data links: without
            # an answer they would be closed, and lose the messages in flight to a peer that was
            # only stopped for a while.
            link.heartbeat_ivl = round(PING_S * 1000)
            link.heartbeat_timeout = round(PONG_LIMIT_S * 1000)
        self._watch(lane, link)  # before it connects: an existing connection causes no event
        link.connect(address)

    def _watch(self, lane: Lane, link: zmq.Socket[bytes]) -> None:
        monitor = link.get_monitor_socket(LINK_EVENTS)
        self._monitors[monitor] = lane
        self._poller.register(monitor, zmq.POLLIN)

    def _note_link(self, monitor: zmq.Socket[bytes]) -> None:
        event, (peer, for_control) = recv_monitor_message(monitor), self._monitors[monitor]
        if for_control:
            self._note_control(peer, event["event"])
        elif event["event"] == zmq.EVENT_CONNECTED:
            self._connections[peer] = event["value"]
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._connections.pop(peer, None)

    def _note_control(self, peer: str, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._alive.add(peer)
        elif event == zmq.EVENT_DISCONNECTED:
            self._alive.discard(peer)
        elif event == zmq.EVENT_CONNECTED:
            self._retried[peer] = 0  # the system still accepts connections of a stopped process
        else:
            self._retried[peer] += 1

    def _unconnected(self) -> list[str]:
        return [
            peer
            for peer, for_control in self._outbound
            if peer not in (self._alive if for_control else self._connections)
        ]

    def link_alive(self, peer: str) -> bool:
        return peer in self._alive

    def delivered(self, peer: str) -> tuple[int, float]:
        fd = self._connections.get(peer)
        return (0, 0.0) if fd is None else acknowledged(fd, place_of(self._addresses[peer])[1])

    def link_refused(self, peer: str) -> bool:
        if peer in self._alive or self._retried[peer] < REFUSALS:
            return False
        self._retried[peer] = 0  # check an unreachable host again, but not at once
        return refuses(self._addresses[peer])

    def send(
        self,
        peer: str,
        body: AnyBody,
        frames: Sequence[Buffer] = (),
        *,
        priority: int = 0,
        pair: int = 0,
    ) -> SendTicket:
        parts: list[Buffer] = [encode_header(self.name, body, self.process, pair), *frames]
        posted = Posted(priority, next(self._order), parts, SendTicket())
        with self._lock:
            self._posted.append((peer, posted))
            self.sent[peer] += sum(memoryview(part).nbytes for part in parts)
        self.wake()
        return posted.ticket

    def wake(self) -> None:
        """Make a ``receive`` on another thread check its queues."""
        # One byte is enough for all messages posted before the reader has taken it.
        if not self._waking:
            self._waking = True
            try:
                self._wake.send(b"\0")
            except OSError as error:  # closed
                self._waking = False
                raise JobEnded from error

    def receive(self, timeout_s: float) -> Message[Any] | None:
        """Return the next message that can be decoded, or None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._dispatch_posted()
            left_ms = max(0, round((deadline - time.monotonic()) * 1000))
            ready = dict(self._poller.poll(left_ms))
            if self._woken.fileno() in ready:
                self._drain_wakes()
            if self._zap in ready:
                request = self._zap.recv_multipart()
                self._zap.send_multipart(self._credentials.answer(request, self.address))
            for lane in tuple(self._blocked):
                if self._outbound[lane].link in ready:
                    self._push_out(lane)
            for monitor in self._monitors:
                if monitor in ready:
                    self._note_link(monitor)
            if self._inbound in ready and (message := self._take()) is not None:
                return message
            if self._woken.fileno() in ready or time.monotonic() >= deadline:
                return None

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        self._waking = False  # only now: a thread that posts later writes a new byte

    def _dispatch_posted(self) -> None:
        touched = []
        while self._posted:
            peer, posted = self._posted.popleft()
            if isinstance(posted, str):
                if self._addresses.get(peer) != posted:
                    self._cut(peer)
                self._addresses[peer] = posted
                continue
            if peer not in self._addresses:
                self.refused["unknown peer"] += 1
                continue
            lane = (peer, posted.priority <= CONTROL)
            if lane not in self._outbound:
                self._outbound[lane] = self._open(lane)
            heapq.heappush(self._outbound[lane].waiting, posted)
            touched.append(lane)
        for lane in dict.fromkeys(touched):
            if lane in self._outbound:  # else it was closed since
                self._push_out(lane)

    def _cut(self, peer: str) -> None:
        """Drop messages in flight to a peer's old address."""
        for lane in ((peer, True), (peer, False)):
            outbound = self._outbound.pop(lane, None)
            if outbound is None:
                continue
            if lane in self._blocked:
                self._blocked.discard(lane)
                self._poller.unregister(outbound.link)
            outbound.link.disable_monitor()
            for monitor in [m for m, of in self._monitors.items() if of == lane]:
                self._poller.unregister(monitor)
                del self._monitors[monitor]
                monitor.close(0)
            outbound.link.close(0)
        self._alive.discard(peer)
        self._retried[peer] = 0
        self._connections.pop(peer, None)

    def _push_out(self, lane: Lane) -> None:
        outbound = self._outbound[lane]
        if outbound.flush():
            if lane in self._blocked:
                self._blocked.discard(lane)
                self._poller.unregister(outbound.link)
        elif lane not in self._blocked:
            self._blocked.add(lane)
            self._poller.register(outbound.link, zmq.POLLOUT)

    def _take(self) -> Message[Any] | None:
        try:
            parts = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            envelope = decode_header(parts[0].buffer)
        except FrameRefused as error:
            self.refused[type(error).__name__] += 1
            return None
        self._used.add(parts[0].get(zmq.SRCFD))
        frames = tuple(part.buffer for part in parts[1:])
        self.received[envelope.sender] += sum(len(part) for part in parts)
        return Message(envelope.sender, envelope.body, frames, envelope.process, envelope.pair)

    def close(self, linger_s: float) -> None:
        deadline = time.monotonic() + linger_s
        with contextlib.suppress(OutOfDescriptors):  # already raised, and ends the job
            self._dispatch_posted()
        while self._blocked and time.monotonic() < deadline:
            for lane in tuple(self._blocked):
                self._push_out(lane)
            self._poller.poll(20)
        self.guard.close()
        self._inbound.close(0)
        # Monitors first: ZeroMQ's thread would wait for ever to report to a closed monitor.
        for outbound in self._outbound.values():
            outbound.link.disable_monitor()
        for monitor in self._monitors:
            monitor.close(0)
        for outbound in self._outbound.values():
            outbound.link.close(max(1, round((deadline - time.monotonic()) * 1000)))
        self._zap.close(0)
        self._woken.close()
        self._wake.close()
        self._context.term()
