"""Narrow links are told by what arrived while they were busy, and only for a while."""

from __future__ import annotations

from slipstream.runtime.members.link_watch import HOLDS_S, LinkWatch

MEGABYTE = 1_000_000
ENOUGH = 5 * MEGABYTE  # a second


class Delivering:
    """A transport of which only this is asked."""

    def __init__(self) -> None:
        self.moved = {"server 0": (0, 0.0), "server 1": (0, 0.0)}

    def move(self, peer: str, nbytes: int, seconds: float) -> None:
        before, took = self.moved[peer]
        self.moved[peer] = (before + nbytes, took + seconds)

    def delivered(self, peer: str) -> tuple[int, float]:
        return self.moved[peer]


class Scene:
    def __init__(self, enough: float | None = ENOUGH) -> None:
        self.now = 0.0
        self.transport = Delivering()
        self.watch = LinkWatch(self.transport, list(self.transport.moved), enough, lambda: self.now)


def test_nothing_is_narrow_before_anything_has_moved() -> None:
    assert not Scene().watch.congested()


def test_nothing_is_narrow_if_nobody_asked() -> None:
    scene = Scene(enough=None)
    scene.transport.move("server 0", 10, 10.0)
    assert not scene.watch.congested()


def test_one_slow_link_is_enough() -> None:
    scene = Scene()
    scene.transport.move("server 0", 20 * MEGABYTE, 1.0)
    assert not scene.watch.congested()
    scene.transport.move("server 1", MEGABYTE, 1.0)
    assert scene.watch.congested()


def test_small_transfers_add_up() -> None:
    scene = Scene()
    for _ in range(50):
        scene.transport.move("server 0", 10_000, 0.01)
        told = scene.watch.congested()
    assert told


def test_they_add_up_over_time_too() -> None:
    scene = Scene()
    for _ in range(50):
        scene.now += 0.05
        scene.transport.move("server 0", 10_000, 0.01)
        told = scene.watch.congested()
    assert told


def test_little_traffic_does_not_keep_a_link_narrow() -> None:
    """What is sent because a link is congested shows nothing but that little was sent."""
    scene = Scene()
    scene.transport.move("server 0", MEGABYTE, 1.0)
    told = []
    for _ in range(30):
        told.append(scene.watch.congested())
        scene.now += HOLDS_S / 20
        scene.transport.move("server 0", 70_000, 0.05)
    assert told[:20] == [True] * 20
    assert not all(told[20:23])


def test_what_was_seen_holds_for_a_while() -> None:
    scene = Scene()
    scene.transport.move("server 0", MEGABYTE, 1.0)
    assert scene.watch.congested()
    scene.now = HOLDS_S
    assert scene.watch.congested()
    scene.now += 0.1
    assert not scene.watch.congested()  # a step as if there were room
    scene.transport.move("server 0", MEGABYTE, 1.0)
    assert scene.watch.congested()


def test_a_link_that_widens_is_seen() -> None:
    scene = Scene()
    scene.transport.move("server 0", MEGABYTE, 1.0)
    assert scene.watch.congested()
    for _ in range(10):
        scene.transport.move("server 0", 20 * MEGABYTE, 1.0)
        told = scene.watch.congested()
    assert not told


def test_a_clock_read_out_of_turn_does_no_harm() -> None:
    scene = Scene()
    scene.transport.move("server 0", 0, 1.0)
    scene.watch.congested()
    scene.transport.move("server 0", 0, -0.5)
    assert not scene.watch.congested()


def test_a_new_connection_counts_from_the_beginning() -> None:
    scene = Scene()
    scene.transport.move("server 0", 20 * MEGABYTE, 1.0)
    assert not scene.watch.congested()
    scene.transport.moved["server 0"] = (MEGABYTE, 8.0)
    assert scene.watch.congested()
