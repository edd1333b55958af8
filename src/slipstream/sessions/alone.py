"""A job of one process: the plain loop, at the plain loop's speed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slipstream.consistency.leases import Batch
from slipstream.errors import SlipstreamError
from slipstream.runtime.figures.summary import WorkerFigures, combine
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import rank_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.sessions.default_group import GroupStore
from slipstream.sessions.protocol import Pair, Training
from slipstream.strategy import Strategy
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.checkpoints.training_state import OwnState
from slipstream.torch.distribute.loading import load_alone
from slipstream.torch.distribute.preparing import as_trained, prepare_pairs
from slipstream.torch.distribute.sampler import in_turn
from slipstream.torch.distribute.saving import write_state
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.finite_gradients import FiniteGradients, before_use
from slipstream.torch.tensors.random_state import random_state
from slipstream.types import Cluster

logger = logging.getLogger(__name__)


class AloneSession:
    """Implements ``Session`` for a job of one process."""

    def __init__(self, env: Environment) -> None:
        log_event(logger, "joined", rank=env.rank, size=env.world_size, host="localhost")
        self._env = env
        self._training: AloneTraining | None = None

    def broadcast(self, value: Any) -> Any:
        return value

    def group_store(self, backend: str) -> GroupStore:
        return GroupStore(distributed.HashStore())

    def gather(self, call: str, value: Any) -> list[Any]:
        return [value]

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> AloneTraining:
        if self._training is not None:
            self._training.close()
        self._training = AloneTraining(tuple(pairs), strategy, self._env)
        return self._training

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        return combine([figures])

    def fault_behind(self, error: BaseException) -> None:
        return None

    def abort(self, error: BaseException) -> None:
        pass

    def reports(self, error: SlipstreamError) -> bool:
        return rank_reports(error, self._env.rank)

    def close(self) -> None:
        pass


class AloneTraining(Training):
    """The user's optimizers update the user's models."""

    def __init__(self, pairs: tuple[Pair, ...], strategy: Strategy, env: Environment) -> None:
        self.pairs = pairs
        inventories = prepare_pairs(pairs, strategy, env.parts)
        planned, cluster = as_trained(strategy, len(pairs)), Cluster(1, servers=1)
        self.plans = [planned.plan(inventory.specs, cluster) for inventory in inventories]
        self._lease = in_turn(rank=0, workers=1)
        self._steps = []
        for pair, inventory in zip(pairs, inventories, strict=True):
            trained = [name for name, p in pair.model.named_parameters() if p.requires_grad]
            names = inventory.parameter_names if len(pairs) > 1 else trained
            self._steps.append(AloneSteps(pair, names, strategy, env))

    @property
    def committed(self) -> int:
        return self._steps[0].made

    @property
    def begun(self) -> bool:
        return any(steps.made for steps in self._steps)

    def lease(self, batches: int, returned: int) -> Batch:
        return self._lease(batches, returned)

    def averages(self) -> list[dict[str, torch.Tensor]]:
        return [steps.averages.weights for steps in self._steps]

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        states, made = [each.state for each in self._steps], [each.made for each in self._steps]
        write_state(path, self.pairs, states, made, facts, {0: OwnState(random_state())})

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        states = [steps.state for steps in self._steps]
        found = load_alone(path, self.pairs, states, takes_nonfinite=takes_nonfinite)
        for steps, made in zip(self._steps, found, strict=True):
            steps.made = made

    def close(self) -> None:
        """Remove the hooks: the optimizers are ordinary ones again."""
        for steps in self._steps:
            steps.close()


class AloneSteps:
    """Counts one pair's steps, and runs the hooks of each.

    Args:
        names: of the pair's parameters.

    Attributes:
        made: steps completed, including those of the checkpoint that the job began with.
        averages: averaged weights; none, if the strategy has none.
        state: what checkpoints hold of the pair, besides the model.
    """

    def __init__(
        self, pair: Pair, names: Sequence[str], strategy: Strategy, env: Environment
    ) -> None:
        model, optimizer = pair
        self.made = 0
        self.averages = Averages(model, strategy.rounds.update.average, names)
        self.state = StateAtWorker(model, optimizer, self.averages)
        self._handles = watch_gradients(pair, names, env, lambda: self.made)
        if (norm := strategy.rounds.update.clip_norm) is not None:
            self._handles.append(optimizer.register_step_pre_hook(clip_to(norm)))
        if strategy.rounds.update.average is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._count))

    def _before_update(self, *_: Any) -> None:
        self.averages.before_update()

    def _count(self, *_: Any) -> None:
        self.made += 1
        self.averages.follow()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def watch_gradients(
    pair: Pair, names: Sequence[str], env: Environment, step: Callable[[], int]
) -> list[Any]:
    """In a job of one process, check gradients just before the optimizer uses them.

    With "pass" there is no check, so that training runs at the speed of the plain loop. Returns the
    handles of the hooks.
    """
    if env.nonfinite == "pass":
        return []
    finite = FiniteGradients(env.nonfinite, env.rank)
    named = [(name, p) for name, p in pair.model.named_parameters() if name in names]

    def examine() -> None:
        finite.step = step()
        finite.clear_refused(named)

    return [pair.optimizer.register_step_pre_hook(before_use(examine))]


def clip_to(norm: float) -> Callable[..., None]:
    """Clip the gradient before a step, as a worker does before it sends its gradient."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, norm)

    return clip
