"""The mean of all workers' weights, and their distance from it: computed at rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from slipstream.codecs.residual import Floats
from slipstream.errors import FrameRefused
from slipstream.runtime.exchange.transfer import Arrival, Transfer
from slipstream.runtime.members.member import HUB
from slipstream.transports.wire import Fetch, Message

BLOCK_VALUES = 1 << 18
VECTOR, MEAN = "own weights", "mean weights"


class Differences:
    """Accumulates vectors as differences from the first. So nearly equal vectors keep their
    differences, and equal ones give exactly zero."""

    def __init__(self, first: Floats) -> None:
        self._first = first
        self._total = np.zeros(len(first))
        self._squares = 0.0
        self._count = 1

    def add(self, vector: Floats) -> None:
        for start in range(0, len(vector), BLOCK_VALUES):  # in blocks, to save memory
            place = slice(start, start + BLOCK_VALUES)
            apart = vector[place].astype(np.float64) - self._first[place]
            self._total[place] += apart
            self._squares += float(apart @ apart)
        self._count += 1

    def mean(self) -> tuple[Floats, float]:
        """The mean, and the root mean square distance from it, relative to its length."""
        shift = self._total / self._count
        mean: Floats = (self._first + shift).astype(np.float32)
        apart = max(0.0, self._squares / self._count - float(shift @ shift))
        length = float(np.linalg.norm(mean.astype(np.float64)))
        return mean, math.sqrt(apart) / length if length > 0 else 0.0


class Consensus:
    """One worker's part; ``reach`` must be called on every rank.

    Rank 0 asks one worker after the other, so that it holds only one other vector at a time. If a
    worker dies meanwhile, its vector does not count.

    Args:
        rank: This worker's.
        workers: The number of workers.
        transfer: Sends and receives the vectors.
        numel: The length of a vector.
        limit_s: How long to wait for one.
    """

    def __init__(
        self, rank: int, workers: int, transfer: Transfer, numel: int, limit_s: float
    ) -> None:
        self._meanwhile: Callable[[], None] = lambda: None
        self._rank, self._workers = rank, workers
        self._transfer, self._member = transfer, transfer.member
        self._numel, self._limit_s = numel, limit_s
        self._reached = 0
        self._asked: int | None = None  # the number of rank 0's request, until it is answered
        transfer.serve(VECTOR, self._on_asked)

    def reach(
        self, own: Floats, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Floats, float]:
        """Return the mean, and the workers' distance from it.

        Args:
            own: This worker's weights.
            meanwhile: Called again and again while this worker waits.
        """
        self._meanwhile = meanwhile
        return self._lead(own) if self._rank == 0 else self._follow(own)

    def _lead(self, own: Floats) -> tuple[Floats, float]:
        self._reached += 1
        told = Differences(own)
        names = [f"rank {rank}" for rank in range(1, self._workers)]
        heard = [name for name in names if self._add_vector_of(name, told)]
        mean, spread = told.mean()
        for name in heard:
            memory = [np.array([spread]).view(np.uint8), mean.view(np.uint8)]
            self._transfer.send(name, MEAN, self._reached, memory)
        return mean, spread

    def _add_vector_of(self, name: str, told: Differences) -> bool:
        """Ask a worker for its vector; returns False if the worker is lost before it is here."""
        if name in self._member.lost:
            return False
        vector = np.empty(self._numel, np.float32)
        arrival = Arrival(name, VECTOR, self._reached, lambda _: [vector.view(np.uint8)])
        with self._transfer.expecting([arrival]):
            self._transfer.ask(name, VECTOR, self._reached)
            self._until(lambda: arrival.complete or name in self._member.lost, name)
        if arrival.complete:
            told.add(vector)
        return arrival.complete

    def _follow(self, own: Floats) -> tuple[Floats, float]:
        self._until(lambda: self._asked is not None, HUB)
        number, self._asked = self._asked or 0, None
        spread, mean = np.empty(1), np.empty(self._numel, np.float32)
        memory = [spread.view(np.uint8), mean.view(np.uint8)]
        arrival = Arrival(HUB, MEAN, number, lambda _: memory)
        with self._transfer.expecting([arrival]):
            self._transfer.send(HUB, VECTOR, number, [own.view(np.uint8)])
            self._until(lambda: arrival.complete, HUB)
        return mean, float(spread[0])

    def _until(self, holds: Callable[[], bool], name: str) -> None:
        self._member.poll_until(
            holds,
            self._meanwhile,
            what="everybody's weights",
            limit_s=self._limit_s,
            missing=lambda: [name],
        )

    def _on_asked(self, message: Message[Fetch]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} asks for weights, expected {HUB}")
        self._asked = message.body.number
