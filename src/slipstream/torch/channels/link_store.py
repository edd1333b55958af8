"""A torch store whose values are sent over the job's authenticated links."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import distributed

from slipstream.runtime.members.gathering import Gathering


class LinkStore(distributed.Store):
    """What gloo needs to connect its ranks: each sets its own keys and waits for those of others.

    The rendezvous store would work, but anyone who reaches it may change it.
    """

    def __init__(self, gathering: Gathering) -> None:
        super().__init__()
        self._gathering = gathering
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = content
        self._gathering.put(f"store/{key}", content)

    def get(self, key: str) -> bytes:
        if key not in self._known:
            self._known[key] = self._gathering.get(f"store/{key}")
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """The gathering's own limit applies: its error names the missing ranks."""
        for key in keys:
            self.get(key)
