"""A worker of a simulation: what it does, step by step, and how it differs from the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.consistency import BoundedStaleness
from slipstream.errors import WaitLimit
from slipstream.runtime.exchange import LinkExchange
from slipstream.runtime.update_stream import UpdateStream
from slipstream.testing.cast import FOREVER_S, ByteSlots, Owed, Tensors, owed_by
from slipstream.transports.wire import Lost, Message, Rerouted

if TYPE_CHECKING:
    from slipstream.testing.stage import Stage

Contribute = Callable[[int, int, int], bytes | None]  # rank, round, tensor


@dataclass(frozen=True)
class Conduct:
    """How one worker behaves: how often it acts compared with others, after how many steps of its
    own it leaves, and between which times it does nothing at all (and is given up for lost)."""

    speed: float = 1.0
    steps: float = math.inf
    away_at: float = math.inf
    back_at: float = math.inf
    given_up: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a worker: the round it was for, what the worker had then, and what it gave."""

    round: int
    had: Tensors
    given: Tensors


@dataclass(eq=False)
class Worker:
    """One worker and what it does; ``train`` yields after every action whether it could go on."""

    rank: int
    stage: Stage
    rounds: int
    contribute: Contribute
    conduct: Conduct
    steps: list[Step] = field(default_factory=list)
    updates: list[Tensors] = field(default_factory=list)  # where it may run ahead of them

    def __post_init__(self) -> None:
        plan = self.stage.plan
        self.together = plan.together
        self.member = self.stage.members[plan.cluster.name(self.rank)]
        self.slots = ByteSlots(plan.specs, weights_return=plan.update == "server")
        self._read: dict[int, bytes | None] = {}  # by tensor, as the forward pass found it
        streamed = plan.update == "worker" and not plan.consistency.lockstep
        kind = UpdateStream if streamed else LinkExchange
        self.exchange = kind(self.rank, plan, self.member, self.slots, limit_s=FOREVER_S)
        if isinstance(self.exchange, UpdateStream):
            self.exchange.apply = self._note
        self.member.on(Lost, self._on_lost)

    def _note(self, clock: int, tensors: Collection[int]) -> None:
        contents = self.slots.contents()
        given = range(len(contents))
        self.updates.append(tuple(contents[t] if t in tensors else None for t in given))

    def _on_lost(self, message: Message) -> None:
        assert isinstance(message.body, Lost)
        if message.body.rank != self.rank:
            self.exchange.lose(message.body.rank)
            for server in self.stage.servers:
                self.member.send(server.member.name, Rerouted(message.body.rank))

    @property
    def here(self) -> bool:
        """Whether it acts now."""
        return not self.conduct.away_at <= self.stage.clock.now < self.conduct.back_at

    @property
    def dead(self) -> bool:
        """Whether it will never act again."""
        return not self.here and self.conduct.back_at == math.inf

    def owed(self) -> Owed:
        """What its codecs hold back."""
        plan, exchange = self.stage.plan, self.exchange
        return owed_by(plan, plan.chunks, lambda index: exchange.memories(plan.chunks[index]))

    def last(self) -> Tensors:
        """What it has when all is over."""
        self.exchange.refresh()
        return self._has()

    def _has(self) -> Tensors:
        """Where all make every round, what has come back in it; else all, whenever it came."""
        return self.slots.results() if self.together else self.slots.contents()

    def train(self) -> Iterator[bool]:
        while True:
            while (round_ := self._next_round()) is None:
                yield False
            if round_ >= self.rounds or len(self.steps) >= self.conduct.steps:
                break
            self.exchange.refresh()
            yield from self._forward()
            had = tuple(self._read[tensor] for tensor in range(len(self._read)))
            yield from self._backward(round_, had)
        yield from self._forward()
        while isinstance(self.exchange, UpdateStream) and not self._drained():
            yield False
        if not self.together:
            while not self._drained():
                yield False
            self.stage.retire(self.rank, self.member.name)

    def _next_round(self) -> int | None:
        """The round that this worker is to make next; None: it has not been told yet."""
        rule = self.stage.plan.consistency
        if self.together or isinstance(rule, BoundedStaleness):
            return len(self.steps)
        try:
            return self.exchange.open_round()
        except WaitLimit:
            return None

    def _forward(self) -> Iterator[bool]:
        """Layer by layer, as results are needed."""
        specs = self.stage.plan.specs
        for tensor in sorted(range(len(specs)), key=lambda t: specs[t].order):
            while not self._await(tensor):
                yield False
            self._read[tensor] = self._has()[tensor]
            yield True

    def _await(self, tensor: int) -> bool:
        try:
            self.exchange.wait([tensor])
        except WaitLimit:
            return False
        return True

    def _drained(self) -> bool:
        try:
            self.exchange.drain()
        except WaitLimit:
            return False
        return True

    def _backward(self, round_: int, had: Tensors) -> Iterator[bool]:
        specs = self.stage.plan.specs
        given = tuple(self.contribute(self.rank, round_, t) for t in range(len(specs)))
        self.exchange.step = len(self.steps)
        self.steps.append(Step(round_, had, given))
        self.slots.begin(given)
        used = [t for t in range(len(specs)) if given[t] is not None]
        if self.stage.plan.schedule.leaves_during_backward:
            for tensor in sorted(used, key=lambda t: -specs[t].order):
                self.exchange.ready(tensor)
                yield True
        self.exchange.flush()
        yield True
