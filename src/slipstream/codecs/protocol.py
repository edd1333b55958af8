"""What a codec does with one tensor's part in a chunk, or with one layer, on one link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from slipstream.codecs.residual import Residual
from slipstream.errors import FrameRefused
from slipstream.parts import Facts
from slipstream.types import Buffer, EncodeContext, Spec, Values

Form = Literal["dense", "factors", "rows"]


class AboutCodec(Protocol):
    """What plans and rules ask of any codec."""

    @property
    def name(self) -> str:
        """As plans and figures print it."""
        ...

    @property
    def form(self) -> Form:
        """What a contribution is: values, or a layer's two matrices."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether what arrives may differ from what was encoded."""
        ...

    @property
    def splits(self) -> bool:
        """Whether contributions are cut where chunks are (else a tensor's is one)."""
        ...

    def facts(self) -> Facts:
        """What rules about combinations need to know of this codec."""
        ...

    def obstacle(self, spec: Spec) -> str:
        """Why this codec cannot carry a tensor, and the way out; empty if it can."""
        ...


class Codec(AboutCodec, Protocol):
    """Turns values into wire frames and back; ``frames`` is how many a segment takes.

    A codec that does not send everything keeps the rest in a ``Residual``, one for each segment on
    each link: whoever encodes there keeps what ``init`` returns and passes it to every ``encode``.
    """

    @property
    def frames(self) -> int: ...

    def init(self, numel: int, dtype: str) -> Residual | None:
        """An empty residual for one segment on one link; None if everything is always sent."""
        ...

    def encode(self, values: Values, residual: Any, ctx: EncodeContext) -> tuple[Buffer, ...]:
        """The frames to send.

        Args:
            values: This time's values. They are not changed.
            residual: What ``init`` returned; it is changed in place.
            ctx: The clock, the learning rate and the state of the link.
        """
        ...

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        """Check what came from a link.

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
        """What was sent, as the receiver has it."""
        ...


def check_nbytes(frame: Buffer, numel: int, expected: int) -> None:
    """Check the size of a frame whose size follows from the number of its values.

    Raises:
        FrameRefused: It has another one.
    """
    actual = memoryview(frame).nbytes
    if actual != expected:
        raise FrameRefused(f"{actual} bytes where {numel} values take {expected}")
