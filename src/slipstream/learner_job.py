"""A job whose workers are learners on one machine: weights are in memory that they share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError
from slipstream.job import Job
from slipstream.planning.one_machine import OneMachine
from slipstream.runtime.accounts import ServerFigures, together
from slipstream.runtime.environment import Environment
from slipstream.runtime.joining import Limits
from slipstream.runtime.launcher_line import LauncherLine
from slipstream.runtime.summary import Traffic, WorkerFigures, combine
from slipstream.runtime.workshop_messages import Account, Hello
from slipstream.strategy import Strategy
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.inventory import portrait
from slipstream.torch.learner import Learner
from slipstream.torch.replica import prepare
from slipstream.torch.shared_weights import check_shareable, settings_of, shared_tensors
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Cluster


class LearnerJob(Job):
    """Steps are updates of the shared weights, whoever made the gradient."""

    def __init__(self, env: Environment, limits: Limits) -> None:
        super().__init__(env, None)
        assert env.control_fd is not None
        self._limits = limits
        self._line = LauncherLine(env.control_fd, limits.start_s, limits.wait_s)
        self._learner: Learner | None = None

    # ---- the second line

    def _take_part(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Strategy
    ) -> torch.optim.Optimizer:
        if chosen.one_machine is None:
            raise ConfigError(
                f"this job was started for learners that share memory, and the script asks for "
                f"{chosen.name}: start it with --strategy {chosen.name}"
            )
        check_shareable(model, optimizer)
        inventory = prepare(model, optimizer, chosen)
        self._plan = chosen.plan(inventory.specs, Cluster(self.world_size, servers=1))
        welcome, descriptor = self._line.join(introduce(model, optimizer, chosen.one_machine))
        self._learner = Learner(
            model,
            optimizer,
            chosen.one_machine,
            self.rank,
            SharedMemory(descriptor),
            welcome.plan,
            self._limits.wait_s,
            FiniteGradients(self._env.nonfinite, self.rank, self._is_first_to_warn),
        )
        if welcome.fill:
            self._learner.weights.fill()
        self._line.begin(filled=welcome.fill)
        return self._learner.start()

    def _is_first_to_warn(self) -> bool:
        own = os.getpid()
        return bool(self._line.share("nonfinite", own) == own)

    # ---- who and what

    @property
    def step(self) -> int:
        """Updates that the shared weights have had."""
        return self._learner.rings.version if self._learner is not None else 0

    @property
    def _misses_rounds(self) -> bool:
        return True

    @property
    def _just_back(self) -> bool:
        """The weights may have come a long way without this learner, also before the job began."""
        return self._own_steps == 0

    @property
    def _own_steps(self) -> int:
        updates = self._learner.updates if self._learner is not None else None
        return 0 if updates is None else updates.steps

    def _next_step(self) -> int:
        return self.step

    def _dealer(self) -> Callable[[int, int], Batch]:
        def lease(batches: int, returned: int) -> Batch:
            return Batch(*self._line.lease(batches, returned))

        return lease

    def wait(self) -> None:
        """Until this learner's gradients are applied."""
        if self._learner is not None:
            self._learner.wait()

    def flush(self) -> None:
        self.wait()

    def share(self, value: Any) -> Any:
        """What the first learner to get here said. Nobody waits: one that is started again hears
        what the others heard."""
        return self._line.share(self._occasion("share"), value)

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """The server writes what it has; of all learners' calls rank 0's counts."""
        self._distributed("save")
        if self.rank == 0:
            self.wait()
            self._line.save(str(Path(path).absolute()))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Before the first step; one of the learners' calls counts."""
        self._distributed("load")
        if self._own_steps:
            raise ConfigError(f"with {self._named()} job.load comes before the first step")
        self._line.load(str(Path(path).absolute()))
        assert self._learner is not None
        self._learner.begin_anew()

    # ---- figures

    def _accounts(self) -> dict[str, Any]:
        return {} if self._learner is None else told(self._line.account(), self._learner.ages)

    def _wait_s(self) -> float:
        return self._learner.wait_s if self._learner is not None else 0.0

    def _traffic(self) -> Traffic:
        """Gradients that went through memory; nothing else has moved."""
        moved = self._learner.moved if self._learner is not None else 0
        return Traffic(sent=moved, local=moved, by_scheme={"dense/memory": moved})

    # ---- the end

    def _finish(self) -> dict[str, Any] | None:
        if self._learner is None:
            return super()._finish()
        self._learner.wait()
        own = self._figures()
        farewell = self._line.depart(own.encode(), dict(self._learner.ages))
        self._learner.wait()  # what others have done since is taken
        if not farewell.figures:
            return None
        summary = combine([WorkerFigures.decode(content) for content in farewell.figures])
        summary["steps"] = self.step
        summary["restarts"] = farewell.restarts
        if farewell.account is not None:
            summary |= told(farewell.account, Counter())
        return self._publish_summary(summary)

    def _close(self, error: BaseException | None) -> None:
        self._watchers.close()
        if self._learner is not None:
            self._learner.close()
        self._line.close()


def introduce(model: nn.Module, optimizer: torch.optim.Optimizer, about: OneMachine) -> Hello:
    return Hello(
        [*portrait(model, optimizer), str(about)],
        shared_tensors(model, optimizer),
        type(optimizer).__name__,
        settings_of(optimizer),
        about.apply,
        about.slots,
        about.consistent,
        about.checkpoints and os.path.abspath(about.checkpoints),
        about.every_s,
    )


def told(account: Account, own: Counter[int]) -> dict[str, Any]:
    """An account as the other systems' servers give theirs."""
    ages = Counter(account.staleness) + own
    figures = ServerFigures({"all tensors": dict(ages)} if ages else {}, [])
    found = together([figures]) | {"checkpoints": account.checkpoints}
    if account.refused:
        found["refused_by_servers"] = {"messages": account.refused}
    return found
