"""A worker of a simulation: its actions, step by step, and how it differs from the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.errors import WaitLimit
from slipstream.planning.costs import Speeds
from slipstream.runtime.exchange.choices import LayerChoices
from slipstream.runtime.exchange.driver import Driver
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.update_stream import UpdateStream
from slipstream.testing.layers import ByteLayers, LayerRows, Rows, dense, send
from slipstream.testing.members import FOREVER_S, ByteSlots, Owed, Tensors, owed_by
from slipstream.transports.wire import Lost, Message, RouteUpdated
from slipstream.types import Unit

if TYPE_CHECKING:
    from slipstream.testing.cluster import Stage

SPEEDS = Speeds(1e9, 1e10, 1e9)  # for strategies that choose by measured speeds

Contribute = Callable[[int, int, int], bytes | None]  # rank, round, tensor


@dataclass(frozen=True)
class Conduct:
    """The behaviour of one worker.

    Args:
        speed: How often it acts, relative to other workers.
        steps: The number of its own steps after which it leaves.
        away_at: The time from which on it does nothing.
        back_at: The time from which on it acts again.
        given_up: True if it counts as lost meanwhile.
    """

    speed: float = 1.0
    steps: float = math.inf
    away_at: float = math.inf
    back_at: float = math.inf
    given_up: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a worker: its round, the worker's tensors at that time, and its contribution."""

    round: int
    had: Tensors
    given: Tensors


