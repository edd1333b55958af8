"""The interface of training modes: what differs between ways to train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.consistency.leases import Batch
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.planning.table import as_tables, as_text
from slipstream.runtime.figures.replica_reports import Difference, ReplicaReport
from slipstream.runtime.figures.summary import TrainingFigures, WorkerFigures
from slipstream.torch.tensors.inventory import whole_vector
from slipstream.torch.tensors.mean_weights import MeanWeights, by_name_of
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.swapped_weights import outside_of


class TrainingMode(ABC):
    """One way to train; whole when its constructor returns.

    The training thread calls it: the constructor, maybe ``load``, then ``next_step``,
    ``begin_step`` and ``end_step`` around each step of ``job.steps``, any of the others between
    steps, at the end ``finish``, and ``close`` however the job ends. A mode is of a job, not of a
    pair: flushing, saving and ending join all pairs. Methods have defaults for a process that
    exchanges nothing.

    Attributes:
        pairs: Models, and the optimizers that the loop uses. The first pair's steps are the job's.
        plans: By pair: the decisions for its tensors.
        block: The call in whose block the models have other weights; empty outside of one.
    """

    pairs: tuple[Pair, ...] = ()
    plans: Sequence[Plan] = ()
    block: str = ""

    # ---- steps

    @property
    @abstractmethod
    def committed(self) -> int:
        """Steps completed; rounds committed, where a worker may miss some."""

    @property
    def own_steps(self) -> int:
        """Steps of this worker, whether they counted or not."""
        return self.committed

    @property
    def begun(self) -> bool:
        """Whether any pair has made a step here, or continues from a checkpoint."""
        return self.own_steps > 0

    @property
    def rejoined(self) -> bool:
        """Whether training had begun without this worker, which has taken no step since."""
        return False

    def next_step(self) -> int:
        """Return the number of this worker's next step; may wait until it is known."""
        return self.committed

    def begin_step(self) -> None:
        """Note that the loop begins a step."""
        return

    def end_step(self, step: int) -> None:
        """Note that the loop has ended a step.

        Raises:
            RuntimeFault: The step was never made.
        """
        if self.committed == step:
            raise RuntimeFault(f"step {step} of job.steps ended without optimizer.step()")

    @abstractmethod
    def lease(self, batches: int, returned: int) -> Batch:
        """Return the next batch of an epoch of ``batches``.

        Args:
            returned: How many of the last batches are given back unused.
        """

    # ---- gradients

    def accumulate(self) -> AbstractContextManager[None]:
        """Only accumulate locally in backward passes within."""
        return nullcontext()

    def leaving_during_backward(self, pair: int) -> AbstractContextManager[None]:
        """Send one pair's gradients during backward passes within."""
        return nullcontext()

    def ready(self, pair: int, tensor: int) -> None:
        """Take a final gradient that no backward pass of torch has made."""
        return

    # ---- weights

    def wait(self) -> None:
        """Wait until this worker's weights are up to date."""
        return

    def flush(self) -> None:
        """Wait until every worker has all updates of all workers; every rank calls it."""
        self.wait()

    def finish(self) -> None:
        """Give all workers the last weights; the loop is over on all of them."""
        self.wait()

    @contextmanager
    def frozen(self, block: str) -> Iterator[None]:
        """Write no weights that arrive into the models within: they have other weights.

        Args:
            block: The user's call.
        """
        before, self.block = self.block, block
        try:
            yield
        finally:
            self.block = before

    def refuse_in_block(self, call: str) -> None:
        """Refuse a call that would take other weights for those in training.

        Raises:
            RuntimeFault: The models have other weights.
        """
        if self.block:
            raise outside_of(call, self.block)

    def mean_weights(self) -> MeanWeights:
        """Return the mean of all workers' weights of the first pair, and their distance from it."""
        model = self.pairs[0].model
        return MeanWeights(by_name_of(model, whole_vector(model)), 0.0)

    def averages(self) -> list[dict[str, Tensor]]:
        """Return averaged weights by pair and parameter's name; empty if none are kept."""
        return [{} for _ in self.pairs]

    def outer_weights(self) -> Sequence[Mapping[str, Tensor]] | None:
        """Return the weights that all workers share, by pair and parameter's name.

        None if these are in the models.

        Raises:
            ConfigError: There are no such weights.
        """
        return None

    # ---- checkpoints

    @abstractmethod
    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write a checkpoint that also holds ``facts``."""

    @abstractmethod
    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """Continue from a checkpoint.

        Args:
            takes_nonfinite: Also if some of it is NaN or infinite.
        """

    # ---- figures

    def figures(self) -> TrainingFigures:
        """Return the cost of this worker's training so far."""
        return TrainingFigures()

    def accounts(self) -> dict[str, Any]:
        """Return what servers and channels report: rounds, ages of gradients, partial exchange."""
        return {}

    def replica_reports(self) -> list[ReplicaReport | None]:
        """Return sums of this worker's weights by pair, where all workers' are equal."""
        return []

    def difference(self, figures: Sequence[WorkerFigures]) -> Difference | None:
        """Return the first difference of replicas that should be equal, on rank 0.

        Args:
            figures: All workers', at the end of the run.
        """
        return None

    def plan_table(self) -> str:
        """Return the plans as text."""
        return as_tables([as_text(plan.rows({})) for plan in self.plans])

    def close(self) -> None:
        """Remove this mode's hooks: models and optimizers are ordinary ones again."""
        return
