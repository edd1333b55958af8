"""Server-sent events of a job: ``progress``, ``epoch``, ``end``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec

from slipstream.service.context import Service
from slipstream.service.database import Row

EVERY_S: Final = 1.0
COMMENT_S: Final = 15.0
OVER: Final = frozenset({"done", "failed", "cancelled"})


def event(name: str, data: object, number: int | None = None) -> bytes:
    """One event on the wire.

    >>> event("epoch", {"loss": 0.5}, 3)
    b'id: 3\\nevent: epoch\\ndata: {"loss":0.5}\\n\\n'
    """
    head = b"" if number is None else f"id: {number}\n".encode()
    return head + f"event: {name}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


async def follow(
    service: Service, state: Callable[[], tuple[str, object]], job: str, after: int
) -> AsyncIterator[bytes]:
    """The events of a job, until it or the service ends.

    Args:
        service: What it is about.
        state: Reads the job's state and its progress.
        job: Its id.
        after: The last epoch the client has.

    Yields:
        Events and, while nothing happens, comments.
    """
    before: object = None
    sent_at = time.monotonic()
    yield b": begin\n\n"
    while not service.stopping.is_set():
        epochs = await service.call(_epochs, service, job, after)
        current, progress = await service.call(state)
        for row in epochs:
            after = row["epoch"]
            yield event("epoch", row, after)
        if progress != before:
            before, sent_at = progress, time.monotonic()
            yield event("progress", progress)
        if current in OVER:
            yield event("end", progress)
            return
        if time.monotonic() - sent_at > COMMENT_S:
            sent_at = time.monotonic()
            yield b": alive\n\n"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.stopping.wait(), EVERY_S)


def _epochs(service: Service, job: str, after: int) -> list[Row]:
    with service.database.reading() as reading:
        return reading.run(
            "SELECT epoch, at, loss, accuracy, held_accuracy FROM epochs"
            " WHERE job = :job AND epoch > :after ORDER BY epoch",
            {"job": job, "after": after},
        )
