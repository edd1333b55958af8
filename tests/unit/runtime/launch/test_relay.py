"""The last lines of a child: how long its relay is waited for."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from slipstream.runtime.launch import relay as relays
from slipstream.runtime.launch.relay import Relay, start_relay

LONG_S = 60.0
LINE = b"x" * 99 + b"\n"


class Child:
    """A relay between two pipes; the test is the child, and the reader."""

    def __init__(self) -> None:
        from_child, self.child = os.pipe()
        self.reader, self.to_reader = os.pipe()
        self.relay = start_relay(os.fdopen(from_child, "rb"), "[rank 1] ", self.to_reader)

    def fill(self) -> None:
        """Write more than the reader's pipe holds, and end."""
        for _ in range(1000):
            os.write(self.child, LINE)
        os.close(self.child)

    def read_all(self) -> None:
        left = 1000 * len(b"[rank 1] " + LINE)
        while left:
            left -= len(os.read(self.reader, 1000))


def never() -> bool:
    return False


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    os.close(made.reader)  # whatever still writes gets an error
    made.relay.join(LONG_S)
    os.close(made.to_reader)


def test_a_slow_reader_is_waited_for_without_using_up_the_time(child: Child) -> None:
    child.fill()
    reads = threading.Timer(3.0, child.read_all)
    reads.start()
    left_s = child.relay.finish(LONG_S, never)
    reads.join()  # all lines came
    assert not child.relay.is_alive()
    assert left_s > LONG_S - 2.5


def test_a_reader_that_takes_nothing_is_given_up(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "READER_S", 0.2)
    child.fill()
    child.relay.finish(LONG_S, never)
    assert child.relay.is_alive()


def test_a_signal_ends_the_wait(child: Child) -> None:
    child.fill()
    child.relay.finish(LONG_S, lambda: True)
    assert child.relay.is_alive()


def test_a_stray_process_that_writes_for_ever_is_not_waited_for(child: Child) -> None:
    over = threading.Event()

    def write() -> None:
        while not over.wait(0.01):
            os.write(child.child, b"tick\n")

    stray = threading.Thread(target=write)
    stray.start()
    assert child.relay.finish(0.3, never) <= 0.0
    over.set()
    stray.join()
    assert child.relay.is_alive()
    os.close(child.child)


def test_a_stray_process_is_not_waited_for_with_a_slow_reader(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LAST_NBYTES", 20_000)
    over = threading.Event()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError):
            while not over.is_set():
                os.write(child.child, LINE)

    def read() -> None:
        while not over.wait(0.001):
            with contextlib.suppress(BlockingIOError):
                os.read(child.reader, 200)

    os.set_blocking(child.reader, False)
    threads = [threading.Thread(target=work) for work in (write, read)]
    for thread in threads:
        thread.start()
    child.relay.finish(LONG_S, never)
    over.set()
    for thread in threads:
        thread.join()
    assert not child.relay.is_alive()
    os.close(child.child)


def test_it_can_run_on_the_thread_of_its_caller() -> None:
    from_child, child = os.pipe()
    reader, to_reader = os.pipe()
    os.write(child, b"first\nsecond")
    os.close(child)
    Relay(os.fdopen(from_child, "rb"), "[server 0] ", to_reader).run()
    os.close(to_reader)
    with os.fdopen(reader, "rb") as told:
        assert told.read() == b"[server 0] first\n[server 0] second\n"
