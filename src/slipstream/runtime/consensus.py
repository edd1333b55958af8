"""The mean of all workers' weights, and how far apart they are: to rank 0 and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slipstream.errors import FrameRefused
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.member import HUB, Member
from slipstream.transports.wire import Message, Opinion, checksum

MESSAGE_VALUES = 1 << 18
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Differences:
    """Some vectors, by how they differ from whatever came first: close ones are told apart, and
    equal ones are not."""

    def __init__(self, numel: int) -> None:
        self._first: Floats = np.zeros(numel, np.float32)
        self._begun: set[int] = set()
        self._total = np.zeros(numel)
        self._squares = 0.0

    def add(self, start: int, values: Floats) -> None:
        place = slice(start, start + len(values))
        if start not in self._begun:
            self._begun.add(start)
            self._first[place] = values
        apart = values.astype(np.float64) - self._first[place]
        self._total[place] += apart
        self._squares += float(apart @ apart)

    def mean(self, count: int) -> tuple[Floats, float]:
        """Of so many; and the root mean square distance from it, as a part of its own length."""
        shift = self._total / count
        mean: Floats = (self._first + shift).astype(np.float32)
        apart = max(0.0, self._squares / count - float(shift @ shift))
        length = float(np.linalg.norm(mean.astype(np.float64)))
        return mean, math.sqrt(apart) / length if length > 0 else 0.0


class Consensus:
    """One worker's part; ``reach`` must be called on every rank. One is under way at a time."""

    def __init__(self, rank: int, workers: int, member: Member, numel: int, limit_s: float) -> None:
        self._rank, self._workers, self._member = rank, workers, member
        self._numel, self._limit_s = numel, limit_s
        self._told = Differences(0)
        self._spread = 0.0
        self._taken: dict[int, int] = {}  # by rank: values
        member.on(Opinion, self._on_opinion)

    def reach(self, own: Floats) -> tuple[Floats, float]:
        """The mean, and how far workers are from it."""
        if self._rank != 0:
            self._send(HUB, own, 0.0)
        else:
            self._take(0, 0, own)
        self._member.wait_until(
            lambda: not self._missing(),
            what="everybody's weights",
            limit_s=self._limit_s,
            missing=self._missing,
        )
        with self._member.changed:
            told, taken, self._taken = self._told, sorted(self._taken), {}
        mean, spread = told.mean(len(taken))
        if self._rank != 0:
            return mean, self._spread
        for rank in taken[1:]:
            self._send(f"rank {rank}", mean, spread)
        return mean, spread

    def _missing(self) -> list[str]:
        here = {rank for rank, values in self._taken.items() if values == self._numel}
        expected = range(self._workers) if self._rank == 0 else (0,)
        names = [f"rank {rank}" for rank in expected if rank not in here]
        return [name for name in names if name not in self._member.lost]

    def _send(self, peer: str, values: Floats, spread: float) -> None:
        for start in range(0, len(values), MESSAGE_VALUES):
            piece = values[start : start + MESSAGE_VALUES].view(np.uint8)
            self._member.send(peer, Opinion(start, spread, checksum([piece])), [piece])

    def _take(self, rank: int, start: int, values: Floats) -> None:
        with self._member.changed:
            if not self._taken:
                self._told = Differences(self._numel)
            for at in range(0, len(values), MESSAGE_VALUES):
                self._told.add(start + at, values[at : at + MESSAGE_VALUES])
            self._taken[rank] = start + len(values)
            self._member.changed.notify_all()

    def _on_opinion(self, message: Message) -> None:
        body, rank = message.body, rank_of(message.sender)
        assert isinstance(body, Opinion)
        if (rank == 0) == (self._rank == 0) or not 0 <= rank < self._workers:
            raise FrameRefused(f"weights from {message.sender}")
        nbytes = message.nbytes
        if len(message.frames) != 1 or nbytes % 4 or nbytes > 4 * MESSAGE_VALUES:
            raise FrameRefused(f"weights in {len(message.frames)} frames of {nbytes} bytes")
        if body.start != self._taken.get(rank, 0) or body.start + nbytes // 4 > self._numel:
            raise FrameRefused(f"weights from {body.start} on, which are not the next")
        if checksum(message.frames) != body.crc:
            raise FrameRefused("weights whose checksum is wrong")
        self._spread = body.spread
        self._take(rank, body.start, np.frombuffer(memoryview(message.frames[0]), np.float32))
