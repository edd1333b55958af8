"""A job whose workers are learners on one machine, with weights in shared memory."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, RuntimeFault, SlipstreamError
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.planning.table import as_text
from slipstream.runtime.figures.summary import Traffic, WorkerFigures, combine
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.members.joining import Limits
from slipstream.runtime.members.store import connect_store
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import learner_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.runtime.servers.accounts import ServerFigures, merge_figures
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.runtime.shared_memory.messages import Account, Hello
from slipstream.sessions.default_group import GroupStore
from slipstream.sessions.protocol import Pair, Training, TrainingFigures, never_stepped
from slipstream.sessions.undistributed import Undistributed
from slipstream.strategy import Strategy
from slipstream.systems import call_of
from slipstream.torch.capture.other_steps import OtherSteps, why_not_by_others
from slipstream.torch.capture.outside_parameters import OutsideParameters
from slipstream.torch.capture.remote_optimizer import check_own_state
from slipstream.torch.capture.step_watch import StepWatch
from slipstream.torch.distribute.preparing import check_pairs, prepare_pairs
from slipstream.torch.modes.carried_updates import CarriedUpdates
from slipstream.torch.modes.learner import Learner
from slipstream.torch.modes.learner_state import LearnerState
from slipstream.torch.modes.shared_weights import check_shareable, settings_of, shared_tensors
from slipstream.torch.optimizers.own_step import check_own_step
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import config_fingerprint
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Cluster

logger = logging.getLogger(__name__)


class SharedMemorySession:
    """Implements ``Session`` for a learner; it talks to the launcher."""

    def __init__(
        self, env: Environment, limits: Limits, line: LauncherLine, presence: Presence
    ) -> None:
        log_event(logger, "joined", rank=env.rank, size=env.world_size, host="localhost")
        self._env, self._limits, self._line, self._presence = env, limits, line, presence
        self._shared = 0  # calls of ``share``
        self._training: Training = Undistributed()
        self._opened = ExitStack()
        self._ages: Counter[int] = Counter()

    def broadcast(self, value: Any) -> Any:
        """The value of the first learner that calls it for the n-th time. No learner waits; a
        restarted learner gets the values that the other learners got."""
        self._shared += 1
        return self._line.share(f"share/{self._shared}", value)

    def group_store(self, backend: str) -> GroupStore:
        """Learners have no links: they meet in a store on loopback."""
        return GroupStore(connect_store(self._env, self._limits.start_s))

    def gather(self, call: str, value: Any) -> list[Any]:
        if self._env.world_size == 1:
            return [value]
        raise ConfigError(
            f"job.{call} waits for every rank, and learners that share memory do not wait for each "
            "other: use job.broadcast(value), which gives all learners the value of the first that "
            "calls it"
        )

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> Training:
        method = strategy.method
        if not isinstance(method, SharedMemoryUpdates):
            raise ConfigError(
                f"this job was started for learners that share memory, and the script asks for "
                f"{strategy.name}: start it with --strategy {strategy.name}"
            )
        check_pairs(pairs, strategy)
        ((model, optimizer),) = pairs
        (inventory,) = prepare_pairs(pairs, strategy)
        check_shareable(model, optimizer)
        check_own_step(optimizer)
        check_own_state(optimizer, inventory.trained)
        plan = strategy.plan(inventory.specs, Cluster(self._env.world_size, servers=1))
        self._presence.join()
        learner = self._join(pairs[0], method, plan)
        loop = learner.start()
        pair = Pair(model, loop)
        loop.keeper = LearnerState(pair, learner, self._line)
        self._opened.callback(setattr, loop, "keeper", None)
        if state := loop.own_state():
            loop.keeper.take(state)
        self._ages = learner.ages
        self._training = SharedMemoryTraining(pair, strategy.name, plan, learner, self._line)
        watch = StepWatch(
            inventory.trained.values() if self._env.rank == 0 else (),
            [pair.optimizer],
            stepped=lambda: learner.steps > 0,
            told=never_stepped(strategy, over=False),
        )
        self._opened.callback(watch.close)
        outside = OutsideParameters(
            inventory.trained.values(), (optimizer, loop), is_first=self._env.rank == 0
        )
        self._opened.callback(outside.close)
        why = why_not_by_others(plan, call_of(strategy), pairs=1)
        known = [pair.optimizer, optimizer]
        self._opened.callback(OtherSteps(inventory.trained.items(), known, why).close)
        return self._training

    def _join(self, pair: Pair, method: SharedMemoryUpdates, plan: Plan) -> Learner:
        welcome, descriptor = self._line.join(hello_of(pair, method, plan))
        rank = self._env.rank
        learner = Learner(
            *pair,
            method,
            rank,
            SharedMemory(descriptor),
            welcome.plan,
            self._limits.wait_s,
            FiniteGradients(self._env.nonfinite, rank, lambda: self._line.is_first("nonfinite")),
            lambda value: self._line.share("first weights", value),
        )
        self._opened.callback(learner.close)
        if welcome.fill:
            learner.weights.fill()
        self._line.begin(filled=welcome.fill)
        return learner

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        if not self._training.pairs:
            return combine([figures])
        farewell = self._line.depart(figures.encode(), dict(self._ages))
        if not farewell.figures:
            return None
        summary = combine([WorkerFigures.decode(content) for content in farewell.figures])
        summary["steps"] = self._training.committed
        summary["restarts"] = farewell.restarts
        if farewell.account is not None:
            summary |= as_accounts(farewell.account, Counter())
        return summary

    def fault_behind(self, error: BaseException) -> None:
        return None

    def abort(self, error: BaseException) -> None:
        pass  # the launcher sees this process end

    def reports(self, error: SlipstreamError) -> bool:
        return learner_reports(error, self._env.rank)

    def close(self) -> None:
        self._opened.close()


class SharedMemoryTraining(Training):
    """Steps are updates of the shared weights by any learner."""

    def __init__(
        self, pair: Pair, name: str, plan: Plan, learner: Learner, line: LauncherLine
    ) -> None:
        self.pairs, self.plans, self._name = (pair,), (plan,), name
        self._learner, self._line = learner, line

    @property
    def committed(self) -> int:
        return self._learner.rings.version

    @property
    def own_steps(self) -> int:
        return self._learner.steps

    @property
    def rejoined(self) -> bool:
        """The weights may have many updates without this learner, also from before the job."""
        return self.own_steps == 0

    def end_step(self, step: int) -> None:
        """A pass of the loop need not make a step: other learners make steps too."""

    def wait(self) -> None:
        """Wait until this learner's gradients are applied."""
        self._learner.wait()

    def keeping_apart(self, block: str) -> AbstractContextManager[None]:
        """The model does not change to newer weights; without copies there is nothing to do."""
        updates = self._learner.updates
        return updates.keeping_apart() if isinstance(updates, CarriedUpdates) else nullcontext()

    def lease(self, batches: int, returned: int) -> Batch:
        return Batch(*self._line.lease(batches, returned))

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """The server writes its state; only rank 0's call counts."""
        if self._learner.rank == 0:
            self.wait()
            self._line.save(str(path.absolute()))

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """Load before the first step; the call of one learner counts."""
        if self.own_steps:
            raise ConfigError(f"with {self._name} job.load comes before the first step")
        self._line.load(str(path.absolute()), takes_nonfinite=takes_nonfinite)
        self._learner.begin_anew()

    def plan_table(self) -> str:
        """Of embeddings only used rows are written, where backward can write them."""
        in_rows = self._learner.in_rows
        rows = [
            replace(row, scheme="rows/memory", why="used rows only")
            if row.name in in_rows
            else replace(row, scheme="dense/memory")
            for row in self.plan.rows({})
        ]
        return as_text(rows)

    def figures(self) -> TrainingFigures:
        """Gradients went through memory; nothing was sent."""
        moved = self._learner.moved
        traffic = Traffic(sent=moved, local=moved, by_scheme={"dense/memory": moved})
        return TrainingFigures(traffic=traffic, wait_s=self._learner.wait_s)

    def finish(self) -> None:
        if self.own_steps == 0 and self._learner.had_gradients:
            raise RuntimeFault(never_stepped(self.plan.strategy, over=True))
        self.wait()
        self._line.end_training(self._learner.progress)
        self._learner.take_last()

    def accounts(self) -> dict[str, Any]:
        return as_accounts(self._line.account(), self._learner.ages)


def hello_of(pair: Pair, method: SharedMemoryUpdates, plan: Plan) -> Hello:
    """This learner's model and optimizer, which the launcher compares and lays out."""
    return Hello(
        [*config_fingerprint(*pair), *plan.strategy.config_fingerprint()],
        shared_tensors(*pair),
        type(pair.optimizer).__name__,
        settings_of(pair.optimizer),
        method.apply,
        method.slots,
        method.consistent,
        method.checkpoints and os.path.abspath(method.checkpoints),
        method.every_s,
    )


def as_accounts(account: Account, own: Counter[int]) -> dict[str, Any]:
    """An account in the format of the other systems' servers."""
    ages = Counter(account.staleness) + own
    figures = ServerFigures({"all tensors": dict(ages)} if ages else {}, [])
    found = merge_figures([figures]) | {"checkpoints": account.checkpoints}
    if account.refused:
        found["refused_by_servers"] = {"messages": account.refused}
    return found
