"""A server that takes layers' factors and hands out dense mean gradients (Project Adam's way)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.codecs import CompactWire
from slipstream.errors import FrameRefused, RuntimeFault, contribution_of
from slipstream.planning.costs import LayerShape
from slipstream.planning.table import shapes_of
from slipstream.runtime.holder import Result
from slipstream.strategy import Plan
from slipstream.transports.wire import Compact, Publish, checksum
from slipstream.types import Buffer, Chunk, Node, Rank

Matrix = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class HeldLayer:
    """One layer: its chunks here, its open round, and what has arrived for it."""

    shape: LayerShape
    chunks: tuple[Chunk, ...]
    round: int = 0
    arrived: dict[Rank, tuple[Compact, Sequence[Buffer]]] = field(default_factory=dict)
    weight: Matrix | None = None


class FactorHolder:
    """All layers that one server holds whole.

    The dense gradient's memory is reused: no worker sends factors of the next round before it has
    all of this one's gradient.
    """

    def __init__(self, node: Node, plan: Plan) -> None:
        self._plan = plan
        held = plan.held_by(node)
        layer_of = [spec.layer for spec in plan.specs]
        self._layers = [
            HeldLayer(shape, tuple(c for c in held if layer_of[c.segments[0].tensor] == name))
            for name, shape in shapes_of(plan.specs).items()
        ]

    def push(self, rank: Rank, body: Compact, frames: Sequence[Buffer]) -> list[Result]:
        """Take one worker's factors; the layer's gradient, chunk by chunk, when all are in."""
        layer = self._layers[body.layer] if body.layer < len(self._layers) else None
        if layer is None or not layer.chunks:
            raise FrameRefused(f"layer {body.layer} is not held here")
        if not 0 <= rank < self._plan.cluster.workers:
            raise FrameRefused(f"node {rank} is no worker")
        if body.round != layer.round or rank in layer.arrived:
            raise FrameRefused(f"round {body.round} of layer {body.layer} from rank {rank}")
        with contribution_of(f"layer {layer.shape.name!r}"):
            self._examine(layer, body, frames)
        layer.arrived[rank] = (body, frames)
        if len(layer.arrived) < self._plan.cluster.workers:
            return []
        return self._close(layer)

    def _examine(self, layer: HeldLayer, body: Compact, frames: Sequence[Buffer]) -> None:
        if any(dtype not in ("", "float32") for dtype in body.dtypes):
            raise FrameRefused("factors for a server come in fp32")
        CompactWire().examine(layer.shape, body.present, body.rows, body.dtypes, frames)
        if checksum(frames) != body.crc:
            raise FrameRefused("its checksum does not match its bytes")

    def _close(self, layer: HeldLayer) -> list[Result]:
        arrived, layer.arrived = layer.arrived, {}
        if len({body.step for body, _ in arrived.values()}) > 1:
            told = ", ".join(f"rank {r} at step {b.step}" for r, (b, _) in sorted(arrived.items()))
            raise RuntimeFault(
                f"workers ran different numbers of backward passes: {told}; every worker must call "
                "backward() equally often a step (use job.accumulate() for passes that only add up)"
            )
        used = [arrived[rank] for rank in sorted(arrived) if arrived[rank][0].present]
        flats = self._gradients(layer, used) if used else {}
        results = [self._result(chunk, layer.round, flats) for chunk in layer.chunks]
        layer.round += 1
        return results

    def _gradients(
        self, layer: HeldLayer, used: Sequence[tuple[Compact, Sequence[Buffer]]]
    ) -> dict[bool, Matrix]:
        """The flat mean gradients of the weight (True) and of the bias (False)."""
        shape = layer.shape
        pairs = [matrices(shape, body.rows, frames) for body, frames in used]
        x = np.concatenate([pair[0] for pair in pairs])
        dy = np.concatenate([pair[1] for pair in pairs]) / np.float32(self._plan.cluster.workers)
        if layer.weight is None:
            layer.weight = np.empty((shape.outputs, shape.inputs), np.float32)
        np.matmul(dy.T, x, out=layer.weight)
        return {True: layer.weight.reshape(-1), False: dy.sum(axis=0)}

    def _result(self, chunk: Chunk, round_: int, flats: dict[bool, Matrix]) -> Result:
        frames: list[Buffer] = []
        if flats:
            for segment in chunk.segments:
                is_weight = len(self._plan.specs[segment.tensor].shape) == 2
                values = flats[is_weight][segment.start : segment.stop]
                frames.append(values.view(np.uint8))
        present = bytes([bool(flats)]) * len(chunk.segments)
        return Result(Publish(chunk.index, round_, present, checksum(frames)), tuple(frames))


def matrices(shape: LayerShape, rows: int, frames: Sequence[Buffer]) -> tuple[Matrix, Matrix]:
    """X and dY from their frames, which have been examined."""
    count = CompactWire.frames_for(rows, shape.inputs * shape.item_bytes)
    parts = []
    for mine, width in ((frames[:count], shape.inputs), (frames[count:], shape.outputs)):
        flat = np.concatenate([np.frombuffer(f, np.float32) for f in mine] or [np.empty(0, "f4")])
        parts.append(flat.reshape(rows, width))
    return parts[0], parts[1]
