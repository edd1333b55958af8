"""The holder's half of a round: combine contributions, update, publish the result."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from slipstream._native import mean_into
from slipstream.codecs.residual import Floats, Residual, kept_values
from slipstream.errors import FrameRefused, contribution_of
from slipstream.plan import Plan
from slipstream.runtime.exchange.collector import Collector
from slipstream.runtime.exchange.payloads import Payload
from slipstream.runtime.exchange.payloads.contributions import ClosedRound
from slipstream.transports.wire import Early, Publish, Push, checksum
from slipstream.types import (
    HERE,
    Buffer,
    Chunk,
    EncodeContext,
    Layer,
    Node,
    Rank,
    Segment,
    Settings,
    Unit,
    Values,
)

KEPT_ROUNDS = 1024


class Updater(Protocol):
    """What a holder does with the mean before it publishes a result."""

    def examine(self, settings: Settings | None) -> None:
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
        """Return what to publish: segments that have a mean, or the ``whole`` chunk. ``rate``
        multiplies learning rates."""
        ...

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        """The current content of the whole chunk."""
        ...


class PublishMean:
    """Publish the mean itself; workers update."""

    def examine(self, settings: Settings | None) -> None:
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
class Result:
    """One chunk of a closed round's result, and its receivers; None: all workers."""

    body: Publish
    frames: tuple[Buffer, ...]
    audience: tuple[Rank, ...] | None = None


@dataclass(slots=True)
class Published:
    """State of a unit: the ages of its gradients, its recent results, its residuals."""

    residuals: list[list[Residual | None]]  # by chunk, then by segment
    staleness: Counter[int] = field(default_factory=Counter)
    recent: deque[list[Result]] = field(default_factory=deque)  # by round


