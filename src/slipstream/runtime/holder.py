"""The holder's half of a round: collect contributions, combine them, hand out the result.

A holder reacts to messages and does no I/O, so servers, mesh workers and simulations run the very
same code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.consistency import Book, Closed
from slipstream.consistency.rounds import AgreedRounds
from slipstream.errors import FrameRefused, RuntimeFault, contribution_of
from slipstream.strategy import Plan
from slipstream.transports.wire import Publish, Push, Settings, checksum
from slipstream.types import HERE, Buffer, Chunk, Hop, Node, Rank, Values

KEPT_ROUNDS = 1024


class Updater(Protocol):
    """What a holder makes of the mean before it publishes."""

    def examine(self, chunk: Chunk, settings: Settings | None) -> None:
        """Raise FrameRefused unless ``apply`` can take these settings."""
        ...

    def apply(
        self,
        chunk: Chunk,
        mean: Sequence[Values | None],
        settings: Settings | None,
        *,
        rate: float = 1.0,
        whole: bool = False,
    ) -> Sequence[Values | None]:
        """What is published: of segments that have a mean, or of the ``whole`` chunk. ``rate``
        multiplies learning rates."""
        ...

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        """All of the chunk as it is now."""
        ...


class PublishMean:
    """The mean itself goes back; workers update."""

    def examine(self, chunk: Chunk, settings: Settings | None) -> None:
        if settings is not None:
            raise FrameRefused("optimizer settings, but workers update")

    def apply(
        self,
        chunk: Chunk,
        mean: Sequence[Values | None],
        settings: Settings | None,
        *,
        rate: float = 1.0,
        whole: bool = False,
    ) -> Sequence[Values | None]:
        return mean

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        raise FrameRefused("weights live at the workers")


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's frames for one chunk, segment by segment; None where it had no gradient."""

    step: int
    read: int
    segments: tuple[Sequence[Buffer] | None, ...]
    settings: Settings | None
    rate: float


@dataclass(slots=True)
class Held:
    """A chunk's book, and what has arrived for its open round and for later ones."""

    book: Book
    arrived: dict[tuple[int, Rank], Contribution] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    recent: deque[Result] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Result:
    """What a closed round sends out, and to whom; None: to everybody."""

    body: Publish
    frames: tuple[Buffer, ...]
    audience: tuple[Rank, ...] | None = None


