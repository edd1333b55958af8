"""Contributions to the units that one node holds, until a round of them closes.

A collector reacts to messages and does no I/O, so servers, workers of a mesh and simulations run
the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.consistency import RoundLedger
from slipstream.consistency.ledgers import DecidedLedger
from slipstream.errors import FrameRefused, RuntimeFault, contribution_of
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads import Payload, payload_of
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Contribution, Group
from slipstream.transports.wire import Early, Push, checksum
from slipstream.types import Buffer, Node, Rank, Unit


@dataclass(slots=True)
class Held:
    """A unit's ledger, and what has arrived for its open round and for later ones."""

    payload: Payload
    ledger: RoundLedger
    arrived: dict[tuple[int, Rank], Contribution] = field(default_factory=dict)
    early: dict[tuple[int, Rank], Sequence[Buffer]] = field(default_factory=dict)
    last: dict[Rank, int] = field(default_factory=dict)  # the round of its last contribution


class Collector:
    """All units that one node holds."""

    def __init__(self, node: Node, plan: Plan) -> None:
        self.plan = plan
        workers = plan.cluster.workers
        self._held = {
            unit.index: Held(payload_of(plan, unit), plan.consistency.ledger(workers))
            for unit in plan.held_by(node)
        }
        self._parts: dict[Rank, tuple[int, int]] = {}  # last round, units arrived
        self._whole: list[tuple[int, Rank]] = []

    @property
    def units(self) -> list[Unit]:
        return [held.payload.unit for held in self._held.values()]

    def payload(self, unit: int) -> Payload:
        """The form of a unit's contributions and results."""
        return self._held[unit].payload

    def round(self, unit: int) -> int:
        """How many rounds of a unit have closed."""
        return self._held[unit].ledger.round

    def early(self, rank: Rank, body: Early, frames: Sequence[Buffer]) -> None:
        """Take a layer's first matrix before the rest arrives."""
        held = self._find(rank, body.unit)
        if not held.payload.takes_early:
            raise FrameRefused(f"unit {body.unit} has no matrix that leaves early")
        if self._came_too_late(held, body.round):
            return
        # Only where late contributions count, a message may name a closed round.
        is_over = body.round < held.ledger.round and not self.plan.consistency.admit.counts_late
        if is_over or body.round - held.ledger.round > self._most_ahead:
            raise FrameRefused(f"round {body.round} while round {held.ledger.round} is open")
        others = [key for key in held.early if key[1] == rank]
        if (body.round, rank) in others or len(others) > self._most_ahead:
            raise FrameRefused(f"rank {rank} sent its inputs twice for round {body.round}")
        with contribution_of(self.named(held.payload.unit)):
            if checksum(frames) != body.crc:
                raise FrameRefused("its checksum does not match its bytes")
            held.payload.examine_early(frames)
        held.early[body.round, rank] = frames

    def push(self, rank: Rank, body: Push, frames: Sequence[Buffer]) -> list[ClosedRound]:
        """Take a contribution; returns the rounds that it closes."""
        held = self._find(rank, body.unit)
        # Where late contributions are accepted, the ledger cannot detect a duplicate.
        if self.plan.counts_rounds and body.round <= held.last.get(rank, -1):
            raise FrameRefused(f"rank {rank} contributed twice to round {body.round}")
        with contribution_of(self.named(held.payload.unit)):
            if checksum(frames) != body.crc:
                raise FrameRefused(f"checksum of unit {body.unit} does not match its bytes")
            places = self._examine(held, rank, body, frames)
            # A worker has made at most one contribution to each round up to this one.
            covers = body.round + 1 if self.plan.weighs_late else 1
            examine_weights(body, self.plan.cluster.ranks * covers)
        if body.read > body.round:
            raise FrameRefused(f"a gradient of round {body.round} from weights of {body.read}")
        counts = held.ledger.arrive(rank, body.round)
        held.last[rank] = body.round
        if counts:
            held.arrived[body.round, rank] = Contribution(
                body.step, body.read, places, body.settings, body.rate, body.weights
            )
        self._count_part(body.round, rank)
        return self._close(held)

    def retire(self, rank: Rank) -> list[ClosedRound]:
        """A worker has left; returns the rounds that waited for it."""
        closed = []
        for held in self._held.values():
            held.ledger.retire(rank)
            closed += self._close(held)
        return closed

    def commit(self, round_: int, ranks: Sequence[Rank]) -> list[ClosedRound]:
        """The workers of the open round are decided."""
        closed = []
        for held in self._held.values():
            if not isinstance(held.ledger, DecidedLedger) or held.ledger.round != round_:
                raise FrameRefused(f"a decision on round {round_}")
            held.ledger.decide(tuple(ranks))
            closed += self._close(held)
        return closed

    def whole(self) -> list[tuple[int, Rank]]:
        """Rounds and workers whose contributions have become complete since the last call."""
        whole, self._whole = self._whole, []
        return whole

    def _came_too_late(self, held: Held, round_: int) -> bool:
        """Whether the round has closed without the sender; its contribution is then dropped."""
        return self.plan.consistency.drops_late and round_ < held.ledger.round

    @property
    def _most_ahead(self) -> int:
        """On a mesh a peer may close rounds before this node does; see ``AllLedger.arrive``."""
        return 2 * self.plan.consistency.under_way - 1

    def _find(self, rank: Rank, unit: int) -> Held:
        held = self._held.get(unit)
        if held is None:
            raise FrameRefused(f"unit {unit} is not held here")
        if not 0 <= rank < self.plan.cluster.workers:
            raise FrameRefused(f"node {rank} is no worker")
        return held

    def named(self, unit: Unit) -> str:
        if unit.layer is not None:
            return f"layer {unit.layer.name!r}"
        names = [self.plan.specs[tensor].name for tensor in unit.tensors]
        return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def _examine(
        self, held: Held, rank: Rank, body: Push, frames: Sequence[Buffer]
    ) -> tuple[Group, ...]:
        early = held.early.pop((body.round, rank), None)
        if self._came_too_late(held, body.round) and held.payload.takes_early:
            return (None,)  # its first matrix was dropped
        if body.early and early is None:
            raise FrameRefused(f"rank {rank} counts on inputs that it never sent")
        return held.payload.examine(body, frames, early if body.early else None)

    def _count_part(self, round_: int, rank: Rank) -> None:
        if not self.plan.consistency.agreed:
            return
        known, units = self._parts.get(rank, (round_, 0))
        units = units + 1 if known == round_ else 1
        self._parts[rank] = (round_, units)
        if units == len(self._held):
            self._whole.append((round_, rank))

    def _close(self, held: Held) -> list[ClosedRound]:
        rounds = []
        while (closed := held.ledger.close()) is not None:
            made = tuple(held.arrived.pop(key) for key in closed.contributions)
            found = ClosedRound(held.payload.unit, held.ledger.round - 1, closed, made)
            if self.plan.consistency.lockstep:
                agree_on_step(self.plan, dict(zip(found.ranks, made, strict=True)))
            rounds.append(found)
            if self.plan.consistency.drops_late:
                held.arrived.clear()  # contributions that do not count
            for key in [key for key in held.early if self._came_too_late(held, key[0])]:
                del held.early[key]
        return rounds


