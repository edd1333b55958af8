"""The worker's half where results are increments and it may run ahead of them.

Every worker applies the same updates in the same order: each when it is complete, and
never within a step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.unit_state import Answer, UnitState
from slipstream.transports.wire import Publish

Apply = Callable[[int, Collection[int]], None]  # the clock, and the tensors that have an update


class UpdateStream(RoundChannel):
    """Calls ``apply`` with each update, which is then in the sinks of its tensors."""

    def __init__(self, *args: Any, apply: Apply, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._apply = apply
        self.applied = 0
        self._whole: Counter[int] = Counter()  # by clock: complete units

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Apply complete updates, until the next clock may begin."""
        self._apply_until(lambda: all(self._may_start(state) for state in self._states.values()))

    def drain(self, clocks: int | None = None) -> None:
        """Apply exactly so many updates; by default all that this worker has contributed to."""
        begun = max((state.begun for state in self._states.values()), default=0)
        wanted = begun if clocks is None else clocks
        self._apply_until(lambda: self.applied >= wanted, most=wanted)

    def refresh(self) -> None:
        """Updates are applied between steps only."""

    def _apply_until(self, enough: Callable[[], bool], most: float = math.inf) -> None:
        begun = time.monotonic()
        self._apply_complete(most)
        while not enough():
            self._member.wait_until(
                self._complete,
                what=f"the update of clock {self.applied}",
                limit_s=self._limit_s,
            )
            self._apply_complete(most)
        self.wait_s += time.monotonic() - begun

    def _complete(self) -> bool:
        return 0 < len(self._states) == self._whole[self.applied]

    def _apply_complete(self, most: float) -> None:
        while self.applied < most and self._complete():
            with self._member.changed:
                clock = self.applied
                taken = [(s, s.answers.pop(clock)) for _, s in sorted(self._states.items())]
                del self._whole[clock]
                self.applied += 1  # now: from here on, duplicates of it are dropped
            self._apply(clock, self._write_update(taken))

    def _write_update(self, taken: list[tuple[UnitState, Answer]]) -> Collection[int]:
        """Write an update; returns its tensors. Segments without a contribution are zero."""
        touched: set[int] = set()
        for state, answer in taken:
            if state.route.topology.needs_servers:
                state.leaving.clear()  # the server has received the contribution
            self._wait_until_left(state)
            self._write(state, answer)
            if (
                answer.closed is not None
                and answer.closed.given(0)
                and state.unit.layer is not None
            ):
                touched.update(state.unit.layer.tensors)
        touched.update(self._results.written)
        self._results.finish_all()
        return touched

    # ---- the receiving thread

    def _note_arrived(self, state: UnitState, answer: Answer) -> None:
        self._whole[answer.round] += 1

    def _has(self, state: UnitState, body: Publish) -> bool:
        answer = state.answers.get(body.round)
        return body.round < self.applied or (answer is not None and body.part in answer.parts)

    def _fits(self, state: UnitState, body: Publish) -> bool:
        """Accept results in any order: those that come on different paths overtake each other."""
        return body.round < state.begun
