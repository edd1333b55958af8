"""What a codec does with one segment of one tensor on one link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.types import Buffer, Hop, Spec, Values


class Codec(Protocol):
    """Turns values into wire frames and back; ``frames`` is how many a segment takes.

    What a codec has to remember (a residual, say) belongs to one segment on one link: whoever
    encodes there keeps what ``init`` gives and hands it back with every ``encode``.
    """

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

    def init(self, numel: int, dtype: str) -> Any:
        """The memory of one segment on one link; None if there is nothing to remember."""
        ...

    def encode(self, values: Values, memory: Any, hop: Hop) -> tuple[Buffer, ...]: ...

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        """Raise FrameRefused unless the frames can be decoded into ``numel`` values."""
        ...

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        """Sum contributions in the order given, divide, and write the result."""
        ...

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None: ...
