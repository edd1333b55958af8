"""A job's metrics in MLflow: ``job.watch(MLflow())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import slipstream

try:
    import mlflow
except ImportError as error:
    raise ImportError(
        f"slipstream.integrations.mlflow needs MLflow ({error}): pip install 'slipstream[mlflow]'"
    ) from error


class MLflow(slipstream.Watcher):
    """A watcher that logs ``slipstream/loss`` and so on; strategy and workers are parameters.

    Metrics are logged to the run that is open when training begins, else to a run of its own, which
    ends with the job, and is never the active one: the loop may begin another meanwhile.
    """

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        if event == "start":
            self._own, self._status = mlflow.active_run() is None, "FINISHED"
            self._run = (mlflow.active_run() or mlflow.start_run()).info.run_id
            if self._own:
                mlflow.end_run("RUNNING")  # it continues, but is no longer the active one
            parameters = {f"slipstream/{name}": value for name, value in content.items()}
            mlflow.log_params(parameters, run_id=self._run)
        if event == "failed":
            self._status = "FAILED"

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        values = {f"slipstream/{name}": value for name, value in figures.items()}
        mlflow.log_metrics(values, step=step, run_id=self._run)

    def close(self) -> None:
        if self._own:
            mlflow.MlflowClient().set_terminated(self._run, self._status)
