"""The interfaces between ``Job`` and the kind of job that its process is part of.

``slipstream.init`` makes a ``Session``: the connection to the other processes. ``job.distribute``
opens a ``Training`` in it: one strategy, and one or several pairs of a model and an optimizer. The
strategy is known only then, so these are two interfaces.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, RuntimeFault, SlipstreamError
from slipstream.plan import Plan
from slipstream.planning.table import as_tables, as_text
from slipstream.runtime.figures.replica_reports import Difference, ReplicaReport
from slipstream.runtime.figures.summary import Traffic, WorkerFigures
from slipstream.sessions.default_group import GroupStore
from slipstream.sessions.request import own_optimizer
from slipstream.strategy import Strategy
from slipstream.systems import call_of
from slipstream.torch.distribute.exchange import HeldTensors
from slipstream.torch.distribute.sampler import LeasedBatches
from slipstream.torch.tensors.fingerprint import Fingerprints, fingerprints_of
from slipstream.torch.tensors.inventory import as_texts, group_settings, whole_vector
from slipstream.torch.tensors.mean_weights import MeanWeights, by_name_of
from slipstream.torch.tensors.pairs import Pair, distinct_models
from slipstream.torch.tensors.swapped_weights import copies, outside_of, swapped_in, without_steps

__all__ = ["Pair", "Session", "Training", "TrainingFigures"]


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """The cost of one worker's training so far."""

    servers: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    wait_s: float = 0.0
    refused: int = 0  # frames


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

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> Training:
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


