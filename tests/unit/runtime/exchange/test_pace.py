"""p follows the steps that were timed and what links have shown."""

from __future__ import annotations

from itertools import pairwise

from slipstream.methods import PartialExchange
from slipstream.runtime.gossip.pace import CALM_LOOKS, LOOK_STEPS, TICK_S, Pace
from slipstream.testing.clock import VirtualClock

MODEL, LINK = 1_000_000, 10e6
PEERS = ["rank 1", "rank 2", "rank 3"]


class Counters:
    """A transport of which only this is asked."""

    def __init__(self) -> None:
        self.moved = dict.fromkeys(PEERS, (0, 0.0))

    def move(self, nbytes: int, seconds: float) -> None:
        """On all links at once, as slices go."""
        for peer, (before, busy) in self.moved.items():
            self.moved[peer] = (before + nbytes, busy + seconds)

    def delivered(self, peer: str) -> tuple[int, float]:
        return self.moved[peer]


class Scene:
    def __init__(self, rule: PartialExchange) -> None:
        self.clock = VirtualClock()
        self.counters = Counters()
        self.pace = Pace(rule, MODEL, PEERS, LINK, self.counters, self.clock)  # type: ignore[arg-type]

    def train(
        self, steps: int, step_s: float, *, waited_s: float = 0.0, held_up: bool = False
    ) -> int:
        for _ in range(steps):
            self.clock.advance(step_s + waited_s)
            self.pace.stepped(waited_s, held_up)
        return self.pace.partitions


def test_until_steps_are_timed_as_many_as_peers() -> None:
    scene = Scene(PartialExchange())
    assert scene.train(LOOK_STEPS - 1, 0.1) == 3
    assert scene.train(1, 0.1) == 4  # 10 steps a second, 3 MB each: 30 of 9 MB/s


def test_what_is_given_stays() -> None:
    scene = Scene(PartialExchange(partitions=2))
    assert scene.train(100, 0.01) == 2
    assert round(scene.pace.account()["predicted_bytes_s"]) == 100 * MODEL * 3 / 2


def test_waiting_for_others_is_not_computing() -> None:
    assert Scene(PartialExchange()).train(LOOK_STEPS, 0.1, waited_s=0.5) == 4


def test_an_evaluation_is_no_step() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS - 2, 0.1)
    scene.train(1, 60.0)
    assert scene.train(1, 0.1) == 4


def test_steps_of_uneven_length_count_by_their_mean() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS // 2, 0.05)
    assert scene.train(LOOK_STEPS // 2, 0.15) == 4


def test_links_that_turn_out_narrower_make_slices_smaller() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(2_000_000, 1.2)  # 6 MB in 1.2 s: 5 MB/s
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1, held_up=True) == 7


def test_little_traffic_is_no_sign_of_a_narrow_link() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(2_000_000, 1.2)
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 4


def test_links_that_turn_out_wider_make_slices_larger() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(20_000_000, 1.0)
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 1


def test_a_little_at_a_time_shows_how_large_a_bucket_is_and_no_more() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(2_000_000, 0.1)
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 4


def test_a_rate_that_was_given_is_believed() -> None:
    scene = Scene(PartialExchange(bytes_s=LINK))
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(20_000_000, 1.0)
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 4


def test_small_changes_leave_p_alone_and_show_in_the_account() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    assert scene.train(round(TICK_S / 0.085) + 1, 0.085) == 4
    assert round(scene.pace.account()["steps_s"], 1) == 11.8


def test_without_a_peer_there_is_less_to_send() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.pace.lose("rank 3")
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 3
    scene.pace.gain("rank 3")
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1) == 4


def test_a_connection_that_counts_anew_tells_nothing_at_first() -> None:
    scene = Scene(PartialExchange())
    scene.counters.move(1_000_000, 0.3)
    scene.train(LOOK_STEPS, 0.1)
    assert scene.pace.account()["link_bytes_s"] == LINK
    scene.counters.moved = dict.fromkeys(PEERS, (1000, 0.9))
    assert scene.train(round(TICK_S / 0.1) + 1, 0.1, held_up=True) == 4


def spell(scene: Scene, looks: int, *, held_up: bool = False) -> int:
    return scene.train(looks * (round(TICK_S / 0.1) + 1), 0.1, held_up=held_up)


def test_after_a_narrow_spell_p_comes_back_bit_by_bit() -> None:
    """Links that are wide again show nothing while little is sent."""
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    scene.counters.move(1_000_000, 3.0)
    assert spell(scene, 1, held_up=True) == 34
    assert spell(scene, CALM_LOOKS - 1) == 34
    assert spell(scene, 12) <= 4


def test_what_did_not_go_well_is_tried_again_later_and_later() -> None:
    scene = Scene(PartialExchange())
    scene.train(LOOK_STEPS, 0.1)
    tries = []
    for tick in range(8 * CALM_LOOKS):
        trying = spell(scene, 1) < 4
        if trying:  # more than the link has, which shows
            tries.append(tick)
            scene.counters.move(20_000_000, 6.0)
            assert spell(scene, 1, held_up=True) == 4
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert len(gaps) >= 2
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps))


def test_a_link_that_stands_still_is_not_the_end() -> None:
    scene = Scene(PartialExchange())
    before = scene.train(LOOK_STEPS, 0.1)
    for _ in range(40):
        scene.counters.move(0, 10.0)  # busy all the time, and nothing arrives
        most = scene.train(round(TICK_S / 0.1) + LOOK_STEPS, 0.1, held_up=True)
    assert before < most <= MODEL // 4
    assert scene.pace.bytes_s > 0
