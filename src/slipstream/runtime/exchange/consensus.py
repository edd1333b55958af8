"""The mean of all workers' weights, and their distance from it: computed at rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from slipstream.codecs.residual import Floats
from slipstream.errors import FrameRefused
from slipstream.runtime.members.member import HUB, Member
from slipstream.transports.wire import Ask, Message, WeightsReply, checksum

MESSAGE_VALUES = 1 << 18


class Differences:
    """Accumulates vectors as differences from the first. So nearly equal vectors keep their
    differences, and equal ones give exactly zero."""

    def __init__(self, first: Floats) -> None:
        self._first = first
        self._total = np.zeros(len(first))
        self._squares = 0.0
        self._count = 1

    def add(self, vector: Floats) -> None:
        for start in range(0, len(vector), MESSAGE_VALUES):  # in blocks, to save memory
            place = slice(start, start + MESSAGE_VALUES)
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
    """

    def __init__(self, rank: int, workers: int, member: Member, numel: int, limit_s: float) -> None:
        self._meanwhile: Callable[[], None] = lambda: None
        self._rank, self._workers, self._member = rank, workers, member
        self._numel, self._limit_s = numel, limit_s
        self._asked = 0  # how often this worker was asked
        self._answered = 0
        self._expected_from = HUB  # the sender of the awaited vector
        self._vector: Floats = np.zeros(0, np.float32)
        self._taken = 0
        self._spread = 0.0
        member.on(Ask, self._on_ask)
        member.on(WeightsReply, self._on_weights_reply)

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
        told, heard = Differences(own), []
        for rank in range(1, self._workers):
            name = f"rank {rank}"
            self._expect(name)
            if name not in self._member.lost:
                self._member.send(name, Ask())
                self._until(lambda name=name: self._whole or name in self._member.lost, name)  # type: ignore[misc]
            if self._whole:
                told.add(self._vector)
                heard.append(name)
        mean, spread = told.mean()
        for name in heard:
            self._send(name, mean, spread)
        return mean, spread

    def _follow(self, own: Floats) -> tuple[Floats, float]:
        self._expect(HUB)
        self._until(lambda: self._asked > self._answered, HUB)
        self._answered += 1
        self._send(HUB, own, 0.0)
        self._until(lambda: self._whole, HUB)
        return self._vector, self._spread

    @property
    def _whole(self) -> bool:
        return self._taken == self._numel

    def _expect(self, name: str) -> None:
        with self._member.lock:
            self._expected_from, self._taken = name, 0
            self._vector = np.empty(self._numel, np.float32)

    def _until(self, holds: Callable[[], bool], name: str) -> None:
        self._member.poll_until(
            holds,
            self._meanwhile,
            what="everybody's weights",
            limit_s=self._limit_s,
            missing=lambda: [name],
        )

    def _send(self, peer: str, values: Floats, spread: float) -> None:
        for start in range(0, len(values), MESSAGE_VALUES):
            piece = values[start : start + MESSAGE_VALUES].view(np.uint8)
            self._member.send(peer, WeightsReply(start, spread, checksum([piece])), [piece])

    def _on_ask(self, message: Message[Ask]) -> None:
        if message.sender != HUB:
            raise FrameRefused(f"{message.sender} does not ask for weights")
        self._asked += 1

    def _on_weights_reply(self, message: Message[WeightsReply]) -> None:
        body = message.body
        nbytes = message.nbytes
        if message.sender != self._expected_from or (self._rank != 0 and not self._answered):
            raise FrameRefused(f"weights from {message.sender}")
        if len(message.frames) != 1 or nbytes % 4 or nbytes > 4 * MESSAGE_VALUES:
            raise FrameRefused(f"weights in {len(message.frames)} frames of {nbytes} bytes")
        if body.start != self._taken or body.start + nbytes // 4 > len(self._vector):
            raise FrameRefused(f"weights from {body.start} on, which are not the next")
        if checksum(message.frames) != body.crc:
            raise FrameRefused("weights whose checksum is wrong")
        values = np.frombuffer(memoryview(message.frames[0]), np.float32)
        self._vector[body.start : body.start + len(values)] = values
        self._spread = body.spread
        self._taken = body.start + len(values)
