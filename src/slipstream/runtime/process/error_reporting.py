"""One clear message for an uncaught error, from one rank, without slipstream's own traceback."""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from slipstream.errors import (
    EXIT_PEER_FAILED,
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

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun in its workers
LAUNCHER = "SLIPSTREAM_LAUNCHER"  # set by ``slipstream run`` in its workers
INTERRUPTED = "interrupted"
REPORT_S = 2.0  # for the rank that prints a common error
MOST_SENT = 2000  # characters of an error that is not slipstream's, and of its code line
INSTALLED = "/site-packages/"
PACKAGE = str(Path(__file__).parents[2])


def report_errors(rank: int, reports: Callable[[SlipstreamError], bool] | None = None) -> None:
    """Print one line or nothing, from now on, for an uncaught slipstream error of this process.

    Args:
        rank: The rank of this process.
        reports: Returns whether this process prints an error. By default only rank 0 prints errors
            that all ranks know (rank 1 if rank 0 is missing).
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_interruption(error) and LAUNCHER in os.environ:
            return  # the launcher reports it, once for all ranks
        if not isinstance(error, SlipstreamError):
            before(kind, error, trace)
            return
        prints = rank_reports(error, rank) if reports is None else reports(error)
        under_torchrun = TORCHRUN in os.environ
        waits = not prints and under_torchrun and reporting_rank(error, rank) >= 0
        if waits:
            # torchrun ends all ranks when one exits. Give the rank that reports time to print and
            # to end this one; if it is slower, no other rank would report the error.
            time.sleep(REPORT_S)
            prints = True
        if prints:
            message = printable_lines(f"slipstream: {error}{location(error, trace)}")
            # Torch's hook keeps the printed text in memory, and loses it if this process exits now.
            is_captured = isinstance(sys.stderr, io.StringIO)
            print(message, file=sys.__stderr__ if is_captured else sys.stderr, flush=True)
        if isinstance(error, PeerLost | PeerFailed | LeftBehind):
            if under_torchrun and not waits:
                time.sleep(REPORT_S)  # torchrun names the rank that exits first as the cause
            raise SystemExit(EXIT_PEER_FAILED)

    sys.excepthook = hook


def is_interruption(error: BaseException) -> bool:
    """Return whether Ctrl-C has ended this process, or another one on which it depends."""
    other = isinstance(error, PeerFailed) and error.reason == INTERRUPTED
    return other or isinstance(error, KeyboardInterrupt)


def rank_reports(error: SlipstreamError, rank: int) -> bool:
    """Return whether this rank is the one to print an error."""
    return reporting_rank(error, rank) == rank


def learner_reports(error: SlipstreamError, rank: int) -> bool:
    """Return the same for learners that share memory: no other learner knows of its errors."""
    return isinstance(error, NonFiniteGradient | WaitLimit) or rank_reports(error, rank)


def reporting_rank(error: SlipstreamError, rank: int = -1) -> int:
    """Return the rank that prints an error raised by ``rank``; -1 for none."""
    if isinstance(error, LeftBehind):
        return rank
    if isinstance(error, LaunchError | SecretError) and error.only_here:
        return rank
    if isinstance(error, PeerFailed) and error.reported:
        return -1
    if isinstance(error, PeerLost | PeerFailed):
        return 1 if error.peer == "rank 0" else 0
    return 1 if isinstance(error, LaunchError) and "rank 0" in error.missing else 0


def location(error: BaseException, trace: TracebackType | None) -> str:
    """Return the second line of an error message: the line that raised the error.

    It is empty for the failure of a peer, which has its own line: this rank's line has only waited.
    """
    line = "" if isinstance(error, PeerFailed) else failed_line(trace)
    how = "this rank waited at" if isinstance(error, PeerLost) else "at"
    return f"\n  {how} {line}" if line else ""


def failed_line(trace: TracebackType | None) -> str:
    """Return the last line of the user's code in the traceback; a framework's if it has none."""
    outside = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(PACKAGE)
        and "/torch/" not in frame.filename
        and not frame.filename.startswith("<")
    ]
    own = [frame for frame in outside if INSTALLED not in frame.filename] or outside
    if not own:
        return ""
    return sendable(f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"[:MOST_SENT])


def describe_error(error: BaseException) -> str:
    """Return the line that the other ranks will show."""
    if isinstance(error, SlipstreamError):
        return sendable(str(error))
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    kind = SystemExit if isinstance(error, SystemExit) else type(error)
    return sendable(f"{kind.__name__}: {error}".strip()[:MOST_SENT])


def sendable(text: str) -> str:
    """Return the text with escapes for bytes of file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()
