"""The bench's side of a trial: starts new workers, synchronizes them, limits every wait."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from slipstream.apps.bench.fork_server import KillAll, Place, Reaped, Request, Started
from slipstream.apps.bench.trial import Trial
from slipstream.errors import SlipstreamError

# -P: a file in the current folder must not replace a module.
FORKING = (sys.executable, "-P", "-m", "slipstream.apps.bench.fork_server")
START_LIMIT_S = 180.0
END_LIMIT_S = 30.0
TAIL_LINES = 25


class TrialFailed(SlipstreamError):
    """A trial that did not finish; names the failed workers and shows their output."""


class ForkServer:
    """A starter of the workers of one trial after the other; all end with the block."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-bench-")
        self._started: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self._reaped: set[int] = set()
        self._process = subprocess.Popen(
            [*FORKING, self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            message = msgspec.json.decode(line, type=Started | Reaped)
            if isinstance(message, Reaped):
                self._reaped |= set(message.pids)
            else:
                self._reaped -= set(message.pids)  # earlier workers with the same numbers
                self._started.put(message.pids)

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.kill()  # its workers die with it
        self._folder.cleanup()

    @contextmanager
    def process_group(self, trial: Trial, places: Sequence[Place]) -> Iterator[ProcessGroup]:
        """Start the workers of one trial; at the end of the block, kill those that remain."""
        folder = Path(self._folder.name)
        path = folder / "line"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(len(places))
            try:
                request = Request(
                    msgspec.Raw(msgspec.json.encode(trial)), list(places), str(path), str(folder)
                )
                process_group = ProcessGroup(self._start(request), folder, self._reaped)
                try:
                    process_group.accept(listener)
                    yield process_group
                finally:
                    with contextlib.suppress(TrialFailed):  # otherwise they have ended with it
                        self._ask(KillAll())
                    process_group.close()
            finally:
                path.unlink()

    def _start(self, request: Request) -> list[int]:
        self._ask(request)
        try:
            return self._started.get(timeout=START_LIMIT_S)
        except queue.Empty:
            raise TrialFailed(
                "the process that starts workers did not start them; its output above may show why"
            ) from None

    def _ask(self, request: Request | KillAll) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise TrialFailed(
                "the process that starts workers has ended; its output above may show why"
            ) from None


class ProcessGroup:
    """The workers of one trial."""

    def __init__(self, pids: Sequence[int], folder: Path, reaped: set[int]) -> None:
        self._pids, self._folder, self._reaped = pids, folder, reaped
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines: list[socket.socket] = []

    def accept(self, listener: socket.socket) -> None:
        """Accept every worker's connection, or raise an error with the missing worker's output."""
        until = time.monotonic() + START_LIMIT_S
        while len(self._lines) < len(self._pids):
            listener.settimeout(0.2)
            try:
                line, _ = listener.accept()
            except TimeoutError:
                if self._reaped & set(self._pids) or time.monotonic() > until:
                    raise TrialFailed(f"not every worker started\n{self.tails()}") from None
                continue
            line.settimeout(None)
            self._lines.append(line)
            threading.Thread(target=self._read, args=(line.makefile("rb"),), daemon=True).start()

    def _read(self, file: IO[bytes]) -> None:
        rank = -1
        with contextlib.suppress(OSError):
            for text in file:
                message = msgspec.json.decode(text)
                rank = message["rank"]
                self._messages.put(message)
        self._messages.put({"rank": rank, "event": "gone", "content": None})

    def hear(self, event: str, limit_s: float) -> list[Any]:
        """Return every worker's message at this point, by rank."""
        until = time.monotonic() + limit_s
        contents: dict[int, Any] = {}
        while len(contents) < len(self._pids):
            try:
                message = self._messages.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                silent = [str(rank) for rank in range(len(self._pids)) if rank not in contents]
                raise TrialFailed(
                    f"no {event!r} from rank {', '.join(silent)} within {limit_s:.0f} s\n"
                    + self.tails()
                ) from None
            if message["event"] == "gone":
                # The first to end is not always the cause, so let the others report, too.
                time.sleep(1.0)
                raise TrialFailed(f"rank {message['rank']} ended before {event!r}\n{self.tails()}")
            if message["event"] == event:
                contents[message["rank"]] = message["content"]
        return [contents[rank] for rank in sorted(contents)]

    def tell(self) -> None:
        """Let every worker continue."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.sendall(b"\n")

    def end(self) -> None:
        """Wait until every worker has ended by itself."""
        until = time.monotonic() + END_LIMIT_S
        while not self._reaped >= set(self._pids):
            if time.monotonic() > until:
                raise TrialFailed(f"not every worker ended\n{self.tails()}")
            time.sleep(0.01)

    def tails(self) -> str:
        """Return the end of every worker's output."""
        parts = []
        for rank in range(len(self._pids)):
            file = self._folder / f"rank{rank}.err"
            lines = file.read_text(errors="replace").splitlines() if file.exists() else []
            parts.append("\n".join([f"--- rank {rank}", *lines[-TAIL_LINES:]]))
        return "\n".join(parts)

    def close(self) -> None:
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
