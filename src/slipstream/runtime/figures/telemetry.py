"""Outputs of a run's metrics: a JSONL log, TensorBoard, Prometheus; each only if requested.

If an output cannot be written, training and the other outputs continue: ``Watchers`` warns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import LaunchError
from slipstream.printable import printable, printable_lines
from slipstream.runtime.files.record_file import RecordFile

logger = logging.getLogger(__name__)
Figures = Mapping[str, float]


class Watcher(ABC):
    """An output of a job's metrics, such as a log or a dashboard; ``job.watch`` takes one.

    Calls come from the thread that calls ``job.record``. An error in a call becomes a warning.

    >>> class Losses(Watcher):
    ...     def __init__(self):
    ...         self.of_steps = {}
    ...     def note(self, step, figures):
    ...         self.of_steps[step] = figures["loss"]
    >>> losses = Losses()
    >>> losses.note(1, {"loss": 0.5, "wait_s": 0.1})
    >>> losses.of_steps, losses.name
    ({1: 0.5}, 'Losses')

    Attributes:
        name: The name in warnings; by default that of the class.
    """

    name: str = ""

    def __init_subclass__(cls) -> None:
        cls.name = cls.name or cls.__name__

    @abstractmethod
    def note(self, step: int, figures: Figures) -> None:
        """Write the metrics of one step.

        Args:
            step: The number of completed steps.
            figures: The figures that the loop passed to ``job.record``, and ``samples``,
                ``sent_bytes``, ``received_bytes`` and ``wait_s`` of this worker so far.
        """

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        """Write an event that is not a step; a watcher that shows only steps ignores it.

        Args:
            event: "start" (``strategy`` and ``workers``), "rounds" and "staleness" (accounts at the
                end of some systems), "failed" (``error``).
            content: Plain data.
        """
        return

    def close(self) -> None:
        """Write what is left, and free all resources."""
        return


class Watchers:
    """All watchers of a run. If one fails, the user is warned once, and it is tried again later."""

    def __init__(self) -> None:
        self._open: list[Watcher] = []
        self._warned: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, make: Callable[[], Watcher], *, training: bool = False) -> None:
        """Add a watcher. Before training has begun, one that cannot start is an error."""
        try:
            self._open.append(make())
        except LaunchError as error:
            if not training:
                raise
            warn(f"{error}. Training continues without it")

    def note(self, step: int, figures: Figures) -> None:
        """Pass the metrics of a step to all watchers."""
        for watcher in self._open:
            with self._warning(watcher):
                watcher.note(step, figures)

    def note_event(
        self, event: str, content: Mapping[str, Any], only: Watcher | None = None
    ) -> None:
        """Pass an event that is not a step to all watchers, or to one."""
        for watcher in self._open if only is None else [only]:
            with self._warning(watcher):
                watcher.note_event(event, content)

    def close(self) -> None:
        """Close all watchers."""
        for watcher in self._open:
            with self._warning(watcher):
                watcher.close()
        self._open.clear()

    @contextmanager
    def _warning(self, watcher: Watcher) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if watcher.name not in self._warned:
                self._warned.add(watcher.name)
                warn(
                    f"{watcher.name} cannot be written ({reason_of(error)}). Training continues; "
                    "what cannot be written is missing there, and later figures are tried again"
                )


def warn(message: str) -> None:
    """Warn by ``logging``, since a filter may turn ``warnings`` into errors.

    If logging is not set up, the warning goes to standard error, as is Python's default.
    """
    text = f"slipstream: {printable_lines(message)}"
    if has_handlers(logger):
        logger.warning("%s", text)
    elif logging.lastResort is not None:
        record = logger.makeRecord(
            logger.name, logging.WARNING, __file__, 0, "%s", (text,), exc_info=None
        )
        logging.lastResort.handle(record)


def has_handlers(logger: logging.Logger) -> bool:
    """Return whether a handler shows the logger's records; ``NullHandler`` does not."""
    current: logging.Logger | None = logger
    while current is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


def reason_of(error: Exception) -> str:
    """Return an error in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(f"{type(error).__name__}: {error}")


@contextmanager
def begun(name: str, path: Path, *, append: bool = False) -> Iterator[RecordFile]:
    """Open a new file, whose first record is written in the block; raise an error if that fails."""
    try:
        with contextlib.ExitStack() as on_error:
            file = RecordFile(path, append=append)
            on_error.callback(file.close)
            yield file
            on_error.pop_all()
    except OSError as error:
        raise LaunchError(f"cannot write {name}: {reason_of(error)}") from error


class RunLog(Watcher):
    """A log of one JSON object per line."""

    def __init__(self, path: Path, header: Mapping[str, Any], incarnation: int = 0) -> None:
        """Open the log; a restarted process appends to the log of its previous incarnation."""
        self.name = f"the run log {path}"
        self._start = time.monotonic()
        with begun(self.name, path, append=bool(incarnation)) as self._file:
            self._write({"event": "start", **header})

    def _write(self, content: Mapping[str, Any]) -> None:
        elapsed = round(time.monotonic() - self._start, 6)
        self._file.write((json.dumps({"elapsed_s": elapsed, **content}) + "\n").encode())

    def note(self, step: int, figures: Figures) -> None:
        self._write({"event": "step", "step": step, **figures})

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        self._write({"event": event, **content})

    def close(self) -> None:
        with contextlib.closing(self._file):
            self._write({"event": "end"})


class TensorBoard(Watcher):
    """A writer of scalars for TensorBoard.

    Records are written here, because torch's ``SummaryWriter`` thread ends at the first full disk.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise LaunchError(
                "TensorBoard was asked for but is not installed: pip install "
                "'slipstream[tensorboard]'"
            ) from error
        self.name = f"TensorBoard's events in {directory}"
        self._event: Any = Event
        self._summary: Any = Summary
        now_ns, host = time.time_ns(), socket.gethostname()
        name = f"events.out.tfevents.{now_ns // 10**9:010d}.{host}.{os.getpid()}.{now_ns}"
        with begun(self.name, directory / name) as file:
            self._writer: Any = RecordWriter(file)
            self._write(file_version="brain.Event:2")

    def _write(self, **content: Any) -> None:
        event = self._event(wall_time=time.time(), **content)
        self._writer.write(event.SerializeToString())

    def note(self, step: int, figures: Figures) -> None:
        values = [
            self._summary.Value(tag=f"slipstream/{name}", simple_value=value)
            for name, value in figures.items()
        ]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()


class Prometheus(Watcher):
    """A server of gauges at http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise LaunchError(
                "Prometheus was asked for but its client is not installed: pip install "
                "'slipstream[prometheus]'"
            ) from error
        self.name = f"Prometheus' metrics at port {port}"
        self._registry = prometheus_client.CollectorRegistry()
        self._gauge = prometheus_client.Gauge
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr="127.0.0.1", registry=self._registry
            )
        except OSError as error:
            raise LaunchError(
                f"Prometheus cannot listen on port {port}: {error.strerror}; choose another"
            ) from error

    def note(self, step: int, figures: Figures) -> None:
        for name, value in {"step": step, **figures}.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(
                    f"slipstream_{name}", f"slipstream {name}", registry=self._registry
                )
            self._gauges[name].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
