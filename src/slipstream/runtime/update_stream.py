"""The worker's half where results are updates and it may run ahead of them.

Every worker applies the same updates in the same order: each when all of it is there, whole, and
never within a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from slipstream.runtime.exchange import LinkExchange
from slipstream.runtime.holder import split_frames
from slipstream.transports.wire import Publish
from slipstream.types import Buffer, Segment, Values

Apply = Callable[[int, Collection[int]], None]  # the clock, and the tensors that have an update
Parts = Mapping[int, tuple[Publish, Sequence[Buffer]]]  # by chunk


class UpdateStream(LinkExchange):
    """``apply`` is called with each update in the sinks of its tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.apply: Apply = lambda clock, tensors: None
        self.applied = 0
        self._updates: defaultdict[int, dict[int, tuple[Publish, Sequence[Buffer]]]]
        self._updates = defaultdict(dict)  # by clock

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Apply what is complete, until the next clock may begin."""
        self._apply_until(lambda: all(self._may_start(index) for index in self._chunks))

    def drain(self, clocks: int | None = None) -> None:
        """Until so many are applied; by default all that this worker has contributed to."""
        wanted = max(self._rounds.values(), default=0) if clocks is None else clocks
        self._apply_until(lambda: self.applied >= wanted)

    def refresh(self) -> None:
        """Updates are applied between steps only."""

    def _apply_until(self, enough: Callable[[], bool]) -> None:
        begun = time.monotonic()
        self._apply_complete()
        while not enough():
            self._member.wait_until(
                self._complete,
                what=f"the update of clock {self.applied}",
                limit_s=self._limit_s,
            )
            self._apply_complete()
        self.wait_s += time.monotonic() - begun

    def _complete(self) -> bool:
        return len(self._updates.get(self.applied, ())) == len(self._chunks)

    def _apply_complete(self) -> None:
        while self._complete():
            with self._member.changed:
                clock, parts = self.applied, self._updates.pop(self.applied)
                self.applied += 1  # at once: from here on, what comes of it again is dropped
            self.apply(clock, self._write_update(parts))

    def _write_update(self, parts: Parts) -> Collection[int]:
        """Every tensor of which anything came; the rest of it is zero."""
        absent: defaultdict[int, list[Segment]] = defaultdict(list)
        sinks: dict[int, Values] = {}
        for index, (body, frames) in sorted(parts.items()):
            chunk, codec = self._chunks[index], self.plan.route(self._chunks[index]).publish
            self._committed[index] = body.round + 1
            self._leaving[index].clear()  # the server has had what it made this of
            groups = split_frames(chunk, body.present, frames, codec.frames)
            for segment, group in zip(chunk.segments, groups, strict=True):
                if group is None:
                    absent[segment.tensor].append(segment)
                    continue
                if segment.tensor not in sinks:
                    sinks[segment.tensor] = self._slots.sink(segment.tensor)
                codec.decode_into(group, sinks[segment.tensor].part(segment.start, segment.stop))
        for tensor, sink in sinks.items():
            self._clear(tensor, sink, absent[tensor])
            self._slots.settle(tensor)
        return sinks.keys()

    # ---- the receiving thread

    def _has(self, body: Publish) -> bool:
        return body.round < self.applied or body.chunk in self._updates.get(body.round, ())

    def _fits(self, body: Publish) -> bool:
        """In any order: results that come over different ways overtake each other."""
        return body.round < self._rounds[body.chunk]

    def _park(self, body: Publish, frames: Sequence[Buffer]) -> None:
        if body.round >= self.applied:
            self._updates[body.round][body.chunk] = (body, frames)