class Holder:
    """All chunks that one node holds."""

    def __init__(self, node: Node, plan: Plan, updater: Updater) -> None:
        self.plan = plan
        self.updater = updater
        self.narrow: Callable[[], bool] = lambda: False  # whether links out lack bandwidth
        # Who made the last rounds; a round that chunks were made of by others stands twice.
        self.makers: dict[tuple[int, tuple[Rank, ...]], None] = {}
        workers = plan.cluster.workers
        self._held = {c.index: Held(plan.consistency.book(workers)) for c in plan.held_by(node)}
        self._memories = {
            chunk.index: [
                plan.route(chunk).publish.init(s.numel, chunk.dtype) for s in chunk.segments
            ]
            for chunk in plan.held_by(node)
        }
        self._parts: Counter[tuple[int, Rank]] = Counter()  # by round: chunks that have come
        self._whole: list[tuple[int, Rank]] = []

    def push(self, rank: Rank, body: Push, frames: Sequence[Buffer]) -> list[Result]:
        """Take a contribution; the results of the rounds it closes."""
        held = self._held.get(body.chunk)
        if held is None:
            raise FrameRefused(f"chunk {body.chunk} is not held here")
        if not 0 <= rank < self.plan.cluster.workers:
            raise FrameRefused(f"node {rank} is no worker")
        chunk = self.plan.chunks[body.chunk]
        with contribution_of(self._named(chunk)):
            segments = self._examine(chunk, body, frames)
            self.updater.examine(chunk, body.settings)
        if body.read > body.round:
            raise FrameRefused(f"a gradient of round {body.round} from weights of {body.read}")
        if held.book.arrive(rank, body.round):
            held.arrived[body.round, rank] = Contribution(
                body.step, body.read, segments, body.settings, body.rate
            )
        self._count_part(body.round, rank)
        return self._close(chunk, held)

    def _named(self, chunk: Chunk) -> str:
        names = [self.plan.specs[segment.tensor].name for segment in chunk.segments]
        return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

    def _count_part(self, round_: int, rank: Rank) -> None:
        if not self.plan.consistency.agreed:
            return
        self._parts[round_, rank] += 1
        if self._parts[round_, rank] == len(self._held):
            del self._parts[round_, rank]
            self._whole.append((round_, rank))

    def retire(self, rank: Rank) -> list[Result]:
        """A worker has left; the results of the rounds that were waiting for it."""
        results = []
        for index, held in self._held.items():
            held.book.retire(rank)
            results += self._close(self.plan.chunks[index], held)
        return results

    def replay(self) -> list[Result]:
        """Results that some worker may not have yet, where it would miss them."""
        return [result for held in self._held.values() for result in held.recent]

    def whole(self) -> list[tuple[int, Rank]]:
        """Rounds and workers whose contributions have all come since this was last asked."""
        whole, self._whole = self._whole, []
        return whole

    def commit(self, round_: int, ranks: Sequence[Rank]) -> list[Result]:
        """It has been decided who makes the open round."""
        results = []
        for index, held in self._held.items():
            if not isinstance(held.book, AgreedRounds) or held.book.round != round_:
                raise FrameRefused(f"a decision on round {round_}")
            held.book.decide(tuple(ranks))
            results += self._close(self.plan.chunks[index], held)
        return results

    def serve(self, round_: int, rank: Rank) -> list[Result]:
        """Everything as it is, for one worker."""
        results = []
        for index, held in self._held.items():
            if held.book.round != round_ or not round_:
                raise FrameRefused(f"round {round_} is not open")
            chunk = self.plan.chunks[index]
            now = self.updater.current(chunk)
            results.append(self._result(chunk, round_ - 1, HERE, now, (rank,)))
        return results

    def memories(self, index: int) -> Sequence[Any]:
        """What the codec remembers of a chunk's segments, for all who get its results."""
        if index not in self._memories:
            raise FrameRefused(f"chunk {index} is not held here")
        return self._memories[index]

    def round(self, chunk: Chunk) -> int:
        """How many rounds of a chunk have closed."""
        return self._held[chunk.index].book.round

    def staleness(self) -> dict[str, Counter[int]]:
        """By tensor: how many updates old gradients were when they were applied."""
        by_name: dict[str, Counter[int]] = {}
        for index, held in self._held.items():
            for segment in self.plan.chunks[index].segments:
                spec = self.plan.specs[segment.tensor]
                # A tensor's gradient is counted once, though its chunks may differ in age.
                if spec.role == "parameter" and segment.start == 0:
                    by_name.setdefault(spec.name, Counter()).update(held.staleness)
        return by_name

    def _examine(
        self, chunk: Chunk, body: Push, frames: Sequence[Buffer]
    ) -> tuple[Sequence[Buffer] | None, ...]:
        codec = self.plan.route(chunk).push
        groups = split_frames(chunk, body.present, frames, codec.frames)
        for segment, group in zip(chunk.segments, groups, strict=True):
            if group is not None:
                codec.examine(group, segment.numel, chunk.dtype)
        if checksum(frames) != body.crc:
            raise FrameRefused(f"checksum of chunk {chunk.index} does not match its bytes")
        return groups

    def _close(self, chunk: Chunk, held: Held) -> list[Result]:
        results = []
        while (closed := held.book.close()) is not None:
            made = [held.arrived.pop(key) for key in closed.contributions]
            results.append(self._make(chunk, held, closed, made))
            if self.plan.outlives_workers and self.plan.together:
                held.recent.append(results[-1])
                # Whoever lacks one of these has not begun more rounds than may be under way.
                if len(held.recent) > self.plan.consistency.under_way:
                    held.recent.popleft()
            if self.plan.consistency.agreed:
                held.arrived.clear()  # what came and did not make it
        return results

    def _make(
        self, chunk: Chunk, held: Held, closed: Closed, made: Sequence[Contribution]
    ) -> Result:
        """The result of the round that has just closed."""
        consistency = self.plan.consistency
        round_ = held.book.round - 1
        if consistency.lockstep:
            ranks = [rank for _, rank in closed.contributions]
            agree_on_step(self.plan, dict(zip(ranks, made, strict=True)))
        else:
            self._note(round_, closed)
        ages = [max(0, round_ - contribution.read) for contribution in made]
        held.staleness.update(ages)
        means = self._combine(chunk, made, closed.divisor)
        rate = min((consistency.rate(age) for age in ages), default=1.0)
        settings = made[0].settings if made else None
        whole = not self.plan.together
        results = self.updater.apply(chunk, means, settings, rate=rate, whole=whole)
        return self._result(chunk, round_, self._hop(made), results, closed.audience)

    def _hop(self, made: Sequence[Contribution]) -> Hop:
        """Rounds begin anew with a checkpoint, steps go on."""
        if not made:
            return HERE
        clock = 1 + max(contribution.step for contribution in made)
        return Hop(clock, min(contribution.rate for contribution in made), self.narrow())

    def _note(self, round_: int, closed: Closed) -> None:
        ranks = tuple(rank for _, rank in closed.contributions)
        self.makers[round_, ranks] = None
        if len(self.makers) > KEPT_ROUNDS:
            del self.makers[next(iter(self.makers))]

    def _result(
        self,
        chunk: Chunk,
        round_: int,
        hop: Hop,
        values: Sequence[Values | None],
        audience: tuple[Rank, ...] | None,
    ) -> Result:
        codec = self.plan.route(chunk).publish
        frames: list[Buffer] = []
        for each, memory in zip(values, self._memories[chunk.index], strict=True):
            if each is not None:
                frames.extend(codec.encode(each, memory, hop))
        present = bytes(each is not None for each in values)
        body = Publish(chunk.index, round_, present, checksum(frames))
        return Result(body, tuple(frames), audience)

    def _combine(
        self, chunk: Chunk, contributions: Sequence[Contribution], divisor: int
    ) -> tuple[Values | None, ...]:
        codec = self.plan.route(chunk).push
        flat = Values.empty(chunk.numel, chunk.dtype)
        means: list[Values | None] = []
        start = 0
        for i, segment in enumerate(chunk.segments):
            given = [g for c in contributions if (g := c.segments[i]) is not None]
            out = flat.part(start, start + segment.numel)
            start += segment.numel
            if given:
                # Workers without a gradient count as zero; a buffer is averaged over those
                # on which it changed.
                role = self.plan.specs[segment.tensor].role
                codec.combine(given, out, divisor=divisor if role == "parameter" else len(given))
            means.append(out if given else None)
        return tuple(means)


