"""One process: the plain loop, at the plain loop's speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.consistency.leases import Batch, in_turn
from slipstream.plan import Plan
from slipstream.runtime.process.environment import Environment
from slipstream.strategy import Strategy
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.checkpoints.loading import load_alone
from slipstream.torch.checkpoints.saving import write_state
from slipstream.torch.checkpoints.training_state import OwnState
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.finite_gradients import FiniteGradients, before_use
from slipstream.torch.tensors.pairs import Pair
from slipstream.torch.tensors.random_state import random_state


class AloneMode(TrainingMode):
    """The user's optimizers update the user's models.

    Args:
        pairs: The user's own.
        plans: By pair; for the plan table.
        names: By pair: of the parameters that it trains.
        strategy: Says what is clipped and averaged.
        env: Says how gradients that are not finite are treated.
    """

    def __init__(
        self,
        pairs: tuple[Pair, ...],
        plans: Sequence[Plan],
        names: Sequence[Sequence[str]],
        strategy: Strategy,
        env: Environment,
    ) -> None:
        self.pairs, self.plans = pairs, plans
        self._lease = in_turn(rank=0, workers=1)
        self._steps = [
            AloneSteps(pair, own, strategy, env) for pair, own in zip(pairs, names, strict=True)
        ]

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