def examine_weights(body: Push, most: int) -> None:
    """FrameRefused unless each segment may be the sum of so many contributions."""
    fit = len(body.weights) == len(body.counts) and all(1 <= w <= most for w in body.weights)
    if body.weights and not fit:
        raise FrameRefused(f"weights {body.weights[:8]} of {len(body.counts)} segments")


def agree_on_step(plan: Plan, arrived: Mapping[Rank, Contribution]) -> None:
    """All contributions to a round must come from the same step of the training loop."""
    steps = {rank: contribution.step for rank, contribution in arrived.items()}
    settings = [contribution.settings for contribution in arrived.values()]
    if any(other != settings[0] for other in settings):
        raise different_settings()
    if len(set(steps.values())) > 1:
        raise different_steps(
            f"{plan.cluster.name(r)} at step {s}" for r, s in sorted(steps.items())
        )


def different_settings() -> RuntimeFault:
    return RuntimeFault(
        "workers have different optimizer settings (a learning rate that follows a worker's own "
        "loss?): every worker must set the same"
    )


def different_steps(told: Iterable[str]) -> RuntimeFault:
    return RuntimeFault(
        f"workers ran different numbers of backward passes: {', '.join(told)}; every worker must "
        "call backward() equally often a step (use job.accumulate() for passes that only add up)"
    )
