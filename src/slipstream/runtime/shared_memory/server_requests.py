"""Requests of learners to the server, which the launcher forwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.runtime.shared_memory import messages
from slipstream.runtime.shared_memory.batches import Rank

Send = Callable[[messages.Body, int | None], None]  # a message, and a descriptor that goes with it


@dataclass(slots=True)
class ServerRequests:
    """Requests by number, until they are answered."""

    _asked: dict[int, tuple[Rank | None, messages.Body]] = field(default_factory=dict)
    _count: int = 0
    _send: Send | None = None

    @property
    def loading(self) -> bool:
        """Whether a checkpoint is being loaded."""
        return any(isinstance(body, messages.Load) for _, body in self._asked.values())

    def connect(self, send: Send | None) -> None:
        """Forward requests to this server, starting with those that were not answered.

        Args:
            send: None while there is no server; requests then wait for the next one.
        """
        self._send = send
        for number, (_, body) in self._asked.items():
            self._pass_on(number, body)

    def ask(self, rank: Rank, body: messages.Body) -> None:
        """Forward a learner's request."""
        self._count += 1
        self._asked[self._count] = (rank, body)
        self._pass_on(self._count, body)

    def answered(self, number: int) -> tuple[Rank | None, messages.Body]:
        """The learner of a request, unless it has ended, and the request."""
        return self._asked.pop(number)

    def forget(self, rank: Rank) -> None:
        """A learner has ended: drop answers to its requests."""
        for number, (asked_by, body) in self._asked.items():
            if asked_by == rank:
                self._asked[number] = (None, body)

    def _pass_on(self, number: int, body: messages.Body) -> None:
        if self._send is None:
            return
        request: messages.Body = messages.Ask(number)
        match body:
            case messages.Filled():
                request = messages.Keep(number)
            case messages.Save():
                request = messages.Keep(number, body.path)
            case messages.Load():
                request = messages.Restore(number, body.path, body.takes_nonfinite)
        self._send(request, None)
