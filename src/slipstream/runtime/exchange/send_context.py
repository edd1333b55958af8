"""What is sent with a contribution, and what codecs may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.types import Settings


@dataclass(frozen=True, slots=True)
class SendContext:
    """Facts about this worker that change while it trains; each is asked for at every send.

    Attributes:
        settings: The optimizer's settings; None unless servers update.
        rate: The learning rate relative to the highest so far.
        congested: Whether outgoing links are congested.
        weight: By tensor: how many workers' contributions it is the sum of; None: of one each.
    """

    settings: Callable[[], Settings] | None = None
    rate: Callable[[], float] = lambda: 1.0
    congested: Callable[[], bool] = lambda: False
    weight: Callable[[int], int] | None = None
