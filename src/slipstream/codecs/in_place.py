"""Nothing is sent back: workers read results where they are, or have them already."""

from __future__ import annotations

from typing import ClassVar

from slipstream.parts import Facts, Part, facts
from slipstream.types import Spec


class InPlace(Part, frozen=True):
    """The way down of a route whose results need not travel.

    >>> InPlace().facts()
    frozenset({'down: nothing is sent'})
    """

    name: ClassVar[str] = "in place"
    lossy: ClassVar[bool] = False
    splits: ClassVar[bool] = True

    def facts(self) -> Facts:
        return facts("down: nothing is sent")

    def obstacle(self, spec: Spec) -> str:
        return ""
