"""Which layers are sent in compact form in this step: every worker applies one rule to one batch.

The batch is rank 0's in the step before (in the first step: in this one), so that all workers
make the same choice without a round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class LayerChoices:
    """The choice between a layer's compact form and its dense route in each step.

    Args:
        chooser: The rule; its speeds are known.
        links: The channel that sends compact forms.
        dense: All channels; those with a layer's dense route skip it while it is sent compact.
        rows: How many rows each layer's gradient has here in this step, in the order of ``units``.
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
        self.step = 0
        self.chooser = chooser
        self._plan, self._ways = plan, plan.ways()
        self._links, self._dense = links, tuple(dense)
        self._member, self._rows_now, self._limit_s = member, rows, limit_s
        self._place = {unit.index: place for place, unit in enumerate(self.units)}
        self._decided_for = -1
        self._rows: dict[int, list[int]] = {}
        self._last_rows: list[int] = []
        links.travel_compact(())
        member.on(RowsBody, self._on_rows)

    def takes(self, unit: int) -> bool:
        """Whether this layer is sent in compact form in this step."""
        self.decide()
        return self.verdicts[self._place[unit]].compact

    def is_certain(self, unit: int) -> bool:
        """Whether the forward pass can already rely on the compact form."""
        return self._is_unchanged() and self.verdicts[self._place[unit]].compact

    def is_dense(self, unit: int) -> bool:
        """Whether the forward pass can already rely on the layer's dense route."""
        if not self.verdicts or self.verdicts[self._place[unit]].compact:
            return False
        return self._decided_for == self.step or self._is_unchanged()

    def _is_unchanged(self) -> bool:
        """Whether the rows for the next decision have arrived, and are those of the last one."""
        rows = self._rows.get(self._decided_for)
        return rows is not None and self._with_last(rows) == self._last_rows

    def decide(self) -> None:
        """Decide once per step, before any gradient is sent."""
        if self._decided_for == self.step:
            return
        seen = self._rows_now()
        if self._member.name == HUB:
            self._rows[self.step] = seen
            for rank in range(1, self._plan.cluster.ranks):
                peer = f"rank {rank}"
                self._member.send(peer, RowsBody(self.step, seen), priority=CONTROL)
        wanted = self.step if self._decided_for < 0 else self._decided_for
        self._member.wait_until(
            lambda: wanted in self._rows,
            what=f"rank 0 to say how large its batch was in step {wanted}",
            limit_s=self._limit_s,
            missing=lambda: [HUB],
        )
        # A loaded checkpoint may set the step back: delete only entries that have been used.
        rows = self._rows[wanted] if wanted == self.step else self._rows.pop(wanted)
        if rows != self._last_rows:
            self._choose(rows)
        self._decided_for = self.step

    def _choose(self, rows: Sequence[int]) -> None:
        """A layer that was not used keeps its last choice."""
        self._last_rows = self._with_last(rows)
        self.verdicts = tuple(map(self._verdict, self.units, self._last_rows))
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

    def _with_last(self, rows: Sequence[int]) -> list[int]:
        known = self._last_rows or [0] * len(self.units)
        return [new or old for new, old in zip(rows, known, strict=True)]

    def _on_rows(self, message: Message[RowsBody]) -> None:
        body = message.body
        if message.sender != HUB or len(body.rows) != len(self.units):
            raise FrameRefused("how many rows there are is for rank 0 to say")
        if body.step in self._rows or len(self._rows) > 1:
            raise FrameRefused(f"the rows of step {body.step} out of turn")
        with self._member.updating():
            self._rows[body.step] = list(body.rows)


def layer_of(unit: Unit) -> Layer:
    if unit.layer is None:
        raise ValueError(f"unit {unit.index} is no layer")
    return unit.layer
