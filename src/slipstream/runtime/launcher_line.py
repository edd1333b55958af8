"""A learner's line to the launcher: it asks, and waits for the answer."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, TypeVar

from slipstream.errors import CheckpointError, ModelMismatch, PeerFailed, WaitLimit
from slipstream.runtime.workshop_messages import (
    Account,
    Ask,
    Begin,
    Body,
    Departing,
    Done,
    Farewell,
    Filled,
    Hello,
    Lease,
    Leased,
    Load,
    Refused,
    Save,
    Share,
    Shared,
    ToLearner,
    Welcome,
)
from slipstream.transports.local_socket import Hangup, LocalSocket

Answer = TypeVar("Answer", bound=Body)
AHEAD = 8  # batches leased at a time: asking for each would cost as much as a small step


class LauncherLine:
    """Requests go out one at a time, from whichever thread."""

    def __init__(self, descriptor: int, start_s: float, wait_s: float) -> None:
        os.set_inheritable(descriptor, False)
        end = socket.socket(fileno=descriptor)
        self._line: LocalSocket[ToLearner] = LocalSocket(end, ToLearner)  # type: ignore[arg-type]
        self._start_s, self._wait_s = start_s, wait_s
        self._asking = threading.Lock()
        self._leased: list[tuple[int, int]] = []

    def join(self, hello: Hello) -> tuple[Welcome, int]:
        """What is shared, and the descriptor of the memory that it is in."""
        with self._asking:
            self._send(hello)
            welcome, descriptor = self._receive(
                Welcome, "the first learner's weights", self._start_s
            )
        assert descriptor is not None
        return welcome, descriptor

    def begin(self, *, filled: bool) -> None:
        """Returns when the weights are in place."""
        with self._asking:
            if filled:
                self._send(Filled())
            self._receive(Begin, "the server to keep the first weights", self._start_s)

    def share(self, key: str, value: Any) -> Any:
        return self._ask(Share(key, value), Shared, "job.share").value

    def lease(self, batches: int, returned: int) -> tuple[int, int]:
        """The next batch's epoch and number."""
        if returned:
            dropped = len(self._leased)
            self._leased.clear()
            returned += dropped
        if not self._leased:
            answer = self._ask(Lease(batches, AHEAD, returned), Leased, "a batch")
            self._leased = list(answer.batches)
        return self._leased.pop(0)

    def save(self, path: str) -> None:
        self._do(Save(path), "job.save")

    def load(self, path: str) -> None:
        self._do(Load(path), "job.load")

    def account(self) -> Account:
        return self._ask(Ask(), Account, "the server's account")

    def depart(self, figures: bytes, ages: dict[int, int]) -> Farewell:
        return self._ask(Departing(figures, ages), Farewell, "the other learners to finish")

    def close(self) -> None:
        self._line.close()

    def _do(self, body: Body, what: str) -> None:
        if trouble := self._ask(body, Done, what).trouble:
            raise CheckpointError(trouble)

    def _ask(self, body: Body, answer: type[Answer], what: str) -> Answer:
        with self._asking:
            self._send(body)
            return self._receive(answer, what, self._wait_s)[0]

    def _send(self, body: Body) -> None:
        try:
            self._line.send(body)
        except Hangup as error:
            raise gone() from error

    def _receive(self, kind: type[Answer], what: str, limit_s: float) -> tuple[Answer, int | None]:
        try:
            body, descriptor = self._line.receive(limit_s)
        except TimeoutError:
            raise WaitLimit(what, limit_s, ["launcher"]) from None
        except Hangup as error:
            raise gone() from error
        if isinstance(body, Refused):
            raise ModelMismatch(body.trouble)
        assert isinstance(body, kind)
        return body, descriptor


def gone() -> PeerFailed:
    return PeerFailed("the launcher", "its line to this learner is closed")
