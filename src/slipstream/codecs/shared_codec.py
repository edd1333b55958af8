"""Codecs whose frames can only be decoded with state that all ends learned in earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from slipstream.codecs.protocol import Codec, Form
from slipstream.codecs.residual import Residual
from slipstream.parts import Part
from slipstream.types import Buffer

Shape = tuple[int, ...]


class RoundCodec(Codec, Protocol):
    """A shared codec with the state of one round. Its frames are linear: they can be added up."""

    def merge(self, contributions: Sequence[Sequence[Buffer]], *, divisor: float) -> Buffer:
        """Return the sum of contributions, in order, divided, as one frame of the same form.

        Raises:
            RuntimeFault: A contribution was encoded with other state than this member's.
        """
        ...


class Agreement(Protocol):
    """State that all ends of one tensor's links share, round by round.

    Every worker and every holder has one. It changes only by ``learn``, with the same arguments.
    """

    def at(self, round_: int) -> RoundCodec:
        """Return the codec of a round's contributions and of its result.

        Raises:
            RuntimeFault: The rounds that it depends on have not been learned.
        """
        ...

    def learn(self, round_: int, merged: Buffer | None) -> None:
        """Learn the merged contributions of a round that is over.

        Args:
            round_: Its number.
            merged: The round's contributions, as ``RoundCodec.merge`` returned them; None if there
                were none.
        """
        ...


class SharedCodec(Part, frozen=True):
    """A codec of whole tensors, whose two ends need the same state to decode each other's frames.

    Holders send each round's merged contributions to all workers: as the result, if the route's
    way down is the same codec, otherwise in addition to it.
    """

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = False

    def init(self, numel: int, dtype: str) -> Residual:
        """Return an empty residual for one tensor on one link."""
        return Residual.zeros(numel, separable=False)

    def agree(self, shape: Shape, *, ahead: int = 1) -> Agreement:
        """Return the state that all ends share before a tensor's first round.

        Args:
            shape: The tensor's shape.
            ahead: How many rounds may be open at a time. What a round teaches is used that many
                rounds later, when every worker has its result.
        """
        raise NotImplementedError

    def examine(self, frame: Buffer, shape: Shape) -> None:
        """Check a frame that was received.

        Raises:
            FrameRefused: The frame is not of a tensor of this shape.
        """
        raise NotImplementedError