class Training(Protocol):
    """The models in training in a session. The first pair's steps are the job's steps.

    Implementations derive from it: its default methods fit a process that exchanges
    nothing with others.

    Attributes:
        pairs: what the loop uses; empty before ``job.distribute``.
        plans: by pair: the decisions for its tensors.
        block: the call whose block has put other weights into the models; empty outside of one.
    """

    pairs: tuple[Pair, ...] = ()
    plans: Sequence[Plan] = ()
    block: str = ""

    @property
    def plan(self) -> Plan:
        """The decisions for every tensor of the first pair."""
        return self.plans[0]

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
        """The number of this worker's next step; may wait until it is known."""
        return self.committed

    def begin_step(self) -> None:
        """Called when the loop begins a step."""
        return

    def end_step(self, step: int) -> None:
        """Called when the loop has ended a step.

        Raises:
            RuntimeFault: the step was never made.
        """
        if self.committed == step:
            raise RuntimeFault(f"step {step} of job.steps ended without optimizer.step()")

    def steps(self, total: int, scheduler: Any) -> Iterator[int]:
        """The steps until ``total`` are completed: see ``Job.steps``."""
        expected = 0 if self.rejoined else self.committed
        while (step := self.next_step()) < total:
            if scheduler is not None:
                catch_up(scheduler, step - expected)
            self.begin_step()
            yield step
            expected = step + 1
            self.end_step(step)

    @abstractmethod
    def lease(self, batches: int, returned: int) -> Batch:
        """The next batch of an epoch of ``batches``; ``returned`` batches are given back unused."""

    def sampler(
        self, dataset: Sized, batch_size: int, *, workers: int, shuffle: bool, seed: int
    ) -> LeasedBatches:
        """Batches that count once per epoch each: see ``Job.sampler``."""
        return LeasedBatches(
            dataset,
            batch_size,
            self.lease,
            lambda: self.own_steps,
            workers=workers,
            shuffle=shuffle,
            seed=seed,
        )

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes within only accumulate locally."""
        return nullcontext()

    def backward_for(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Send the gradients of the pair with this optimizer during backward passes within."""
        for number, pair in enumerate(self.pairs):
            if optimizer in (pair.optimizer, own_optimizer(pair.optimizer)):
                return self.leaving_during_backward(number)
        raise ConfigError("job.backward_for takes an optimizer that job.distribute has returned")

    def leaving_during_backward(self, pair: int) -> AbstractContextManager[None]:
        """Send one pair's gradients during backward passes within."""
        return nullcontext()

    def ready(self, pair: int, tensor: int) -> None:
        """A gradient that no backward pass of torch has made is final."""
        return

    def wait(self) -> None:
        """Wait until this worker's weights are up to date."""
        return

    def flush(self) -> None:
        """Wait until every worker has all updates of all workers."""
        self.wait()

    def mean_weights(self) -> MeanWeights:
        """The mean of all workers' weights of the first pair, and their distance from it."""
        model = self.pairs[0].model
        return MeanWeights(by_name_of(model, whole_vector(model)), 0.0)

    def averages(self) -> list[dict[str, torch.Tensor]]:
        """By pair: averaged weights by the parameter's name; empty if none are kept."""
        return [{} for _ in self.pairs]

    def keeping_apart(self, block: str) -> AbstractContextManager[None]:
        """Within, the models have other weights: none that arrive are written into them."""
        return nullcontext()

    def refuse_in_block(self, call: str) -> None:
        """Refuse a call that would take other weights for those in training.

        Raises:
            RuntimeFault: The models have other weights.
        """
        if self.block:
            raise outside_of(call, self.block)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within, the models have the averaged weights."""
        if self.plan.update.average is None:
            raise ConfigError("nothing is averaged: give the strategy averaged=0.9999, or the like")
        self.wait()
        return self._swapped("job.averaged_weights()", self.averages())

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Within, the models have copies of their weights, which the loop may change."""
        if not any(plan.local_steps for plan in self.plans):  # else the weights are its own
            self.wait()
        whole = {id(model): copies(model) for model in distinct_models(self.pairs)}
        return self._swapped(
            "job.swapped_weights()", [whole.pop(id(model), {}) for model, _ in self.pairs]
        )

    def outer_weights(self) -> AbstractContextManager[None]:
        """Within, the models have the outer weights; those of one process are its own."""
        return nullcontext()

    @contextmanager
    def _swapped(self, block: str, by_pair: Sequence[Mapping[str, torch.Tensor]]) -> Iterator[None]:
        """Within, the models have these weights, given by name.

        Args:
            block: the user's call.
        """
        with self.keeping_apart(block), ExitStack() as stack:
            for (model, optimizer), weights in zip(self.pairs, by_pair, strict=True):
                stack.enter_context(without_steps(optimizer, block))
                stack.enter_context(swapped_in(model, weights))
            before, self.block = self.block, block
            try:
                yield
            finally:
                self.block = before

    @abstractmethod
    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write a checkpoint that also holds ``facts``."""

    @abstractmethod
    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """Continue from a checkpoint.

        Args:
            takes_nonfinite: Also if some of it is NaN or infinite.
        """

    def figures(self) -> TrainingFigures:
        """The cost of this worker's training so far."""
        return TrainingFigures()

    def accounts(self) -> dict[str, Any]:
        """What servers and channels report: rounds, ages of gradients, partial exchange."""
        return {}

    def fingerprints(self) -> Fingerprints | None:
        """Digests of this worker's weights, if it has any."""
        models = [m for m in distinct_models(self.pairs) if not isinstance(m, HeldTensors)]
        return fingerprints_of(models) if models else None

    def settings(self) -> list[dict[str, str]]:
        """The optimizers' settings as text, by parameter group."""
        groups = [group for pair in self.pairs for group in pair.optimizer.param_groups]
        return [as_texts(group_settings(group)) for group in groups]

    def replica_reports(self) -> list[ReplicaReport | None]:
        """By pair, sums of this worker's weights, where all workers' are equal."""
        return []

    def difference(self, figures: Sequence[WorkerFigures]) -> Difference | None:
        """On rank 0: the first difference of replicas that should be equal.

        Args:
            figures: All workers', at the end of the run.
        """
        return None

    def plan_table(self) -> str:
        """The plan as text."""
        return as_tables([as_text(plan.rows({})) for plan in self.plans])

    def finish(self) -> None:
        """Called when the loop is over: all workers get the last weights."""
        self.wait()


def never_stepped(strategy: Strategy, *, pairs: int = 1, over: bool) -> str:
    """What to tell a loop that updates weights by hand, where this exchanges nothing.

    Args:
        over: whether the loop has ended.
    """
    called = "was called" if over else "is called, and weights change,"
    trains = "has trained" if over else "trains"
    with_one_pair = (
        ", or use push_pull() or allreduce(), where .grad is the mean gradient when backward() "
        "returns, and the loop may use it as it likes"
    )
    return (
        f"backward() {called} without optimizer.step(), and with {call_of(strategy)} nothing is "
        f"exchanged before that: every worker {trains} on its own; let the optimizer that "
        f"job.distribute has returned make the steps{with_one_pair if pairs == 1 else ''}"
    )


def catch_up(scheduler: Any, steps: int) -> None:
    """Step a scheduler for steps that this worker missed; torch would warn if it has made none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps):
            scheduler.step()
