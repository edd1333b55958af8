"""A process's handle of a job; ``Job.distribute`` makes a training loop data-parallel."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import torch
from torch import nn

from slipstream.errors import ConfigError, RuntimeFault
from slipstream.job_end import JobEnd, finish
from slipstream.job_figures import number
from slipstream.job_metrics import JobMetrics
from slipstream.plan import Plan
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.event_log import Field, log_event
from slipstream.sessions.default_group import DefaultGroup
from slipstream.sessions.protocol import Session
from slipstream.sessions.request import Request
from slipstream.strategy import Strategy
from slipstream.torch.distribute.exchange import EndsStep, Exchange, HeldTensors, checked
from slipstream.torch.distribute.sampler import LeasedBatches
from slipstream.torch.distribute.training import Training
from slipstream.torch.tensors.mean_weights import MeanWeights
from slipstream.torch.tensors.pairs import Pair

logger = logging.getLogger(__name__)


class Job(JobMetrics):
    """This process's handle of a training job; use it as a context manager.

    ``slipstream.init`` makes it. Its session connects this process to the others; its training,
    which ``distribute`` opens, holds the models.

    >>> import slipstream
    >>> model = nn.Linear(2, 1)
    >>> with slipstream.init() as job:  # alone: a world of one
    ...     model, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    ...     for step in job.steps(3):
    ...         optimizer.zero_grad()
    ...         loss = model(torch.ones(4, 2)).square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         job.record(loss=loss, samples=4)
    >>> job.rank, job.world_size, job.step, job.summary["samples"]
    (0, 1, 3, 12)

    Attributes:
        summary: the metrics of the whole job, on rank 0, after the end of the ``with`` block.
    """

    def __init__(self, env: Environment, session: Session, presence: Presence) -> None:
        super().__init__(env)
        self.summary: dict[str, Any] | None = None
        self._env, self._session, self._presence = env, session, presence
        self._request: Request | None = None
        self._default_group = DefaultGroup(env, session.group_store)
        self._sampled = False
        self._explained: tuple[BaseException | None, RuntimeFault | None] = (None, None)
        self._end = JobEnd(
            env,
            session,
            presence,
            self._figures,
            self._default_group,
            self._finish,
        )
        presence.join() if self.world_size > 1 else presence.begin()

    # ---- rank, size, plan

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._env.rank

    @property
    def local_rank(self) -> int:
        """This worker's number on its host, from 0; which GPU it uses, for example."""
        return self._env.local_rank

    @property
    def world_size(self) -> int:
        """How many workers the job was started with."""
        return self._env.world_size

    @property
    def step(self) -> int:
        """Steps completed; rounds committed, where a worker may miss some."""
        return self._training.mode.committed

    @property
    def plan(self) -> Plan:
        """The decisions for every tensor; with several pairs, those of the first pair."""
        return self._training.plan

    def plan_table(self) -> str:
        """How each layer is sent, and why; layers that choose by batch size as of now."""
        return self._training.plan_table()

    # ---- the second line

    @overload
    def distribute(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    @overload
    def distribute(
        self,
        model: Sequence[tuple[nn.Module, torch.optim.Optimizer]],
        optimizer: Strategy | str | None = None,
        strategy: Strategy | str | None = None,
    ) -> list[tuple[nn.Module, torch.optim.Optimizer]]: ...

    def distribute(self, model: Any, optimizer: Any = None, strategy: Any = None) -> Any:
        """Make models data-parallel: rank 0's weights on all ranks, gradients averaged.

        ``job.distribute(model, optimizer, strategy)`` takes one model and its optimizer.
        ``job.distribute([(generator, first), (critic, second)], strategy)`` takes several pairs,
        each of which has its own steps. A later call adds pairs, before the first step.

        Args:
            model: a model, or a list of pairs.
            optimizer: its optimizer; after a list of pairs, the strategy.
            strategy: the same for all pairs. By default the one of the command line (or
                ``SLIPSTREAM_STRATEGY``), else ``push_pull``.

        Returns:
            The same module, and an optimizer for loops and schedulers; for a list, such pairs.

        Raises:
            ConfigError: this cannot be trained; the message gives the reason and an alternative.
        """
        if not isinstance(model, list | tuple):
            return tuple(self._add([(model, optimizer)], strategy)[0])
        return [tuple(pair) for pair in self._add(model, strategy or optimizer)]

    def exchange(
        self,
        tensors: Mapping[str, Any],
        strategy: Strategy | str | None = None,
        *,
        outputs_last: bool = False,
    ) -> Exchange:
        """Average gradients of tensors that no torch module holds: another framework's.

        ``slipstream.jax`` is made of it. The framework computes gradients and updates weights, and
        saves them: ``job.save``, ``job.load`` and ``job.consensus`` do not know them. Further
        calls, before the first step, add exchanges with steps of their own.

        Args:
            tensors: by name, in the order in which a forward pass uses them: tensors, or any
                arrays with ``__dlpack__``, of floating-point numbers in host memory.
            strategy: one in which workers update, in rounds of all workers; by default as for
                ``distribute``.
            outputs_last: whether a kernel's outputs are its last dimension, as in JAX, and not its
                first; for ``low_rank``, which takes kernels for matrices.

        Raises:
            ConfigError: the strategy cannot do this, or ranks have different tensors.
        """
        alone = self.world_size == 1
        held = HeldTensors(checked(tensors), alone=alone, outputs_last=outputs_last)
        _, optimizer = self._add([(held, EndsStep(held))], strategy)[0]
        number = len(self._training.mode.pairs) - 1
        return Exchange(
            held, lambda tensor: self._training.mode.ready(number, tensor), optimizer.step
        )

    def _refuse_exchanged(self, call: str) -> None:
        if any(isinstance(pair.model, HeldTensors) for pair in self._training.mode.pairs):
            raise ConfigError(
                f"job.{call} does not know the weights of job.exchange (or slipstream.jax), which "
                "are in your loop: save and load them there, as in one process"
            )

    def _add(self, given: Sequence[Any], strategy: Strategy | str | None) -> Sequence[Pair]:
        """Distribute these pairs together with those of earlier calls."""
        before = self._request
        if self._training.mode.begun or (before is not None and self._sampled):
            raise ConfigError(
                "job.distribute comes before the first step, job.load and job.sampler: give all "
                "pairs of model and optimizer at once, or one after the other before these"
            )
        env = self._env
        request = Request.extend(before, given, strategy, env.strategy, env.parts)
        self._training = Training(self._session.open(request.pairs, request.strategy))
        if before is None:
            self._figures.begin(request.name)
        self._request = request
        plan, servers = self.plan, self.plan.cluster.servers
        counts = {"tensors": len(plan.specs), "chunks": len(plan.chunks), "servers": servers}
        self._log("plan_chosen", strategy=request.name, **counts)
        return self._training.mode.pairs[-len(given) :]

    # ---- the loop

    def steps(self, total: int, *, scheduler: Any = None) -> Iterator[int]:
        """The steps until ``total`` are completed, by number: ``for step in job.steps(1000):``.

        Where rounds do not need every worker, these are the rounds that this worker takes part in,
        and the loop ends on all workers when ``total`` rounds are committed.

        Args:
            total: counted from the first step of the training, also after ``load``.
            scheduler: one that the loop steps once per step. ``steps`` also steps it for rounds
                that this worker takes no part in.

        Raises:
            RuntimeFault: a pass of the loop ended without ``optimizer.step()``.
        """
        # A generator: it uses the training that is current when the loop begins.
        yield from self._training.steps(total, scheduler)

    def sampler(
        self, dataset: Sized, batch_size: int = 1, *, shuffle: bool = True, seed: int = 0
    ) -> LeasedBatches:
        """Batches that count once per epoch each, for
        ``DataLoader(dataset, batch_sampler=job.sampler(dataset, 32))``.

        Where gradients may be dropped, batches are leased from the whole set, and dealt again if
        their gradient was dropped. Use one batch per step; every rank must pass the same arguments.

        Raises:
            ConfigError: it was called before, or before ``distribute``.
        """
        if self._sampled:
            raise ConfigError(
                "job.sampler was called twice: the batches of one data set are dealt to steps; "
                "use a plain DataLoader for others, such as those of an evaluation"
            )
        leased = self._training.sampler(
            dataset, batch_size, workers=self.world_size, shuffle=shuffle, seed=seed
        )
        self._sampled = True
        return leased

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes within only accumulate locally; the next one outside exchanges the
        sum."""
        return self._training.mode.accumulate()

    def no_sync(self) -> AbstractContextManager[None]:
        """``accumulate``, by the name that DistributedDataParallel has for it."""
        return self.accumulate()

    def backward_for(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """With several pairs: backward passes within belong to one optimizer.

        Its gradients are sent while backward runs, not only at its ``step()``; gradients of other
        pairs, whose models the pass may run through, are not sent. With one pair it has no effect.

        Args:
            optimizer: as ``distribute`` returned it.

        Raises:
            ConfigError: no pair has this optimizer.
        """
        return self._training.backward_for(optimizer)

    def wait(self) -> None:
        """Wait until all weights are up to date; needed before reading one outside of a forward."""
        self._training.mode.wait()

    def flush(self) -> None:
        """Wait until every worker has all updates of all workers; every rank must call it.

        In partial exchange (``ako``) all workers then have the same weights, bit for bit; with
        ``diloco`` the mean of their weights. Elsewhere it is ``wait``.
        """
        self._training.mode.flush()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank; every rank must call it.

        For decisions that all ranks must follow: ``if job.broadcast(accuracy > 0.99): break``.
        The value is plain data: numbers, text, lists, dicts, None. Where learners share memory
        (``gadei``), it is the value of the first learner that calls it, and no learner waits.
        """
        return self._session.broadcast(value)

    def fault_behind(self, error: BaseException) -> RuntimeFault | None:
        """The job's fault, if it is why a collective of torch has failed.

        For frameworks that handle errors before the end of the ``with`` block, which raises it.

        Args:
            error: of torch's process group. Its reason arrives over other connections, and this
                waits for it, ``silence_limit_s`` and 2 s at most. For other errors the result is
                None, at once.
        """
        if error is not self._explained[0]:
            self._explained = error, self._session.fault_behind(error)
        return self._explained[1]

    def init_process_group(self, backend: str = "gloo") -> None:
        """Make torch's default process group, of all workers; every rank must call it.

        For what needs one beside the training: torchmetrics, samplers, ``gather``. It ends with the
        job. With gloo the ranks meet over the job's links, with other backends in its store.

        >>> import slipstream
        >>> with slipstream.init() as job:
        ...     job.init_process_group()
        ...     torch.distributed.get_world_size()
        1

        Raises:
            ConfigError: there is another default group, or this worker was started again.
        """
        self._default_group.open(backend)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank, on every rank; every rank must call it.

        The value is plain data, as for ``share``. Workers that were lost are left out.

        Raises:
            ConfigError: learners that share memory (``gadei``) do not wait for each other.
        """
        return self._session.gather("gather", value)

    def mean(self, value: float | torch.Tensor) -> float:
        """The mean of every rank's number, on every rank; every rank must call it.

        For schedules that follow a loss: ``plateau.step(job.mean(loss))`` lowers the learning rate
        on all ranks in the same step, which synchronous systems need.

        Raises:
            ConfigError: it is not one number; or see ``gather``.
        """
        given = self._session.gather("mean", number(f"job.mean({value!r})", value))
        return math.fsum(given) / len(given)

    def consensus(self) -> MeanWeights:
        """The mean of all workers' weights and their distance from it; every rank must call it."""
        self._refuse_exchanged("consensus")
        self._training.mode.refuse_in_block("job.consensus()")
        return self._training.mode.mean_weights()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Within, the models have the averaged weights (of a strategy with ``averaged=``).

        Raises:
            ConfigError: the strategy averages nothing.
        """
        return self._training.averaged_weights()

    def outer_weights(self) -> AbstractContextManager[None]:
        """Within, the models have the weights that all workers share (``diloco`` has these)."""
        return self._training.outer_weights()

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Within, the loop may put other weights into the models: averaged ones, for example.

        The models have copies of their weights (parameters and buffers) within the block, and after
        it their own, with all that other workers did to them meanwhile. Other workers train on.
        ``ako`` and ``gadei`` need it, since their weights change at any time; it works with all.

        >>> import slipstream
        >>> model = nn.Linear(2, 1)
        >>> with slipstream.init() as job:
        ...     model, _ = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        ...     before = model.weight.detach().clone()
        ...     with job.swapped_weights():
        ...         _ = nn.init.zeros_(model.weight)  # and evaluate
        ...     torch.equal(model.weight, before)
        True

        Raises:
            ConfigError: the weights are another framework's, which holds them.
        """
        self._refuse_exchanged("swapped_weights")
        return self._training.swapped_weights()

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; every rank must call it, rank 0 writes the file.

        With local steps every rank writes a part beside it. Where workers may miss rounds, rank 0
        writes the state of the servers, and the other ranks' calls do nothing.

        Raises:
            CheckpointError: the file cannot be written.
        """
        self._refuse_exchanged("save")
        self._training.mode.refuse_in_block("job.save()")
        facts = {"step": self.step, "strategy": self._figures.strategy, "workers": self.world_size}
        self._training.mode.save(Path(path), facts)
        if self.rank == 0:
            self._log("checkpoint_written", path=os.fspath(path), step=self.step)

    def load(
        self, path: str | os.PathLike[str], *, nonfinite: Literal["refuse", "pass"] = "refuse"
    ) -> None:
        """Continue from a checkpoint; every rank must call it, rank 0 reads the file.

        Any number of workers and servers may have written it. Random generators are restored on
        ranks that the writing job had too. A restarted worker already has the other workers'
        weights, which are newer: it reads nothing.

        Args:
            nonfinite: what to do with NaN or infinity in trained weights, in averages or momenta of
                them, or in the optimizer's state: "refuse" the checkpoint, of which nothing is then
                loaded, or "pass". Buffers and frozen parameters may have such values in any case.

        Raises:
            CheckpointError: the file cannot be read, is for another model or optimizer, or has
                values that are not finite.
        """
        self._refuse_exchanged("load")
        self._training.mode.refuse_in_block("job.load()")
        if nonfinite not in ("refuse", "pass"):
            raise ConfigError(f"job.load(nonfinite={nonfinite!r}): choose 'refuse' or 'pass'")
        self._training.mode.load(Path(path), takes_nonfinite=nonfinite == "pass")
        self._log("checkpoint_loaded", path=os.fspath(path), step=self.step)

    # ---- the end

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended_well = isinstance(error, SystemExit) and not error.code
        try:
            fault = None if error is None else self.fault_behind(error)
        except BaseException as interrupted:  # Ctrl-C during its wait
            self._end.end(interrupted)
            raise
        self._end.end(fault or (None if ended_well else error))
        if fault is not None:
            raise fault from error

    def _finish(self) -> None:
        parts = (self._env, self._session, self._training, self._figures)
        self.summary = finish(*parts, dealt=self._sampled)

    def _log(self, event: str, **fields: Field) -> None:
        log_event(logger, event, level=logging.INFO, rank=self.rank, **fields)
