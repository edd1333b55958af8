"""Choose which layers are sent in compact form: all workers apply one rule to rank 0's batches.

The first step decides by its own batch. After every ``PERIOD`` steps the rule is applied again, to
the median batch of the period. Rank 0 sends that at the end of the period's last step, so a short
last batch of an epoch changes nothing, and no worker waits for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

from slipstream.codecs import LayerCodec
from slipstream.errors import FrameRefused
from slipstream.plan import Plan, shape_of
from slipstream.planning.choosing import AnyChooser, Verdict
from slipstream.runtime.exchange.channel import Channel, LayerChannel
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Message
from slipstream.transports.wire import Rows as RowsBody
from slipstream.types import Layer, Unit

PERIOD = 8  # steps between two choices


class LayerChoices:
    """The choice between a layer's compact form and its dense route.

    Args:
        chooser: The rule; its speeds are known.
        links: The channel that sends compact forms.
        dense: All channels; those with a layer's dense route skip it while it is sent compact.
        rows: How many rows each layer's gradient has here in this step, in the order of ``units``.

    Attributes:
        verdicts: The choices of ``units``; empty until the first gradient of the first step.
    """

    def __init__(
        self,
        plan: Plan,
        chooser: AnyChooser,
        links: LayerChannel,
        dense: Sequence[Channel],
        member: Endpoint,
        rows: Callable[[], list[int]],
        *,
        limit_s: float,
    ) -> None:
        self.units = plan.choices()
        self.verdicts: tuple[Verdict, ...] = ()
        self.chooser = chooser
        self._plan, self._ways = plan, plan.ways()
        self._links, self._dense = links, tuple(dense)
        self._member, self._current_rows, self._limit_s = member, rows, limit_s
        self._place = {unit.index: place for place, unit in enumerate(self.units)}
        self._num_choices = 0
        self._period: list[list[int]] = []  # by step, the rows of each layer
        self._next_rows: list[int] | None = None  # rank 0's, for the next choice
        self._rows = [0] * len(self.units)
        links.travel_compact(())
        member.on(RowsBody, self._on_rows)

    def is_compact(self, unit: int) -> bool | None:
        """Whether this layer is sent in compact form in this step; None: not decided yet."""
        return self.verdicts[self._place[unit]].compact if self.verdicts else None

    def takes(self, unit: int) -> bool:
        """Whether this layer is sent in compact form in this step."""
        self.decide()
        return self.verdicts[self._place[unit]].compact

    def decide(self) -> None:
        """Make the first choice, by the first step's batch, before any gradient is sent."""
        if not self.verdicts:
            self._send_rows(self._current_rows())
            self._choose()

    def end_exchange(self) -> None:
        """Count this step's batch for the next choice; rank 0 sends it after a period."""
        self._period.append(self._current_rows())
        if len(self._period) == PERIOD:
            by_layer = zip(*self._period, strict=True)
            self._send_rows([median_low([n for n in rows if n] or [0]) for rows in by_layer])

    def begin_step(self) -> None:
        """Choose again if a period has ended."""
        if len(self._period) == PERIOD:
            self._choose()
            self._period.clear()

    def _send_rows(self, rows: list[int]) -> None:
        if self._member.name == HUB and self._next_rows is None:
            self._next_rows = rows
            for rank in range(1, self._plan.cluster.ranks):
                body = RowsBody(self._num_choices, rows)
                self._member.send(f"rank {rank}", body, priority=CONTROL)

    def _choose(self) -> None:
        self._member.wait_until(
            lambda: self._next_rows is not None,
            what="the size of rank 0's batches",
            limit_s=self._limit_s,
            missing=lambda: [HUB],
        )
        with self._member.updating():
            new_rows, self._next_rows = self._next_rows or [], None
            self._num_choices += 1
        # A layer that was not used keeps its last choice.
        rows = [new or old for new, old in zip(new_rows, self._rows, strict=True)]
        if self.verdicts and rows == self._rows:
            return
        self._rows = rows
        self.verdicts = tuple(map(self._verdict, self.units, rows))
        compact = [
            u for u, verdict in zip(self.units, self.verdicts, strict=True) if verdict.compact
        ]
        self._links.travel_compact({unit.index for unit in compact})
        skipped = {tensor for unit in compact for tensor in unit.tensors}
        for channel in self._dense:
            channel.skip_round(skipped)

    def _verdict(self, unit: Unit, rows: int) -> Verdict:
        layer, codec = layer_of(unit), self._plan.route(unit).up
        assert isinstance(codec, LayerCodec)
        way = self._ways[layer.weight]
        # Where hosts are the workers, each has the rows of all of its own.
        rows = rows * self._plan.cluster.ranks // self._plan.cluster.workers
        compact_bytes = self._plan.compact_bytes(layer, codec, rows)
        return self.chooser.choose(shape_of(layer), rows, way, compact_bytes=compact_bytes)

    def _on_rows(self, message: Message[RowsBody]) -> None:
        body = message.body
        if message.sender != HUB or len(body.rows) != len(self.units):
            raise FrameRefused(
                f"{len(body.rows)} numbers of rows from {message.sender}: expected "
                f"{len(self.units)} from {HUB}"
            )
        with self._member.updating():
            if body.choice != self._num_choices or self._next_rows is not None:
                raise FrameRefused(
                    f"rows for choice {body.choice}: expected those for choice "
                    f"{self._num_choices + (self._next_rows is not None)}"
                )
            self._next_rows = list(body.rows)


def layer_of(unit: Unit) -> Layer:
    if unit.layer is None:
        raise ValueError(f"unit {unit.index} is no layer")
    return unit.layer
