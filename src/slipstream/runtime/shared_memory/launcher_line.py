"""A worker's connection to the launcher: requests and their answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from slipstream.errors import CheckpointError, FrameRefused, ModelMismatch, PeerFailed, WaitLimit
from slipstream.runtime.shared_memory import messages
from slipstream.transports.local_socket import Hangup, LocalSocket

Answer = TypeVar("Answer", bound=messages.Body)
TICK_S = 0.5  # how often a wait at the end looks whether others make progress
AHEAD = 8  # batches leased at a time: a request for each would cost as much as a small step


class LauncherLine:
    """Sends requests one at a time, from any thread."""

    def __init__(self, descriptor: int, start_s: float, wait_s: float) -> None:
        os.set_inheritable(descriptor, False)
        # A copy: another job of this process may need the launcher again.
        end = socket.socket(fileno=os.dup(descriptor))
        self._line: LocalSocket[messages.ToLearner] = LocalSocket(end, messages.ToLearner)  # type: ignore[arg-type]
        self._start_s, self._wait_s = start_s, wait_s
        self._asking = threading.Lock()
        self._leased: list[tuple[int, int]] = []

    def join(self, hello: messages.Hello) -> tuple[messages.Welcome, int]:
        """Join as a learner.

        Returns:
            The reply, and the descriptor of the shared memory.

        Raises:
            ModelMismatch: the learners' models differ.
        """
        with self._asking:
            self._send(hello)
            welcome, descriptor = self._receive(
                messages.Welcome, "the first learner's weights", self._start_s
            )
        if descriptor is None:
            raise FrameRefused("the launcher has sent no memory")
        return welcome, descriptor

    def joins_network(self, doing: str) -> None:
        """Report that this worker is not a learner, and what it does instead."""
        with self._asking:
            self._send(messages.Networked(doing))

    def is_first(self, key: str) -> bool:
        """Whether this process is the first to call it with a key."""
        own = os.getpid()
        return bool(self.share(key, own) == own)

    def begin(self, *, filled: bool) -> None:
        """Wait until the weights are in place."""
        with self._asking:
            if filled:
                self._send(messages.Filled())
            self._receive(messages.Begin, "the server to keep the first weights", self._start_s)

    def share(self, key: str, value: Any) -> Any:
        """The value of the first learner that gave one under this key."""
        return self._ask(messages.Share(key, value), messages.Shared, "job.broadcast").value

    def lease(self, batches: int, returned: int) -> tuple[int, int]:
        """The next batch's epoch and number."""
        if returned:
            returned += len(self._leased)
            self._leased.clear()
        if not self._leased:
            answer = self._ask(messages.Lease(batches, AHEAD, returned), messages.Leased, "a batch")
            self._leased = list(answer.batches)
        return self._leased.pop(0)

    def save(self, path: str) -> None:
        """Have the server write a checkpoint; raises CheckpointError."""
        self._do(messages.Save(path), "job.save")

    def load(self, path: str, *, takes_nonfinite: bool) -> None:
        """Have the server load a checkpoint; raises CheckpointError."""
        self._do(messages.Load(path, takes_nonfinite), "job.load")

    def account(self) -> messages.Account:
        """The server's figures."""
        return self._ask(messages.Ask(), messages.Account, "the server's account")

    def end_training(self, progress: Callable[[], object]) -> None:
        """Wait until no learner trains any more, and the weights are final.

        Args:
            progress: changes while others train; the limit is on how long it stays the same.

        Raises:
            WaitLimit: with the ranks that still train.
        """
        self._ask_at_end(messages.Trained(), messages.Final, "their last steps", progress)

    def depart(self, figures: bytes, ages: dict[int, int]) -> messages.Farewell:
        """Leave, and wait until all learners have left."""
        body = messages.Departing(figures, ages)
        return self._ask_at_end(body, messages.Farewell, "their last figures", lambda: None)

    def _ask_at_end(
        self,
        body: messages.Body,
        answer: type[Answer],
        what: str,
        progress: Callable[[], object],
    ) -> Answer:
        """Ask what is answered when all learners have asked it, and name them if they do not."""
        with self._asking:
            self._send(body)
            missing, seen, since = ["launcher"], progress(), time.monotonic()
            while True:
                try:
                    heard, _ = self._hear(TICK_S)
                except TimeoutError:
                    if (now := progress()) != seen:
                        seen, since = now, time.monotonic()
                    if time.monotonic() - since > self._wait_s:
                        raise WaitLimit(what, self._wait_s, missing) from None
                    continue
                if not isinstance(heard, messages.Awaited):
                    return expected(heard, answer)
                missing = [f"rank {rank}" for rank in heard.ranks] or ["launcher"]

    def close(self) -> None:
        """Close the connection."""
        self._line.close()

    def _do(self, body: messages.Body, what: str) -> None:
        if trouble := self._ask(body, messages.Done, what).trouble:
            raise CheckpointError(trouble)

    def _ask(self, body: messages.Body, answer: type[Answer], what: str) -> Answer:
        with self._asking:
            self._send(body)
            return self._receive(answer, what, self._wait_s)[0]

    def _send(self, body: messages.Body) -> None:
        try:
            self._line.send(body)
        except Hangup as error:
            raise gone() from error

    def _receive(self, kind: type[Answer], what: str, limit_s: float) -> tuple[Answer, int | None]:
        try:
            body, descriptor = self._hear(limit_s)
        except TimeoutError:
            raise WaitLimit(what, limit_s, ["launcher"]) from None
        return expected(body, kind), descriptor

    def _hear(self, limit_s: float) -> tuple[messages.ToLearner, int | None]:
        try:
            return self._line.receive(limit_s)
        except Hangup as error:
            raise gone() from error


def expected(body: messages.Body, kind: type[Answer]) -> Answer:
    """An answer of this kind; raises FrameRefused, or ModelMismatch if the request is refused."""
    if isinstance(body, messages.Refused):
        raise ModelMismatch(body.trouble)
    if not isinstance(body, kind):
        raise FrameRefused(f"the launcher has answered with {type(body).__name__}")
    return body


def gone() -> PeerFailed:
    """The error of a learner whose launcher has ended."""
    return PeerFailed("the launcher", "its line to this learner is closed")
