"""Codecs whose frames can be read only with what all ends have learned in earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from slipstream.codecs.protocol import Codec, Form
from slipstream.codecs.residual import Residual
from slipstream.parts import Part
from slipstream.types import Buffer

Shape = tuple[int, ...]


class RoundCodec(Codec, Protocol):
    """A shared codec as it is in one round. Its frames are linear: they can be added up."""

    def merge(self, contributions: Sequence[Sequence[Buffer]], *, divisor: float) -> Buffer:
        """The sum of contributions in the order given, divided, as one frame of the same form.

        Raises:
            RuntimeFault: One of them was made with something else than what is agreed here.
        """
        ...


class Agreement(Protocol):
    """What all ends of one tensor's links know alike, round by round.

    Every worker and every holder has one. It changes only by what all of them are told.
    """

    def at(self, round_: int) -> RoundCodec:
        """How contributions to a round, and its result, are encoded.

        Raises:
            RuntimeFault: What that depends on has not been learned.
        """
        ...

    def learn(self, round_: int, merged: Buffer | None) -> None:
        """A round is over.

        Args:
            round_: Its number.
            merged: The round's contributions, as ``RoundCodec.merge`` returned them; None: there
                were none.
        """
        ...


class SharedCodec(Part, frozen=True):
    """A codec of whole tensors, whose two ends must agree before they can read each other.

    Holders send what a round's contributions amount to, merged, to all workers: as the result, if
    the route's way down is the same codec, and else beside it.
    """

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = False

    def init(self, numel: int, dtype: str) -> Residual:
        """An empty residual for one tensor on one link."""
        return Residual.zeros(numel, separable=False)

    def agree(self, shape: Shape, *, ahead: int = 1) -> Agreement:
        """What all ends know of a tensor before its first round.

        Args:
            shape: The tensor's.
            ahead: How many rounds may be open at a time: what a round teaches is used so many
                rounds later, when every worker has its result.
        """
        raise NotImplementedError

    def examine(self, frame: Buffer, shape: Shape) -> None:
        """Check what came from a link.

        Raises:
            FrameRefused: It is no frame of a tensor of this shape.
        """
        raise NotImplementedError
