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
    """What plans and compatibility rules need to know of any codec."""

    @property
    def name(self) -> str:
        """The name in plans and metrics."""
        ...

    @property
    def form(self) -> Form:
        """What a contribution is: values, or a layer's two matrices."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether the decoded values may differ from the encoded ones."""
        ...

    @property
    def splits(self) -> bool:
        """Whether contributions are cut where chunks are (else a tensor's is one)."""
        ...

    def facts(self) -> Facts:
        """Facts for the compatibility rules."""
        ...

    def obstacle(self, spec: Spec) -> str:
        """Why this codec cannot carry a tensor, and what to use instead; empty if it can."""
        ...

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        """The bytes of a tensor on the wire: once, over one link, one way; on average over rounds.

        Exact where the size does not depend on values, for a tensor that is sent in one piece.
        Where it does, this is the most that values may take, or what the share of them takes that
        travels.

        Args:
            spec: A tensor that this codec can carry.
            workers: How many there are.
            rows: How many rows a worker's batch gives the tensor's layer, for codecs of layers.
        """
        ...


@runtime_checkable
class Codec(AboutCodec, Protocol):
    """Encodes values as wire frames and back; ``frames`` is the number of frames per segment.

    A codec that does not send everything keeps the rest in a ``Residual``, one for each segment on
    each link: the sender keeps the return value of ``init`` and passes it to every ``encode``.
    """

    @property
    def frames(self) -> int: ...

    def init(self, numel: int, dtype: str) -> Residual | None:
        """An empty residual for one segment on one link; None if everything is always sent."""
        ...

    def encode(self, values: Values, residual: Any, ctx: EncodeContext) -> tuple[Buffer, ...]:
        """The frames to send.

        Args:
            values: This time's values; not changed.
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
        """Sum contributions in the order given, divide, and write the result."""
        ...

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        """Decode the frames, as the receiver sees them."""
        ...


def check_nbytes(frame: Buffer, numel: int, expected: int) -> None:
    """Check the size of a frame whose size follows from the number of its values.

    Raises:
        FrameRefused: It has another size.
    """
    actual = memoryview(frame).nbytes
    if actual != expected:
        raise FrameRefused(f"{actual} bytes where {numel} values take {expected}")
