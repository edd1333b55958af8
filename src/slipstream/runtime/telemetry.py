"""Where a run can be watched: a JSONL log, TensorBoard, Prometheus; each only when asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from slipstream.errors import LaunchError

Figures = Mapping[str, float]


class Watcher(Protocol):
    """Takes the figures of a step."""

    def note(self, step: int, figures: Figures) -> None: ...

    def tell(self, event: str, content: Mapping[str, Any]) -> None:
        """Something that is no step's figures; whoever shows only these leaves it."""
        ...

    def close(self) -> None: ...


class RunLog:
    """One JSON object a line."""

    def __init__(self, path: Path, header: Mapping[str, Any], life: int = 0) -> None:
        """One that was started again goes on with the log of its life before."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if life else "w", buffering=1)
        except OSError as error:
            raise LaunchError(f"cannot write the run log {path}: {error.strerror}") from error
        self._begun = time.monotonic()
        self._write({"event": "start", **header})

    def _write(self, content: Mapping[str, Any]) -> None:
        elapsed = round(time.monotonic() - self._begun, 6)
        self._file.write(json.dumps({"elapsed_s": elapsed, **content}) + "\n")

    def note(self, step: int, figures: Figures) -> None:
        self._write({"event": "step", "step": step, **figures})

    def tell(self, event: str, content: Mapping[str, Any]) -> None:
        self._write({"event": event, **content})

    def close(self) -> None:
        self._write({"event": "end"})
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LaunchError(
                "TensorBoard was asked for but is not installed: pip install "
                "'slipstream[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(directory))

    def note(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"slipstream/{name}", value, step)

    def tell(self, event: str, content: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """Gauges at http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise LaunchError(
                "Prometheus was asked for but its client is not installed: pip install "
                "'slipstream[prometheus]'"
            ) from error
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

    def tell(self, event: str, content: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
