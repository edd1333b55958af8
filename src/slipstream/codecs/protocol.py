"""What a codec does with one segment of one tensor on one link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.types import Buffer, Spec, Values


class Codec(Protocol):
    """Turns values into wire frames and back; ``frames`` is how many a segment takes."""

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> bool:
        """Whether a tensor may be cut into chunks (else it travels whole)."""
        ...

    @property
    def frames(self) -> int: ...

    def check(self, spec: Spec) -> None:
        """Refuse a tensor before start, with the reason."""
        ...

    def encode(self, values: Values) -> tuple[Buffer, ...]: ...

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        """Raise FrameRefused unless the frames can be decoded into ``numel`` values."""
        ...

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        """Sum contributions in the order given, divide, and write the result."""
        ...

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None: ...
