"""One clear message for an error nobody caught, from one rank, without a traceback of ours."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from slipstream.errors import (
    LaunchError,
    LeftBehind,
    NonFiniteGradient,
    PeerFailed,
    PeerLost,
    SecretError,
    SlipstreamError,
    WaitLimit,
)
from slipstream.printable import printable_lines
from slipstream.runtime.supervision import EXIT_PEER_FAILED

PACKAGE = str(Path(__file__).parents[1])


def speak_for(
    rank: int,
    *,
    is_local: bool = False,
    joined: Callable[[], bool] = lambda: True,
    is_learner: bool = False,
) -> None:
    """From now on, uncaught slipstream errors of this process end in one line, or in none.

    What all ranks know is said by rank 0 alone (by rank 1 where rank 0 is what is missing). What
    keeps a process from joining is known to nobody else: the first of each host says it
    (``is_local``). Learners that share memory do not hear of each other's faults
    (``is_learner``): each one says its own.
    """
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, SlipstreamError):
            before(kind, error, trace)
            return
        own = is_learner and isinstance(error, NonFiniteGradient | WaitLimit)
        if own or rank == speaker(error, rank) or (is_local and not joined()):
            message = printable_lines(f"slipstream: {error}{place(trace)}")
            print(message, file=sys.stderr, flush=True)
        if isinstance(error, PeerLost | PeerFailed | LeftBehind):
            raise SystemExit(EXIT_PEER_FAILED)

    sys.excepthook = say


def speaker(error: SlipstreamError, rank: int = -1) -> int:
    """Who says it; ``rank`` has been given it."""
    if isinstance(error, LeftBehind):
        return rank
    if isinstance(error, LaunchError | SecretError) and error.unheard:
        return rank
    if isinstance(error, PeerFailed) and error.told:
        return -1
    if isinstance(error, PeerLost | PeerFailed):
        return 1 if error.peer == "rank 0" else 0
    return 1 if isinstance(error, LaunchError) and "rank 0" in error.missing else 0


def place(trace: TracebackType | None) -> str:
    """The last line of the user's own code on the way to the error."""
    own = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(PACKAGE)
        and "/torch/" not in frame.filename
        and not frame.filename.startswith("<")
    ]
    return f"\n  at {own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