@dataclass(eq=False)
class Worker:
    """One worker and its actions; ``train`` yields after every action whether it could continue."""

    rank: int
    stage: Stage
    rounds: int
    contribute: Contribute
    conduct: Conduct
    rows: Rows
    steps: list[Step] = field(default_factory=list)
    updates: list[Tensors] = field(default_factory=list)  # if it may run ahead of them

    def __post_init__(self) -> None:
        plan = self.stage.plan
        self.delivers_every_result = plan.delivers_every_result
        self.member = self.stage.members[plan.cluster.name(self.rank)]
        self.slots = ByteSlots(plan.specs, weights_return=plan.update.holder_applies)
        self._read: dict[int, bytes | None] = {}  # by tensor, the value in the forward pass
        self._layers = [unit for unit in plan.over_links() if unit.layer is not None]
        math = ByteLayers(plan, self.slots)
        kind = partial(UpdateStream, apply=self._note) if plan.runs_ahead else RoundChannel
        self.exchange = kind(self.rank, plan, self.member, self.slots, math=math, limit_s=FOREVER_S)
        self.driver = Driver([self.exchange])
        self._compact: dict[Unit, LayerRows | None] = {}  # of this step
        self.choices: LayerChoices | None = None
        if plan.chooser is not None and plan.choices():
            self.choices = LayerChoices(
                plan,
                plan.chooser.measured(SPEEDS),
                self.exchange,
                [self.exchange],
                self.member,
                self._row_counts,
                limit_s=FOREVER_S,
            )
        self.member.on(Lost, self._on_lost)

    def _note(self, clock: int, tensors: Collection[int]) -> None:
        contents = self.slots.contents()
        numbers = range(len(contents))
        self.updates.append(tuple(contents[t] if t in tensors else None for t in numbers))

    def _row_counts(self) -> list[int]:
        rows = (self._compact[unit] for unit in self.stage.plan.choices())
        return [0 if own is None else len(own.first) for own in rows]

    def _on_lost(self, message: Message[Lost]) -> None:
        if message.body.rank != self.rank:
            self.exchange.lose(message.body.rank)
            for server in self.stage.servers:
                self.member.send(server.member.name, RouteUpdated(message.body.rank))

    @property
    def here(self) -> bool:
        """True if it acts now."""
        return not self.conduct.away_at <= self.stage.clock.now < self.conduct.back_at

    @property
    def dead(self) -> bool:
        """True if it will never act again."""
        return not self.here and self.conduct.back_at == math.inf

    def owed(self) -> Owed:
        """Return what its codecs hold back, by tensor."""
        plan, exchange = self.stage.plan, self.exchange
        return owed_by(plan, plan.chunks, lambda index: exchange.memories(plan.chunks[index]))

    def held_memories(self, chunk: int) -> Sequence[Any]:
        """Return what its codecs hold back of the results of a chunk that it holds."""
        return self.exchange.held_memories(self.stage.plan.chunks[chunk])

    def last(self) -> Tensors:
        """Return its tensors at the end."""
        self.driver.refresh()
        return self._has()

    def _has(self) -> Tensors:
        """Return the results of the round if all make every round, else all current tensors."""
        return self.slots.results() if self.delivers_every_result else self.slots.contents()

    def train(self) -> Iterator[bool]:
        while True:
            while (round_ := self._next_round()) is None:
                yield False
            if round_ >= self.rounds or len(self.steps) >= self.conduct.steps:
                break
            self.driver.refresh()
            yield from self._forward()
            had = tuple(self._read[tensor] for tensor in range(len(self._read)))
            yield from self._backward(round_, had)
        yield from self._forward()
        while isinstance(self.exchange, UpdateStream) and not self._drained():
            yield False
        if not self.delivers_every_result:
            while not self._drained():
                yield False
            self.stage.retire(self.rank, self.member.name)

    def _next_round(self) -> int | None:
        """Return the round that this worker makes next; None if it is not known yet."""
        if not self.stage.plan.counts_rounds:
            return len(self.steps)
        try:
            return self.exchange.open_round()
        except WaitLimit:
            return None

    def _forward(self) -> Iterator[bool]:
        """Use the tensors layer by layer, as results are needed."""
        specs = self.stage.plan.specs
        for tensor in sorted(range(len(specs)), key=lambda t: specs[t].order):
            while not self._await(tensor):
                yield False
            self._read[tensor] = self._has()[tensor]
            yield True

    def _await(self, tensor: int) -> bool:
        return self._could(lambda: self.driver.wait([tensor]))

    def _drained(self) -> bool:
        return self._could(self.exchange.drain)

    def _decided(self) -> bool:
        """Return whether it is decided which layers are sent in compact form in this step."""
        choices = self.choices
        return choices is None or (self._could(choices.begin_step) and self._could(choices.decide))

    def _could(self, act: Callable[[], None]) -> bool:
        """Call ``act``; return False if it would have to wait for messages."""
        try:
            act()
        except WaitLimit:
            return False
        return True

    def _backward(self, round_: int, had: Tensors) -> Iterator[bool]:
        specs, fragments = self.stage.plan.specs, self.stage.plan.fragments
        due = fragments[round_ % len(fragments)]
        by_tensor = dict.fromkeys(range(len(specs)), None) | {
            t: self.contribute(self.rank, round_, t) for t in due
        }
        self._compact = {unit: self.rows(self.rank, round_, unit) for unit in self._layers}
        for unit, rows in self._compact.items():
            assert unit.layer is not None
            gradients = {} if rows is None else dense(self.stage.plan, unit.layer, rows)
            by_tensor |= {tensor: gradients.get(tensor) for tensor in unit.tensors}
        given = tuple(by_tensor[t] for t in range(len(specs)))
        self.driver.resume(len(self.steps))
        compact = list(self._compact)
        if self.choices is not None:
            while not self._decided():
                yield False
            compact = [unit for unit in compact if self.choices.takes(unit.index)]
        self.steps.append(Step(round_, had, given))
        self.slots.begin(given)
        chosen = {t for unit in compact for t in unit.tensors} if self.choices else set()
        used = [t for t in range(len(specs)) if given[t] is not None and t not in chosen]
        if self.stage.plan.schedule.leaves_during_backward:
            for tensor in sorted(used, key=lambda t: -specs[t].order):
                self.driver.ready(tensor)
                yield True
        for unit in compact:
            send(self.exchange, unit, self._compact[unit], early=self._leaves_early(unit, round_))
            yield True
        if len(fragments) > 1:
            self.exchange.skip_round(set(range(len(specs))) - set(due))
        self.driver.flush()
        if self.choices is not None:
            self.choices.end_exchange()
        yield True

    def _leaves_early(self, unit: Unit, round_: int) -> bool:
        """Return whether X is sent in the forward pass: in every second step."""
        factors = unit.layer is not None and unit.layer.form == "factors"
        return factors and (self.rank + round_) % 2 == 0
