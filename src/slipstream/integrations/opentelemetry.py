"""A job's metrics by OpenTelemetry: ``job.watch(OpenTelemetry())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import slipstream

try:
    from opentelemetry import metrics, trace
except ImportError as error:
    raise ImportError(
        f"slipstream.integrations.opentelemetry needs OpenTelemetry ({error}): "
        "pip install 'slipstream[opentelemetry]'"
    ) from error


class OpenTelemetry(slipstream.Watcher):
    """A watcher with gauges ``slipstream.loss`` and so on; attributes are strategy and workers.

    Metrics are sent to the process's meter provider. Events, such as a failure of the job, are
    added to the span that the loop has open, if there is one.
    """

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        if event == "start":
            self._attributes, self._gauges = dict(content), dict[str, Any]()
            self._meter = metrics.get_meter("slipstream", slipstream.__version__)
        attributes = {
            name: value for name, value in content.items() if isinstance(value, str | int)
        }
        trace.get_current_span().add_event(f"slipstream.{event}", attributes)

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in {"step": step, **figures}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(f"slipstream.{name}")
            self._gauges[name].set(value, self._attributes)
