"""A net for a planner or an emulated device: one row per layer. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from slipstream.errors import ConfigError
from slipstream.types import ITEM_BYTES, Spec

Shape = tuple[int, ...]
Kind = Literal["conv", "fc", "embedding", "other"]
KINDS: tuple[str, ...] = get_args(Kind)

# A layer's backward computes two products, for its weights and for its inputs; forward one.
FORWARD_SHARE = 1 / 3
_NAMES = {3: ("weight", "scale", "shift")}


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters and times of one layer; its weight is the first shape.

    Two shapes are weight and bias; three are a weight and the scale and shift of the batch
    normalisation after it. ``flops`` are those of one sample's forward pass, a multiply-add counted
    as two; 0 if unknown. The times are those of a whole batch.
    """

    name: str
    kind: Kind
    shapes: tuple[Shape, ...]
    flops: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return self.parameters * ITEM_BYTES["float32"]

    @property
    def module(self) -> str:
        """The layer's name as a valid module name."""
        return self.name.replace(".", "/")

    @property
    def named_shapes(self) -> dict[str, Shape]:
        names = _NAMES.get(len(self.shapes), ("weight", "bias"))
        return dict(zip(names, self.shapes, strict=False))

    def slowed(self, times: float) -> Layer:
        return replace(
            self, forward_ms=self.forward_ms * times, backward_ms=self.backward_ms * times
        )


@dataclass(frozen=True, slots=True)
class Table:
    """A net's layers in forward order, with the times of a step of ``batch`` rows.

    ``origin`` gives the source of shapes and times.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int
    origin: str

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)

    @property
    def forward_ms(self) -> float:
        return sum(layer.forward_ms for layer in self.layers)

    @property
    def backward_ms(self) -> float:
        return sum(layer.backward_ms for layer in self.layers)

    @property
    def step_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.batch / self.step_ms

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The tensors for a planner: those that an emulated net of this table has."""
        tensors = [
            (f"{layer.module}.{name}", shape, layer.module if layer.kind == "fc" else "")
            for layer in self.layers
            for name, shape in layer.named_shapes.items()
        ]
        return tuple(
            Spec(name, shape, "float32", order, layer=layer, form="factors" if layer else "")
            for order, (name, shape, layer) in enumerate(tensors)
        )

    def slowed(self, times: float) -> Table:
        """Return the same net on a device that takes ``times`` times as long."""
        if not times > 0:
            raise ConfigError(f"a device cannot be slowed {times:g} times; give a number above 0")
        return replace(self, layers=tuple(layer.slowed(times) for layer in self.layers))

    def at_batch(self, rows: int) -> Table:
        """Return a step of this many rows; the time per row does not change."""
        if rows < 1:
            raise ConfigError(f"a batch of {rows} rows trains nothing; give 1 or more")
        return replace(self.slowed(rows / self.batch), batch=rows)

    def scaled(self, factor: float) -> Table:
        """Return the same step with ``factor`` times the bytes, for machines with less memory.

        Rows M, columns N and batch K each shrink by √factor, so that dense gradients (MN) and
        sufficient factors (K(M+N)) both shrink by ``factor``, while all times stay. If links are
        slowed by ``factor`` too, the ratio of communication and computation does not change.
        """
        if not 0 < factor <= 1:
            raise ConfigError(f"cannot scale {self.name} by {factor:g}; give a factor in (0, 1]")
        side = math.sqrt(factor)
        layers = tuple(
            replace(
                layer,
                shapes=tuple(_shrunk(shape, side) for shape in layer.shapes),
                flops=layer.flops * factor,
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, batch=_at_least_one(self.batch * side))


def _shrunk(shape: Shape, side: float) -> Shape:
    """Return a shape with fewer channels; kernels keep their size."""
    return tuple(
        _at_least_one(size * side) if axis < 2 else size for axis, size in enumerate(shape)
    )


def _at_least_one(size: float) -> int:
    return max(1, round(size))


def conv(
    name: str,
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    size: int,
    *,
    norm: bool = False,
) -> Layer:
    """Return a convolution with outputs of ``size`` × ``size``, and a bias or a normalisation."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    weight = (outputs, inputs, height, width)
    shapes = (weight, (outputs,), (outputs,)) if norm else (weight, (outputs,))
    return Layer(name, "conv", shapes, flops=2.0 * math.prod(weight) * size * size)


def fc(name: str, inputs: int, outputs: int) -> Layer:
    """Return a fully connected layer with a bias."""
    return Layer(name, "fc", ((outputs, inputs), (outputs,)), flops=2.0 * inputs * outputs)


def timed(
    name: str, layers: Sequence[Layer], *, batch: int, images_per_s: float, origin: str
) -> Table:
    """Return a table whose times are proportional to flops, at ``images_per_s`` on one device."""
    ms_per_flop = 1000 * batch / images_per_s / sum(layer.flops for layer in layers)
    return Table(
        name,
        tuple(
            replace(
                layer,
                forward_ms=layer.flops * ms_per_flop * FORWARD_SHARE,
                backward_ms=layer.flops * ms_per_flop * (1 - FORWARD_SHARE),
            )
            for layer in layers
        ),
        batch,
        origin,
    )