def split_frames(
    chunk: Chunk, present: bytes, frames: Sequence[Buffer], per_segment: int
) -> tuple[Sequence[Buffer] | None, ...]:
    """Frames by segment, or FrameRefused when their number is wrong."""
    if len(present) != len(chunk.segments) or set(present) - {0, 1}:
        raise FrameRefused(f"chunk {chunk.index} has {len(chunk.segments)} segments")
    if len(frames) != sum(present) * per_segment:
        raise FrameRefused(
            f"{len(frames)} frames for {sum(present)} segments of chunk {chunk.index}"
        )
    groups: list[Sequence[Buffer] | None] = []
    used = 0
    for here in present:
        groups.append(frames[used : used + per_segment] if here else None)
        used += per_segment if here else 0
    return tuple(groups)


def agree_on_step(plan: Plan, arrived: Mapping[Rank, Contribution]) -> None:
    """All contributions to a round must come from the same step of the training loop."""
    steps = {rank: contribution.step for rank, contribution in arrived.items()}
    settings = [contribution.settings for contribution in arrived.values()]
    if any(other != settings[0] for other in settings):
        raise RuntimeFault(
            "workers have different optimizer settings (a learning rate that follows a worker's "
            "own loss?): every worker must set the same"
        )
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{plan.cluster.name(r)} at step {s}" for r, s in sorted(steps.items()))
        raise RuntimeFault(
            f"workers ran different numbers of backward passes: {told}; every worker must call "
            "backward() equally often a step (use job.accumulate() for passes that only add up)"
        )