class Aggregator:
    """All units that one server holds.

    Args:
        node: The server's number in the plan.
        plan: The decisions for every tensor.
        updater: What becomes of a mean.
        congested: Whether outgoing links are congested.
    """

    def __init__(
        self,
        node: Node,
        plan: Plan,
        updater: Updater,
        congested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.updater = updater
        self.congested = congested
        # The workers of the last rounds; a round has two entries if its units had different
        # workers.
        self.makers: dict[tuple[int, tuple[Rank, ...]], None] = {}
        self.collector = Collector(node, plan)
        self._published = {
            unit.index: Published(self.collector.payload(unit.index).residuals_down())
            for unit in self.collector.units
        }

    # ---- incoming messages

    def early(self, rank: Rank, body: Early, frames: Sequence[Buffer]) -> list[Result]:
        """Take a layer's first matrix before the rest arrives."""
        self.collector.early(rank, body, frames)
        return []

    def push(self, rank: Rank, body: Push, frames: Sequence[Buffer]) -> list[Result]:
        """Take a contribution; returns the results of the rounds that it closes."""
        if body.unit in self._published:
            with contribution_of(self.collector.named(self.plan.units[body.unit])):
                self.updater.examine(body.settings)
        return self.publish(self.collector.push(rank, body, frames))

    def retire(self, rank: Rank) -> list[Result]:
        """A worker has left; returns the results of the rounds that waited for it."""
        return self.publish(self.collector.retire(rank))

    def commit(self, round_: int, ranks: Sequence[Rank]) -> list[Result]:
        """The workers of the open round are decided."""
        return self.publish(self.collector.commit(round_, ranks))

    def serve(self, round_: int, rank: Rank) -> list[Result]:
        """The current weights, for one worker whose contribution was dropped."""
        results = []
        for unit in self.collector.units:
            if self.collector.round(unit.index) != round_ or not round_:
                raise FrameRefused(f"round {round_} is not open")
            for part, chunk in enumerate(unit.chunks):
                now = self.updater.current(chunk)
                result = self._result(unit, part, round_ - 1, HERE, now, (rank,), (rank,))
                results.append(result)
        return results

    def replay(self) -> list[Result]:
        """Results that some worker may lack, where workers must not miss results."""
        rounds = [results for held in self._published.values() for results in held.recent]
        return [result for results in rounds for result in results]

    # ---- queries

    def memories(self, chunk: int) -> Sequence[Floats | None]:
        """By segment of a chunk: the part of its results that was not sent yet; None for codecs
        that always send everything."""
        unit, part = self.plan.places[chunk] if chunk < len(self.plan.places) else (-1, 0)
        if unit not in self._published:
            raise FrameRefused(f"chunk {chunk} is not held here")
        return kept_values(self._published[unit].residuals[part])

    def forget_residuals(self) -> None:
        """Other weights were loaded: what was not sent belongs to those before."""
        for held in self._published.values():
            for residual in (residual for part in held.residuals for residual in part):
                if residual is not None:
                    residual.clear()

    def round(self, unit: Unit) -> int:
        """How many rounds of a unit have closed."""
        return self.collector.round(unit.index)

    def staleness(self) -> dict[str, Counter[int]]:
        """By tensor: how many updates old gradients were when they were applied."""
        by_name: dict[str, Counter[int]] = {}
        for unit in self.collector.units:
            for segment in (s for chunk in unit.chunks for s in chunk.segments):
                spec = self.plan.specs[segment.tensor]
                # Count a tensor's gradient once, though its chunks may differ in age.
                if spec.role == "parameter" and segment.start == 0:
                    known = by_name.setdefault(spec.name, Counter())
                    known.update(self._published[unit.index].staleness)
        return by_name

    # ---- results

    def publish(self, rounds: Sequence[ClosedRound]) -> list[Result]:
        """The results of closed rounds."""
        results = []
        for found in rounds:
            made = self._make(found)
            results += made
            # If a lost worker forwarded results, its receivers lack those that it did not forward.
            relayed = self.plan.route(found.unit).topology.relays
            if self.plan.consistency.goes_on and (relayed or self.plan.delivers_every_result):
                recent = self._published[found.unit.index].recent
                recent.append(made)
                # A worker that lacks one of these has begun at most ``under_way`` rounds more.
                if len(recent) > self.plan.consistency.under_way:
                    recent.popleft()
        return results

    def _make(self, found: ClosedRound) -> list[Result]:
        consistency = self.plan.consistency
        if not consistency.lockstep:
            self._note(found)
        ages = [max(0, found.round - contribution.read) for contribution in found.made]
        self._published[found.unit.index].staleness.update(ages)
        rate = min((consistency.rate(age) for age in ages), default=1.0)
        settings = found.made[0].settings if found.made else None
        whole = not self.plan.delivers_every_result
        ctx = self._context(found)
        audience = found.closed.audience
        results = []
        payload = self.collector.payload(found.unit.index)
        mean = Mean(self.plan, payload)
        payload.combine(found, mean)
        for part, chunk in enumerate(found.unit.chunks[: payload.parts]):
            values = self.updater.apply(chunk, mean.of(chunk), settings, rate=rate, whole=whole)
            results.append(
                self._result(
                    found.unit, part, found.round, ctx, values, audience, found.closed.dropped
                )
            )
        return results

    def _context(self, found: ClosedRound) -> EncodeContext:
        """The clock is the training step: after a checkpoint, rounds restart at 0, steps do not."""
        workers = self.plan.cluster.ranks
        if not found.made:
            return EncodeContext(workers=workers)
        clock = 1 + max(contribution.step for contribution in found.made)
        rate = min(contribution.rate for contribution in found.made)
        return EncodeContext(clock, rate, self.congested(), workers)

    def _note(self, found: ClosedRound) -> None:
        self.makers[found.round, found.ranks] = None
        if len(self.makers) > KEPT_ROUNDS:
            del self.makers[next(iter(self.makers))]

    def _result(
        self,
        unit: Unit,
        part: int,
        round_: int,
        ctx: EncodeContext,
        values: Sequence[Values | None],
        audience: tuple[Rank, ...] | None,
        dropped: tuple[Rank, ...],
    ) -> Result:
        residuals = self._published[unit.index].residuals[part]
        frames, counts = self.collector.payload(unit.index).answer(part, values, residuals, ctx)
        body = Publish(unit.index, part, round_, counts, checksum(frames), list(dropped))
        return Result(body, tuple(frames), audience)


class Mean:
    """Memory for the mean of one unit, at its holder; implements ``Sinks``."""

    def __init__(self, plan: Plan, payload: Payload) -> None:
        self.math = LayerGradients(plan)
        self.takes_values = payload.down is not None
        self._unit = payload.unit
        self._flat: Values | None = None
        self._used = 0  # values of it
        self._found: dict[int, tuple[int, Values]] = {}  # by tensor: the start of its place

    def sink(self, place: Segment) -> Values:
        if self._flat is None:
            numel = sum(each.numel for each in self._unit.places)
            self._flat = Values.empty(numel, self._unit.chunks[0].dtype)
        values = self._flat.part(self._used, self._used + place.numel)
        self._used += place.numel
        self._found[place.tensor] = place.start, values
        return values

    def in_precision(self, layer: Layer) -> Layer:
        """A dtype that numpy can multiply: it has no bfloat16, and rounds float16 at every
        addition."""
        return layer if layer.dtype == "float64" else replace(layer, dtype="float32")

    def leave_out(self, place: Segment) -> None:
        self._found.pop(place.tensor, None)

    def of(self, chunk: Chunk) -> list[Values | None]:
        """The mean of a chunk's segments; None where nobody has contributed."""
        return [self._at(segment) for segment in chunk.segments]

    def _at(self, segment: Segment) -> Values | None:
        if segment.tensor in self.math.flat:
            return self.math.flat[segment.tensor].part(segment.start, segment.stop)
        if segment.tensor not in self._found:
            return None
        start, values = self._found[segment.tensor]
        return values.part(segment.start - start, segment.stop - start)


class LayerGradients:
    """A layer's mean gradient in numpy, by tensor; implements ``LayerMath`` for one round."""

    def __init__(self, plan: Plan) -> None:
        self.flat: dict[int, Values] = {}
        self._specs = plan.specs

    def multiply(self, layer: Layer, dy: Values, x: Values, rows: int, share: float) -> None:
        kind = np.dtype(layer.dtype)
        given = dy.data.view(kind).reshape(rows, layer.outputs) * kind.type(share)
        weight = np.matmul(given.T, x.data.view(kind).reshape(rows, layer.inputs))
        self._keep(layer.weight, weight.T if layer.transposed else weight)
        if layer.bias is not None:
            self._keep(layer.bias, given.sum(axis=0))

    def add_rows(self, layer: Layer, ids: Values, values: Values, rows: int, share: float) -> None:
        kind = np.dtype(layer.dtype)
        table = np.zeros((layer.outputs, layer.inputs), kind)
        given = values.data.view(kind).reshape(rows, layer.inputs) * kind.type(share)
        np.add.at(table, ids.data.view(np.int64), given)
        self._keep(layer.weight, table)

    def _keep(self, tensor: int, values: np.ndarray[Any, Any]) -> None:
        flat, dtype = np.ascontiguousarray(values).reshape(-1), self._specs[tensor].dtype
        out = self.flat[tensor] = Values.empty(flat.size, dtype)
        mean_into(out.data, [flat.view(np.uint8)], flat.dtype.name, 1.0, out_dtype=dtype)
