"""Every value of every update reaches every peer exactly once, whatever happens on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import RuntimeFault
from slipstream.methods import PartialExchange
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.gossip.handover import JoinCoordinator, Joiner, JoinPeer
from slipstream.runtime.gossip.pace import Pace
from slipstream.testing.clock import VirtualClock
from slipstream.testing.members import SimulatedMember
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Beat, Lost, Message, Part, Return, Tail, checksum

NUMEL = 23
SILENCE_FACTOR_IF_LINK_ALIVE = 20_000  # turns; far more than anything takes


class Vector:
    """Weights that also remember what was added."""

    def __init__(self) -> None:
        self.values = np.zeros(NUMEL)

    @property
    def numel(self) -> int:
        return NUMEL

    def add(self, start: int, values: np.ndarray[Any, Any]) -> None:
        self.values[start : start + len(values)] += values

    def whole(self) -> np.ndarray[Any, Any]:
        return self.values.astype(np.float32)

    def clear(self) -> None:
        self.values[:] = 0

    def stepped(self, step: Callable[[], object], coefficient: float) -> np.ndarray[Any, Any]:
        raise AssertionError("steps are made by hand here")


class Whim(Pace):
    """A p that changes when the test says so."""

    def stepped(self, waited_s: float, held_up: bool) -> int:
        return self.partitions


class Trainer:
    """One worker of a world in which links are queues."""

    def __init__(self, rank: int, world: World, incarnation: int = 0) -> None:
        self.rank, self.world, self.incarnation = rank, world, incarnation
        transport = world.network.endpoint(f"rank {rank}")
        transport.address = f"memory://rank {rank} in incarnation {incarnation}"
        self.member = SimulatedMember(
            f"rank {rank}",
            world.network,
            VirtualClock(),
            move=lambda: False,
            waits=lambda: False,
            trace=[],
        )
        peers = [peer for peer in range(world.workers) if peer != rank]
        self.member.coordination.on_return = lambda name: None
        self.member.coordination.on_lost = self.tell_lost if rank == 0 else None
        self.member.on(Lost, self.on_lost)
        names = [f"rank {peer}" for peer in peers]
        self.pace = Whim(world.rule, 4 * NUMEL, names, 1e6, transport, lambda: 0.0)
        self.weights = Vector()
        self.exchange = GossipChannel(
            rank,
            world.rule,
            self.member,
            self.weights,
            peers,
            self.pace,
            limit_s=0.0,
            incarnation=incarnation,
        )
        if rank == 0:
            JoinCoordinator(self.exchange, self.member, world.workers)
        else:
            JoinPeer(self.exchange, self.member)
        self.given = np.zeros(NUMEL)
        self.moves = True

    def meet(self, others: list[Trainer]) -> None:
        for other in others:
            if other is not self:
                self.member.transport.connect(f"rank {other.rank}", other.member.transport.address)

    def tell_lost(self, name: str) -> None:
        """What rank 0 does, as in a job."""
        for peer in range(self.world.workers):
            self.member.send(
                f"rank {peer}", Lost(int(name.removeprefix("rank "))), priority=CONTROL
            )

    def on_lost(self, message: Message) -> None:
        assert isinstance(message.body, Lost)
        if self.rank != 0 and message.body.rank != self.rank:
            self.member.lost.append(f"rank {message.body.rank}")
        self.exchange.lose(message.body.rank)

    def step(self) -> None:
        update = self.moves * self.world.numbers.integers(-9, 10, NUMEL).astype(np.float32)
        self.given += update
        self.weights.add(0, update)
        self.exchange.give(update)


class World:
    def __init__(self, workers: int, slices: PartialExchange, tau: int, seed: int) -> None:
        self.workers = workers
        self.rule = msgspec.structs.replace(slices, staleness=tau)
        self.network = MemoryNetwork(seed)
        self.numbers = np.random.default_rng(seed)
        self.random = random.Random(seed)
        self.trainers = [Trainer(rank, self) for rank in range(workers)]
        self.alive = list(self.trainers)
        self.coming: dict[Trainer, Joiner] = {}
        for trainer in self.trainers:
            trainer.meet(self.trainers)
        everybody = [f"rank {rank}" for rank in range(workers)]
        self.trainers[0].member.expect(*everybody)

    def deliver(self) -> bool:
        name = self.network.deliver()
        if name is None:
            return False
        trainer = self.trainers[int(name.removeprefix("rank "))]
        if trainer in self.alive or trainer in self.coming:
            trainer.member.take(1)
            trainer.member.check()
        else:
            trainer.member.transport.receive(0.0)
        return True

    def step(self, trainer: Trainer) -> None:
        """Like a loop that has asked whether it may; by what the others have really made."""
        trainer.exchange.admit_joiners()
        if not trainer.exchange.may_begin():
            return
        known = [t for t in self.alive if trainer.exchange.heard_of(t.rank)]
        slowest = min((t.exchange.made for t in known), default=trainer.exchange.made)
        reach = trainer.exchange.partitions + (self.rule.staleness or 0)
        assert trainer.exchange.made < slowest + reach
        trainer.step()

    def kill(self, trainer: Trainer) -> None:
        if trainer in self.alive:
            self.alive.remove(trainer)
        self.coming.pop(trainer, None)

    def notice(self) -> None:
        """Rank 0 finds out who has died."""
        first = self.trainers[0].member
        for trainer in self.trainers:
            if trainer not in self.alive and trainer not in self.coming:
                first.coordination.give_up(f"rank {trainer.rank}")
                first.take(0)

    def start_again(self, dead: Trainer) -> None:
        newcomer = Trainer(dead.rank, self, dead.incarnation + 1)
        newcomer.meet(self.trainers)
        self.trainers[dead.rank] = newcomer
        self.coming[newcomer] = Joiner(newcomer.exchange, newcomer.member, 0.0)
        self.coming[newcomer].ask()

    def admit_joiners(self) -> None:
        for newcomer, returner in list(self.coming.items()):
            if returner.ready():
                returner.enter()
                del self.coming[newcomer]
                self.alive.append(newcomer)

    def bring_back(self, wanted: Trainer) -> None:
        """Until one that was started again is in."""
        for _ in range(SILENCE_FACTOR_IF_LINK_ALIVE):
            if wanted in self.alive:
                return
            self.step(self.trainers[0])
            self.turn()
        pytest.fail("somebody is still outside")

    def turn(self) -> None:
        """Everybody sends what is due; something arrives."""
        for trainer in self.alive:
            trainer.exchange.offer()
        self.deliver()
        self.admit_joiners()

    def drain(self, *, final: bool = False) -> None:
        """They begin one by one; who has not begun trains on, and who comes back joins in."""
        wanted = max(trainer.exchange.drains for trainer in self.alive) + 1
        for _ in range(SILENCE_FACTOR_IF_LINK_ALIVE):
            waiting = [t for t in self.alive if t.exchange.drains < wanted]
            begun = [t for t in self.alive if t not in waiting]
            if not waiting and not [t for t in begun if not t.exchange.drained()]:
                return
            if waiting and self.random.random() < 0.3:
                self.random.choice(waiting).exchange.begin_drain(final=final)
            elif waiting and self.random.random() < 0.5:
                self.step(self.random.choice(waiting))
            self.turn()
        pytest.fail("updates are still missing")


schedules = st.fixed_dictionaries(
    {
        "workers": st.integers(2, 8),
        "partitions": st.integers(1, 9),
        "same": st.booleans(),
        "tau": st.integers(0, 12),
        "seed": st.integers(0, 2**32),
        "actions": st.integers(0, 250),
        "haste": st.floats(0.05, 0.95),  # how often somebody steps rather than something arrives
        "whims": st.floats(0, 0.2),  # how often p changes
    }
)


def play(world: World, actions: int, haste: float, whims: float) -> None:
    speeds = [world.random.uniform(0.1, 1.0) for _ in world.trainers]
    for _ in range(actions):
        if world.random.random() < haste:
            (trainer,) = world.random.choices(world.alive, [speeds[t.rank] for t in world.alive])
            if world.random.random() < whims:
                trainer.pace.partitions = world.random.randint(1, 9)
            world.step(trainer)
        elif not world.deliver():
            world.random.choice(world.alive).exchange.offer()
        world.admit_joiners()


@given(schedules)
@settings(max_examples=250, deadline=None)
def test_each_update_is_applied_by_everybody_exactly_once(drawn: dict[str, Any]) -> None:
    slices = PartialExchange(drawn["partitions"], same_for_all=drawn["same"])
    world = World(drawn["workers"], slices, drawn["tau"], drawn["seed"])
    for final in (False, True):
        play(world, drawn["actions"], drawn["haste"], drawn["whims"])
        world.drain(final=final)
        everything = sum((t.given for t in world.trainers), np.zeros(NUMEL))
        for trainer in world.trainers:
            np.testing.assert_array_equal(trainer.weights.values, everything)


@given(schedules, st.integers(0, 100))
@settings(max_examples=250, deadline=None)
def test_the_rest_lose_nothing_of_each_other_when_one_dies(
    drawn: dict[str, Any], dies_at: int
) -> None:
    slices = PartialExchange(drawn["partitions"], same_for_all=drawn["same"])
    world = World(max(3, drawn["workers"]), slices, drawn["tau"], drawn["seed"])
    dead = world.random.choice(world.trainers[1:])
    dead.moves = False  # who has got how much of its updates would be anybody's guess
    play(world, dies_at, drawn["haste"], drawn["whims"])
    world.kill(dead)
    world.notice()
    play(world, drawn["actions"], drawn["haste"], drawn["whims"])
    world.drain()
    everything = sum((t.given for t in world.alive), np.zeros(NUMEL))
    for trainer in world.alive:
        np.testing.assert_array_equal(trainer.weights.values, everything)


@given(schedules, st.lists(st.integers(0, 60), min_size=2, max_size=8))
@settings(max_examples=250, deadline=None)
def test_who_comes_back_has_each_update_once(drawn: dict[str, Any], pauses: list[int]) -> None:
    """Whatever was under way when it died and when it came, also if it dies on the way, and others
    with it, and others drain meanwhile."""
    slices = PartialExchange(drawn["partitions"], same_for_all=drawn["same"])
    world = World(max(3, drawn["workers"]), slices, drawn["tau"], drawn["seed"])
    unlucky = world.random.sample(range(1, world.workers), min(2, world.workers - 2))
    for rank in unlucky:
        world.trainers[rank].moves = False  # who got how much of the dead's is anybody's guess
    for pause in pauses:
        play(world, pause, drawn["haste"], drawn["whims"])
        trainer = world.trainers[world.random.choice(unlucky)]
        if trainer in world.alive or (trainer in world.coming and world.random.random() < 0.5):
            world.kill(trainer)
        elif trainer not in world.coming:
            world.start_again(trainer)
            world.trainers[trainer.rank].moves = False
        if world.random.random() < 0.5:
            world.notice()
    world.notice()
    for rank in unlucky:
        if world.trainers[rank] not in (*world.alive, *world.coming):
            world.start_again(world.trainers[rank])
        world.trainers[rank].moves = True  # from now on it lives
    for drains in range(2):
        play(world, drawn["actions"], drawn["haste"], drawn["whims"])
        if drains or world.random.random() < 0.5:
            for rank in unlucky:
                world.bring_back(world.trainers[rank])
        world.drain()
    everything = sum((t.given for t in world.trainers), np.zeros(NUMEL))
    for trainer in world.trainers:
        np.testing.assert_array_equal(trainer.weights.values, everything)


def test_a_link_that_is_busy_makes_slices_fuller_and_no_queue() -> None:
    world = World(2, PartialExchange(3), 50, seed=1)
    trainer = world.trainers[0]
    for _ in range(40):
        trainer.step()
    assert trainer.exchange.merged == 39
    assert world.deliver()
    assert not world.deliver()  # one slice was under way
    trainer.exchange.offer()
    assert world.deliver()
    world.drain()
    everything = sum((t.given for t in world.trainers), np.zeros(NUMEL))
    np.testing.assert_array_equal(world.trainers[1].weights.values, everything)


def test_where_slices_must_wait_every_partition_has_its_turn() -> None:
    """A link that is free every second step, and p even: half of them would never leave."""
    world = World(2, PartialExchange(4), 50, seed=1)
    trainer, peer = world.trainers
    for _ in range(8):
        trainer.step()
        trainer.step()
        world.deliver()
    assert (peer.weights.values != 0).sum() > NUMEL * 0.9


def test_memory_is_what_the_turns_take() -> None:
    assert len(World(8, PartialExchange(3), 4, seed=0).trainers[0].exchange.accumulators) == 3
    assert len(World(8, PartialExchange(20), 4, seed=0).trainers[0].exchange.accumulators) == 7
    assert (
        len(World(8, PartialExchange(3, same_for_all=True), 4, 0).trainers[0].exchange.accumulators)
        == 1
    )


def test_who_is_busy_elsewhere_is_not_behind_for_what_it_has_not_sent() -> None:
    world = World(3, PartialExchange(4), 0, seed=0)
    hub, elsewhere, behind = world.trainers
    for _ in range(4):
        elsewhere.step()  # the first slice leaves, the others wait for it
    while world.deliver():
        pass
    for trainer in 5 * [hub, behind]:
        world.step(trainer)
        while world.deliver():
            pass
    assert behind.exchange.made == 5  # of 1 + 4: all it knows is the first step
    assert not behind.exchange.may_begin()
    hub.member.send("rank 2", Beat({"rank 0": 5, "rank 1": 4}), priority=CONTROL)
    while world.deliver():
        pass
    for _ in range(9):
        world.step(behind)
    assert behind.exchange.made == 8  # of 4 + 4
    for trainer in 20 * [hub, elsewhere]:
        trainer.step()
    hub.member.send("rank 2", Beat({"rank 0": 25, "rank 1": 24}), priority=CONTROL)
    while world.deliver():
        pass
    for _ in range(9):
        world.step(behind)
    assert behind.exchange.made == 13  # of 5 + 4 + 4: its updates would be too old


def test_who_has_finished_is_not_waited_for() -> None:
    world = World(2, PartialExchange(1), 0, seed=0)
    ahead, finished = world.trainers
    world.step(ahead)
    world.step(ahead)
    assert ahead.exchange.made == 1
    finished.exchange.begin_drain(final=True)
    assert not finished.exchange.drained()
    for _ in range(2):
        finished.exchange.offer()
        finished.exchange.drained()
        while world.deliver():
            pass
    for _ in range(5):
        assert ahead.exchange.may_begin()
        ahead.step()
        while world.deliver():
            pass
    world.alive = [ahead]
    ahead.exchange.begin_drain(final=True)
    while not ahead.exchange.drained():
        ahead.exchange.offer()
        world.deliver()
    while world.deliver():
        pass


def refused(world: World, body: Part | Tail, *frames: bytes, sender: int = 1) -> str:
    target = world.trainers[0]
    before = target.weights.values.copy()
    world.trainers[sender].member.send("rank 0", body, list(frames))
    while world.deliver():
        pass
    np.testing.assert_array_equal(target.weights.values, before)
    return target.member.last_refusal


ONES = np.ones(4, np.float32).tobytes()


@pytest.mark.parametrize(
    ("body", "frames", "word"),
    [
        (Part(0, 0, 1, 20, True, checksum([ONES])), [ONES], "at weight 20 of 23"),
        (Part(0, 0, 1, 2**61, True, checksum([ONES])), [ONES], "of 23"),
        (Part(0, 0, 1, 0, True, checksum([ONES[:-1]])), [ONES[:-1]], "15 bytes"),
        (Part(0, 0, 1, 0, True, checksum([ONES, ONES])), [ONES, ONES], "2 frames"),
        (Part(0, 0, 1, 0, True, 0), [], "0 frames"),
        (Part(0, 0, 1, 0, True, 7), [ONES], "checksum"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused_and_training_goes_on(
    body: Part, frames: list[bytes], word: str
) -> None:
    world = World(2, PartialExchange(1), 3, seed=0)
    assert word in refused(world, body, *frames)
    world.trainers[1].step()
    world.drain()
    everything = sum((t.given for t in world.trainers), np.zeros(NUMEL))
    np.testing.assert_array_equal(world.trainers[0].weights.values, everything)


def test_a_slice_that_comes_twice_counts_once() -> None:
    world = World(2, PartialExchange(1), 3, seed=0)
    part = Part(0, 0, 1, 0, True, checksum([ONES]))
    world.trainers[1].member.send("rank 0", part, [ONES])
    world.deliver()
    assert "has come before" in refused(world, part, ONES)
    assert world.trainers[0].weights.values.sum() == 4


def test_a_slice_that_was_lost_ends_the_job_by_name() -> None:
    world = World(2, PartialExchange(1), 3, seed=0)
    world.trainers[1].member.send("rank 0", Part(0, 1, 1, 0, True, checksum([ONES])), [ONES])
    with pytest.raises(RuntimeFault, match=r"rank 1.*message 0 of its updates was lost"):
        world.deliver()
    assert not world.trainers[0].weights.values.any()


def test_slices_of_one_that_has_died_are_refused() -> None:
    world = World(3, PartialExchange(1), 3, seed=0)
    world.kill(world.trainers[2])
    world.notice()
    world.trainers[0].member.coordination.on_return = None  # to see what would become of it
    body = Part(0, 0, 1, 0, True, checksum([ONES]))
    assert "no peer" in refused(world, body, ONES, sender=2)


def test_who_cannot_come_back_is_told_why() -> None:
    world = World(3, PartialExchange(1), 3, seed=0)
    world.kill(world.trainers[1])
    world.notice()
    world.trainers[1].member.send("rank 0", Return("memory://rank 1 in incarnation 1", 0))
    while world.deliver():
        pass
    assert "must grow" in world.trainers[0].member.last_refusal
