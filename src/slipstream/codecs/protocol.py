"""The interface of codecs: encode one tensor's part of a chunk, or one layer, for one link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from slipstream.codecs.residual import Residual
from slipstream.errors import FrameRefused
from slipstream.parts import Facts
from slipstream.types import Buffer, EncodeContext, Spec, Values

Form = Literal["dense", "factors", "rows"]


class AboutCodec(Protocol):
    """The part of every codec's interface that plans and compatibility rules use."""

    @property
    def name(self) -> str:
        """The name in plans and metrics."""
        ...

    @property
    def form(self) -> Form:
        """The form of a contribution: values, or a layer's two matrices."""
        ...

    @property
    def lossy(self) -> bool:
        """True if the decoded values may differ from the encoded ones."""
        ...

    @property
    def splits(self) -> bool:
        """True if contributions are cut into chunks; False if each tensor's is one piece."""
        ...

    def facts(self) -> Facts:
        """Return facts for the compatibility rules."""
        ...

    def obstacle(self, spec: Spec) -> str:
        """Return why this codec cannot carry a tensor, and what to use instead; empty if it can."""
        ...

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        """Return a tensor's bytes over one link, one way, on average over rounds.

        Exact if the size does not depend on values, for a tensor that is sent in one piece. If it
        does, this is the most that values may take, or the size of the share of them that is sent.

        Args:
            spec: A tensor that this codec can carry.
            workers: The number of workers.
            rows: The rows that a worker's batch gives the tensor's layer, for codecs of layers.
        """
        ...


@runtime_checkable
class Codec(AboutCodec, Protocol):
    """A codec of values to wire frames and back; ``frames`` is their number per segment.

    A codec that does not send everything keeps the rest in a ``Residual``, one for each segment on
    each link: the sender keeps the return value of ``init`` and passes it to every ``encode``.
    """

    @property
    def frames(self) -> int: ...

    def init(self, numel: int, dtype: str) -> Residual | None:
        """Return an empty residual for one segment on one link; None if nothing is kept."""
        ...

    def encode(self, values: Values, residual: Any, ctx: EncodeContext) -> tuple[Buffer, ...]:
        """Return the frames to send.

        Args:
            values: The values of this step; not changed.
            residual: What ``init`` returned; it is changed in place.
            ctx: The clock, the learning rate and the state of the link.
        """
        ...

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        """Check frames that were received.

        Raises:
            FrameRefused: The frames cannot be decoded into ``numel`` values of this dtype.
        """
        ...

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        """Sum contributions in the given order, divide, and write the result."""
        ...

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        """Decode frames as every receiver does."""
        ...


def check_nbytes(frame: Buffer, numel: int, expected: int) -> None:
    """Check the size of a frame whose size follows from the number of its values.

    Raises:
        FrameRefused: It has another size.
    """
    actual = memoryview(frame).nbytes
    if actual != expected:
        raise FrameRefused(f"{actual} bytes where {numel} values take {expected}")
