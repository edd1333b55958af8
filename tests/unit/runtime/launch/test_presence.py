"""What a worker tells its launcher of its coming and going."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slipstream.runtime.launch.presence import Presence, PresenceReader


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ((), "outside"),
        (("begin",), "outside"),
        (("begin", "join"), "inside"),
        (("join",), "inside"),
        (("join", "leave"), "left"),
        (("join", "leave", "join"), "inside"),
    ],
)
def test_the_launcher_knows_where_a_worker_was(
    pipe: tuple[int, int], calls: tuple[str, ...], place: str
) -> None:
    reader, writer = pipe
    presence = Presence(writer)
    assert not os.get_inheritable(writer)
    for call in calls:
        getattr(presence, call)()
    seen = PresenceReader(os.dup(reader))
    assert seen.begun == bool(calls)
    assert seen.place() == place  # though the other end is open
    seen.close()
    assert seen.place() == place


def test_the_launcher_may_look_at_any_time(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    presence, seen = Presence(writer), PresenceReader(os.dup(reader))
    for call, place in (("begin", "outside"), ("join", "inside"), ("leave", "left")):
        getattr(presence, call)()
        assert [seen.place(), seen.place()] == [place, place]
    seen.close()


def test_without_a_launcher_nothing_is_written(pipe: tuple[int, int]) -> None:
    Presence(None).join()
    Presence(987654).join()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    assert Presence(nowhere)._descriptor is None  # a variable from another process
    os.close(nowhere)


def test_a_launcher_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Presence(writer).join()
    os.close(writer)
