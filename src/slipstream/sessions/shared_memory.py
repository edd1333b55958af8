"""A job whose workers are learners on one machine, with weights in shared memory."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.runtime.figures.summary import WorkerFigures, combine
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.members.joining import Limits
from slipstream.runtime.members.store import connect_store
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import learner_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.runtime.shared_memory.messages import Hello
from slipstream.sessions.default_group import GroupStore
from slipstream.strategy import Strategy
from slipstream.systems import call_of
from slipstream.torch.capture.other_steps import OtherSteps, why_not_by_others
from slipstream.torch.capture.outside_parameters import OutsideParameters
from slipstream.torch.capture.remote_optimizer import check_own_state
from slipstream.torch.capture.step_watch import StepWatch, never_stepped
from slipstream.torch.distribute.preparing import check_pairs, prepare_pairs
from slipstream.torch.modes.learner import Learner
from slipstream.torch.modes.learner_state import LearnerState
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.shared_memory import SharedMemoryMode, as_accounts
from slipstream.torch.modes.shared_weights import check_shareable, settings_of, shared_tensors
from slipstream.torch.modes.undistributed import Undistributed
from slipstream.torch.optimizers.own_step import check_own_step
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import config_fingerprint
from slipstream.torch.tensors.pairs import Pair
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
        self._mode: TrainingMode = Undistributed()
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

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> TrainingMode:
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
        keeper = LearnerState(pair, learner, self._line)
        loop.keep_at(keeper)
        self._opened.callback(loop.keep_at, None)
        if state := loop.own_state():
            keeper.take(state)
        self._ages = learner.ages
        self._mode = SharedMemoryMode(
            pair, strategy.name, call_of(strategy), plan, learner, self._line
        )
        watch = StepWatch(
            inventory.trained.values() if self._env.rank == 0 else (),
            [pair.optimizer],
            stepped=lambda: learner.steps > 0,
            told=never_stepped(call_of(strategy), over=False),
        )
        self._opened.callback(watch.close)
        outside = OutsideParameters(
            inventory.trained.values(), (optimizer, loop), is_first=self._env.rank == 0
        )
        self._opened.callback(outside.close)
        why = why_not_by_others(plan, call_of(strategy), pairs=1)
        known = [pair.optimizer, optimizer]
        self._opened.callback(OtherSteps(inventory.trained.items(), known, why).close)
        return self._mode

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
        if not self._mode.pairs:
            return combine([figures])
        farewell = self._line.depart(figures.encode(), dict(self._ages))
        if not farewell.figures:
            return None
        summary = combine([WorkerFigures.decode(content) for content in farewell.figures])
        summary["steps"] = self._mode.committed
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
