"""Nothing is sent back: workers read results in place, or have them already."""

from __future__ import annotations

from typing import ClassVar

from slipstream.parts import Facts, Part, facts
from slipstream.types import Spec


class InPlace(Part, frozen=True):
    """The ``down`` codec of a route whose results need not be sent.

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
