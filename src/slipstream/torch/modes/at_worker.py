"""Where workers update: the mean gradient is in ``.grad`` when backward() returns.

All workers apply the same result to the same weights, with the user's own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from slipstream.runtime.exchange.engine import Applier
from slipstream.torch.capture.replica_check import NONE_HANDED, ReplicaCheck
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup
from slipstream.torch.tensors.averages import Averages


class AtWorkerMode(NetworkedMode):
    """Workers update: over links, collectives, or hosts whose workers aggregate first."""

    def wait(self) -> None:
        for each in self.parts:
            each.synchronizer.driver.wait()

    flush = wait  # all workers apply every result; the same function, so that a walk stays short

    def _wire(self, setup: PairSetup) -> PairParts:
        optimizer, plan = setup.optimizer, setup.plan
        averages = Averages(setup.model, plan.update.average, setup.inventory.parameter_names)
        return setup.parts(
            optimizer,
            setup.channels(),
            partial(WorkerUpdates, optimizer=optimizer, averages=averages),
            StateAtWorker(setup.model, optimizer, averages),
            setup.accounting(),
            partial(
                ReplicaCheck,
                own=optimizer,
                of_loop=optimizer,
                member=setup.member,
                handed=NONE_HANDED,
            ),
        )


class WorkerUpdates(Applier):
    """The user's optimizer runs here, on the mean gradient.

    Args:
        averages: Follow each update of the weights.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        optimizer: torch.optim.Optimizer,
        averages: Averages,
    ) -> None:
        self._synchronizer, self._averages = synchronizer, averages
        self.hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def takes_pass(self) -> bool:
        """A second pass is exchanged like the first."""
        return True

    def pass_ended(self) -> None:
        self._synchronizer.flush()
        self.wait()

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        self._synchronizer.driver.wait(tensors)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._synchronizer.refuse_step_in_block()
        self._averages.before_update()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:  # it runs backward itself, within the step
            return args[:1], {**kwargs, "closure": self._with_exchange(closure, optimizer)}
        self._exchange(optimizer)
        return None

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        self._synchronizer.gradients.refuse_unknown(optimizer)
        self._synchronizer.end_exchange()
        self.wait()

    def _with_exchange(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer
    ) -> Callable[[], Any]:
        """The closure; gradients of its backward pass are sent during that pass.

        A closure may run no backward pass: frameworks give every step a closure, also if the
        gradients were computed before, or if this worker skips the step.
        """
        synchronizer = self._synchronizer

        def run() -> Any:
            at_step = synchronizer.leaves_at_step
            with synchronizer.leaving_during_backward() if at_step else nullcontext():
                loss = closure()
            if not synchronizer.driver.exchanged:
                self._exchange(optimizer)
            return loss

        return run

    def _after_update(self, *_: Any) -> None:
        self._averages.follow()
        self._synchronizer.end_step()
