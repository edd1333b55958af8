"""The interface between ``Job`` and the kind of job that its process is part of.

``slipstream.init`` makes a ``Session``: the connection to the other processes. ``job.distribute``
opens a ``TrainingMode`` in it, since the strategy is known only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from slipstream.errors import RuntimeFault, SlipstreamError
from slipstream.runtime.figures.summary import WorkerFigures
from slipstream.sessions.default_group import GroupStore
from slipstream.strategy import Strategy
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.tensors.pairs import Pair


class Session(Protocol):
    """This process's connection to the other processes of a job."""

    def broadcast(self, value: Any) -> Any:
        """One process's value, on all of them: see ``Job.share``."""

    def group_store(self, backend: str) -> GroupStore:
        """Where torch's default group of this job's ranks meets; every rank calls it."""

    def gather(self, call: str, value: Any) -> list[Any]:
        """Every process's value, on all of them; ``call`` is the method of ``Job``.

        Raises:
            ConfigError: the processes of this job do not wait for each other.
        """

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> TrainingMode:
        """Begin to train.

        May be called again before the first step, with the earlier pairs first. Objects that the
        loop already holds stay valid.

        Args:
            pairs: all models with their optimizers.
            strategy: the same for all pairs.

        Raises:
            ConfigError: this cannot be trained here; the message gives the fix.
        """

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        """Leave the job after a normal end.

        Args:
            figures: of this worker.

        Returns:
            The job's summary on the process that has all metrics, else None.
        """

    def fault_behind(self, error: BaseException) -> RuntimeFault | None:
        """The job's fault, if it is why torch's own process groups have failed; may wait for it."""

    def abort(self, error: BaseException) -> None:
        """Send the other processes the error that ends this process."""

    def reports(self, error: SlipstreamError) -> bool:
        """Whether this process is the one to print an uncaught error."""

    def close(self) -> None:
        """Free all resources, however the job ended."""
