"""Messages between processes over a socket without an address."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import pytest

from slipstream.errors import FrameRefused
from slipstream.transports.local_socket import HEAD, LARGEST, Hangup, LocalSocket, socket_pair


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


@pytest.fixture
def ends() -> Iterator[tuple[LocalSocket[Word], LocalSocket[Word]]]:
    one, other = (LocalSocket(end, Word) for end in socket_pair())
    yield one, other
    one.close()
    other.close()


Ends = tuple[LocalSocket[Word], LocalSocket[Word]]


def test_messages_come_in_order_and_whole(ends: Ends) -> None:
    one, other = ends
    assert not other.has_input()
    texts = ["a", "b" * 1_000_000, "c"]
    sender = threading.Thread(target=lambda: [one.send(Word(text)) for text in texts])
    sender.start()
    assert [other.receive()[0].text for _ in texts] == texts
    sender.join()
    assert not other.has_input()


def test_the_second_of_two_that_came_as_one_is_noticed(ends: Ends) -> None:
    one, other = ends
    one.send(Word("first"))
    one.send(Word("second"))
    assert other.receive()[0] == Word("first")
    assert other.has_input()
    assert other.receive()[0] == Word("second")


def test_a_descriptor_comes_along(ends: Ends) -> None:
    one, other = ends
    readable, writable = os.pipe()
    one.send(Word("plain"))
    one.send(Word("with"), readable)
    assert other.receive() == (Word("plain"), None)
    body, descriptor = other.receive()
    assert body == Word("with")
    assert descriptor is not None
    os.write(writable, b"x")
    assert os.read(descriptor, 1) == b"x"
    for each in (readable, writable, descriptor):
        os.close(each)


def test_the_end_and_the_limit(ends: Ends) -> None:
    one, other = ends
    with pytest.raises(TimeoutError):
        other.receive(0.01)
    one.close()
    with pytest.raises(Hangup):
        other.receive()
    with pytest.raises(Hangup):
        other.send(Word("nobody hears it"))


def test_who_does_not_listen_is_given_up() -> None:
    ours, theirs = socket_pair(0.05)
    line = LocalSocket(ours, Word)
    with pytest.raises(TimeoutError):
        line.send(Word("x" * 10_000_000))
    line.hang_up()
    line.close()
    theirs.close()


@pytest.mark.parametrize(
    "content", [HEAD.pack(LARGEST + 1, 0), HEAD.pack(3, 0) + b"\xc1zz", HEAD.pack(1, 1) + b"z"]
)
def test_nonsense_is_refused(content: bytes) -> None:
    left, right = socket_pair()
    line = LocalSocket(right, Word)
    left.sendall(content)
    with pytest.raises(FrameRefused):
        line.receive(1.0)
    left.close()
    line.close()
