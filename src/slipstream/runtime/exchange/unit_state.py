"""One worker's state of one unit: rounds begun, results, residuals, messages in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.codecs import Codec, Residual
from slipstream.codecs.residual import Floats, kept_values
from slipstream.consistency import Progress
from slipstream.plan import Plan
from slipstream.routes import Route
from slipstream.runtime.exchange.payloads import Payload, payload_of
from slipstream.runtime.exchange.payloads.contributions import ClosedRound
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Publish
from slipstream.types import Buffer, Chunk, Rank, Unit

Parts = dict[int, tuple[Publish, Sequence[Buffer]]]


@dataclass(slots=True, eq=False)
class Answer:
    """The result of one round of a unit: what a holder published, chunk by chunk, or on a mesh the
    contributions of all workers."""

    round: int
    parts: Parts = field(default_factory=dict)
    closed: ClosedRound | None = None

    def complete(self, parts: int) -> bool:
        return self.closed is not None or len(self.parts) == parts

    def dropped(self, rank: Rank) -> bool:
        return any(rank in body.dropped for body, _ in self.parts.values())


@dataclass(slots=True, eq=False)
class UnitState:
    """This worker's state of one unit."""

    unit: Unit
    route: Route
    payload: Payload  # the form of its contributions and results
    residuals: list[Residual | None]  # by place
    unready: int
    begun: int = 0  # contributions made
    committed: int = 0  # results written
    seen: dict[int, int] = field(default_factory=dict)  # by part: results received
    answers: dict[int, Answer] = field(default_factory=dict)  # by round
    leaving: list[Ticket] = field(default_factory=list)
    pushed: bool = False  # in this step
    sent: tuple[Sequence[Buffer] | None, ...] = ()  # the last contribution, while it may return
    sent_by: Codec | None = None
    covered: list[int] = field(default_factory=list)  # by place: rounds that the next one is of
    loans: dict[int, list[Loan]] = field(default_factory=dict)  # by round
    ahead_for: int = -1  # the round for which a first matrix was sent early

    @property
    def progress(self) -> Progress:
        return Progress(self.begun, self.committed)

    @property
    def newest(self) -> Answer | None:
        """The newest answer of which all has come."""
        complete = [a for a in list(self.answers.values()) if a.complete(self.payload.parts)]
        return max(complete, key=lambda answer: answer.round, default=None)

    @property
    def on_mesh(self) -> bool:
        return not self.route.topology.needs_servers

    def kept(self, chunk: Chunk) -> list[Floats | None]:
        """By segment of one of the unit's chunks: what was not sent yet, itself and no copy."""
        if len(self.unit.chunks) == 1:
            return kept_values(self.residuals)
        by_tensor = dict(zip(self.unit.tensors, self.residuals, strict=True))  # each is whole
        whole = [(segment, by_tensor[segment.tensor]) for segment in chunk.segments]
        return [None if r is None else r.values[s.start : s.stop] for s, r in whole]

    def release(self, upto: int) -> None:
        """This worker no longer needs its matrices of these rounds."""
        for round_ in [r for r in self.loans if r <= upto]:
            for loan in self.loans.pop(round_):
                loan.release()

    def answered(self, *, dropped: bool) -> None:
        """The contribution has counted; or it was dropped: its content returns to the residuals."""
        for place, (residual, frames) in enumerate(zip(self.residuals, self.sent, strict=False)):
            if self.sent_by is None or residual is None or frames is None:
                continue
            if dropped:
                residual.put_back(self.sent_by, frames)
            self.covered[place] = self.covered[place] + 1 if dropped else 1
        self.sent, self.sent_by = (), None


def fresh(unit: Unit, plan: Plan) -> UnitState:
    """Before the first round."""
    payload = payload_of(plan, unit)
    residuals = payload.residuals()
    return UnitState(
        unit,
        plan.route(unit),
        payload,
        residuals,
        unready=len(unit.tensors),
        covered=[1] * len(residuals),
    )
