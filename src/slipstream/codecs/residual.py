"""The residual: values that a link holds back for later; one type for all codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from slipstream.types import Buffer, Spec, Values

Floats = np.ndarray[Any, np.dtype[np.float32]]
EVERYTHING = -1.0  # a bound that every entry is above


class Decoder(Protocol):
    """The half of a codec that ``put_back`` needs."""

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None: ...


@dataclass(slots=True, eq=False)
class Residual:
    """Values that were to be sent over one link and have not been sent yet.

    Every value is sent exactly once. An encoder that sends a part leaves the rest in the residual:

        sent + kept = values + kept before

    bit for bit where entries are selected; where they are rounded, ``kept`` is the rounding
    error. If the receiver drops the contribution, ``put_back`` restores the state before it was
    sent.

    State that all ends of a link must share is not kept here: see ``Agreement``.

    Attributes:
        values: What is kept, one entry for each value of the segment. Encoders change it in place.
        separable: True if entries are sent independently of each other. If not, one non-finite
            value makes the whole contribution invalid: none of it entered the residual, and
            ``put_back`` restores none of it.

    >>> residual = Residual.zeros(3)
    >>> residual.add(np.float32([0.25, -2, 1]))
    >>> residual.take(above=0.5).tolist(), residual.values.tolist()
    ([0.0, -2.0, 1.0], [0.25, 0.0, 0.0])
    """

    values: Floats
    separable: bool = True

    @classmethod
    def zeros(cls, numel: int, *, separable: bool = True) -> Residual:
        """Return a residual that keeps nothing yet."""
        return cls(np.zeros(numel, np.float32), separable)

    def part(self, part: slice) -> Residual:
        """Return a view; changes of it change this residual."""
        return Residual(self.values[part], self.separable)

    def add(self, values: Floats) -> None:
        """Add values to send later."""
        np.add(self.values, values, out=self.values)

    def take(self, above: float = EVERYTHING) -> Floats:
        """Remove and return what is to be sent now.

        Args:
            above: Keep entries whose magnitude is at most this. By default nothing is kept.

        Returns:
            The entries to send, and zeros in the place of those that stay. A NaN is sent.
        """
        due = self.values.copy()
        if above < 0:
            self.values[:] = 0
        else:
            stays = np.abs(due) <= above
            due[stays] = 0
            self.values[~stays] = 0
        return due

    def put_back(self, codec: Decoder, frames: Sequence[Buffer]) -> None:
        """Add back what was sent in a contribution that was dropped, except non-finite values."""
        sent = Values.empty(self.values.size, "float32")
        codec.decode_into(frames, sent)
        numbers = sent.data.view(np.float32)
        finite = np.isfinite(numbers)
        if self.separable or finite.all():
            np.add(self.values, numbers, out=self.values, where=finite)

    def clear(self) -> None:
        """Drop what is kept, since it belongs to weights that are no longer trained."""
        self.values[:] = 0


def kept_values(residuals: Sequence[Residual | None]) -> list[Floats | None]:
    """Return the values of each residual, not copied."""
    return [None if residual is None else residual.values for residual in residuals]


def obstacle_to_residual(spec: Spec) -> str:
    """Return why a tensor cannot have a residual, and what to use instead; empty if it can."""
    if spec.dtype == "float32":
        return ""
    return f"it is {spec.dtype}, and residuals are kept in float32: route it to Dense()"
