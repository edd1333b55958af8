"""The metrics of a job, as its loop sees them."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.job_figures import JobFigures
from slipstream.runtime.figures.summary import combine
from slipstream.runtime.figures.telemetry import Watcher
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.servers.accounts import staleness_text
from slipstream.torch.distribute.training import Training
from slipstream.torch.modes.undistributed import Undistributed


class JobMetrics:
    """The part of a job that records and shows metrics."""

    def __init__(self, env: Environment) -> None:
        self._training = Training(Undistributed())
        self._figures = JobFigures(env)

    def record(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        accuracy: float | torch.Tensor | None = None,
        samples: int = 0,
        **figures: float,
    ) -> None:
        """Record metrics of this step for the summary, the run log and other outputs."""
        given = {"loss": loss, "accuracy": accuracy, **figures}
        self._figures.record(self._training, given, samples)

    def watch(self, watcher: Watcher) -> None:
        """Send the metrics that rank 0 records to one more output, beside the run log.

        Every rank may call it, before or after ``distribute``; the watchers of other ranks are not
        used. If a watcher fails, slipstream warns once and training goes on. ``watcher.close`` is
        called at the end of the job. ``slipstream.integrations`` has watchers for MLflow, Weights &
        Biases and OpenTelemetry.

        >>> import slipstream
        >>> class Printed(slipstream.Watcher):
        ...     def note(self, step, figures):
        ...         print(step, figures["loss"])
        >>> model = torch.nn.Linear(2, 1)
        >>> with slipstream.init() as job:
        ...     job.watch(Printed())
        ...     model, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        ...     optimizer.step()
        ...     job.record(loss=0.5)
        1 0.5

        Raises:
            ConfigError: it is not a ``slipstream.Watcher``.
        """
        if not isinstance(watcher, Watcher):
            raise ConfigError(
                f"job.watch takes a slipstream.Watcher, not {type(watcher).__name__}: derive from "
                "it and define note(step, figures)"
            )
        self._figures.watch(watcher)

    def stats(self) -> dict[str, Any]:
        """This worker's metrics so far; ``summary`` holds those of all workers, at the end."""
        return combine([self._figures.of_worker(self._training)]) | self._training.mode.accounts()

    def staleness_table(self) -> str:
        """How many updates old gradients were when they were applied, layer by layer."""
        return staleness_text(self._training.mode.accounts().get("staleness", {}))
