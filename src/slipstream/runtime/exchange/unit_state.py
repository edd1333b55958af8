"""One worker's state of one unit: rounds begun, results, residuals, messages in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.codecs import Codec, LayerCodec, Residual
from slipstream.consistency import Progress
from slipstream.routes import Route
from slipstream.runtime.exchange.collector import ClosedRound
from slipstream.runtime.exchange.send_buffers import Loan
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Publish
from slipstream.types import Buffer, Rank, Unit

Parts = dict[int, tuple[Publish, Sequence[Buffer]]]


@dataclass(slots=True, eq=False)
class Answer:
    """The result of one round of a unit: what a holder published, chunk by chunk, or on a mesh the
    contributions of all workers."""

    round: int
    parts: Parts = field(default_factory=dict)
    closed: ClosedRound | None = None

    def complete(self, unit: Unit) -> bool:
        return self.closed is not None or len(self.parts) == len(unit.chunks)

    def dropped(self, rank: Rank) -> bool:
        return any(rank in body.dropped for body, _ in self.parts.values())


@dataclass(slots=True, eq=False)
class UnitState:
    """This worker's state of one unit."""

    unit: Unit
    route: Route
    codec: Codec | None  # of contributions, by segment; None for a layer
    residuals: list[Residual | None]  # by segment
    unready: int
    begun: int = 0  # contributions made
    committed: int = 0  # results written
    seen: dict[int, int] = field(default_factory=dict)  # by part: results received
    answers: dict[int, Answer] = field(default_factory=dict)  # by round
    leaving: list[Ticket] = field(default_factory=list)
    pushed: bool = False  # in this step
    sent: tuple[Sequence[Buffer] | None, ...] = ()  # the last contribution, while it may be dropped
    loans: dict[int, list[Loan]] = field(default_factory=dict)  # by round
    ahead_for: int = -1  # the round for which a first matrix was sent early

    @property
    def progress(self) -> Progress:
        return Progress(self.begun, self.committed)

    @property
    def newest(self) -> Answer | None:
        """The newest complete answer."""
        complete = [a for a in list(self.answers.values()) if a.complete(self.unit)]
        return max(complete, key=lambda answer: answer.round, default=None)

    @property
    def on_mesh(self) -> bool:
        return not self.route.topology.needs_servers

    def release(self, upto: int) -> None:
        """This worker no longer needs its matrices of these rounds."""
        for round_ in [r for r in self.loans if r <= upto]:
            for loan in self.loans.pop(round_):
                loan.release()

    def put_back(self) -> None:
        """The contribution was dropped: add its content back to the residuals."""
        for residual, frames in zip(self.residuals, self.sent, strict=False):
            if self.codec is not None and residual is not None and frames is not None:
                residual.put_back(self.codec, frames)


def fresh(unit: Unit, route: Route) -> UnitState:
    """The state before the first round."""
    codec: Codec | None = None if isinstance(route.up, LayerCodec) else route.up
    segments = [(s.numel, chunk.dtype) for chunk in unit.chunks for s in chunk.segments]
    residuals = [codec.init(*segment) for segment in segments] if codec is not None else []
    return UnitState(unit, route, codec, residuals, unready=len(unit.tensors))
