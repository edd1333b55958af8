"""Collective calls: calls that all ranks of a networked job make, with the same names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from slipstream.runtime.members.gathering import CALLS
from slipstream.runtime.members.joining import Membership


class CollectiveCalls:
    """One rank's side; every rank must make each call, equally often."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._made: Counter[str] = Counter()
        self._poll: Callable[[], None] = lambda: None
        self._position: Callable[[], str] = str

    def wait_with(self, poll: Callable[[], None], position: Callable[[], str]) -> None:
        """Wait in another way from now on.

        Args:
            poll: Called while this rank waits for the other ranks.
            position: Part of a call's name, where ranks cannot just count calls: a restarted worker
                has not made all of them.
        """
        self._poll, self._position = poll, position

    def gather(
        self, what: str, value: Any, doing: str = "", ended_after: int | None = None
    ) -> list[Any]:
        """Every rank's value, in order.

        Args:
            doing: names the user's call in errors.
            ended_after: if this rank has finished: the number of its steps.
        """
        key = self.name(what)
        with self.watched(doing or CALLS.get(what, what), ended_after):
            return self._membership.gathering.gather(key, value, Any)

    def name(self, what: str) -> str:
        """A name for a collective call: its kind, and how often it has been made.

        Workers may end at different steps, so the position is not part of the name of the end.
        """
        at = "" if what == "ended" else self._position()
        self._made[what + at] += 1
        return f"{what}{at}/{self._made[what + at]}"

    def watched(self, doing: str, ended_after: int | None = None) -> AbstractContextManager[None]:
        """Within, a wait for all ranks raises an error when some of them continue training or
        end."""
        beats = self._membership.member.heartbeat
        watch = beats.check_collective(doing)
        if ended_after is not None:
            watch = beats.check_end(ended_after)

        def tick(missing: Sequence[str]) -> None:
            watch(missing)
            self._poll()

        return self._membership.gathering.watched(tick)
