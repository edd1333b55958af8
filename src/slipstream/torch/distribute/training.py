"""A job's training: what does not differ between training modes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.plan import Plan
from slipstream.torch.distribute.exchange import HeldTensors
from slipstream.torch.distribute.sampler import LeasedBatches
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.undistributed import comes_after_distribute
from slipstream.torch.optimizers.loop_optimizer import own_optimizer
from slipstream.torch.tensors.fingerprint import Fingerprints, fingerprints_of
from slipstream.torch.tensors.inventory import as_texts, group_settings
from slipstream.torch.tensors.pairs import distinct_models
from slipstream.torch.tensors.swapped_weights import copies, swapped_in, without_steps


class Training:
    """The models in training.

    Attributes:
        mode: How they train.
    """

    def __init__(self, mode: TrainingMode) -> None:
        self.mode = mode

    @property
    def plan(self) -> Plan:
        """The decisions for every tensor of the first pair.

        Raises:
            ConfigError: There is none yet.
        """
        if not self.mode.plans:
            raise no_plan()
        return self.mode.plans[0]

    def _refuse_undistributed(self, call: str) -> None:
        if not self.mode.pairs:
            raise comes_after_distribute(call)

    # ---- the loop

    def steps(self, total: int, scheduler: Any) -> Iterator[int]:
        """Return the steps until ``total`` are completed: see ``Job.steps``."""
        expected = 0 if self.mode.rejoined else self.mode.committed
        while (step := self.mode.next_step()) < total:
            if scheduler is not None:
                catch_up(scheduler, step - expected)
            self.mode.begin_step()
            yield step
            expected = step + 1
            self.mode.end_step(step)

    def sampler(
        self, dataset: Sized, batch_size: int, *, workers: int, shuffle: bool, seed: int
    ) -> LeasedBatches:
        """Return batches that count once per epoch each: see ``Job.sampler``."""
        self._refuse_undistributed("sampler")
        return LeasedBatches(
            dataset,
            batch_size,
            self.mode.lease,
            lambda: self.mode.own_steps,
            workers=workers,
            shuffle=shuffle,
            seed=seed,
        )

    def backward_for(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Send the gradients of the pair with this optimizer during backward passes within."""
        self._refuse_undistributed("backward_for")
        for number, pair in enumerate(self.mode.pairs):
            if optimizer in (pair.optimizer, own_optimizer(pair.optimizer)):
                return self.mode.leaving_during_backward(number)
        raise ConfigError("job.backward_for takes an optimizer that job.distribute has returned")

    # ---- other weights in the models

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give the models the averaged weights within."""
        self._refuse_undistributed("averaged_weights")
        if self.plan.update.average is None:
            raise ConfigError("nothing is averaged: give the strategy averaged=0.9999, or the like")
        self.mode.wait()
        return self._swapped("job.averaged_weights()", self.mode.averages())

    def swapped_weights(self) -> AbstractContextManager[None]:
        """Give the models copies of their weights within, which the loop may change."""
        if not any(plan.local_steps for plan in self.mode.plans):  # else the weights are its own
            self.mode.wait()
        whole = {id(model): copies(model) for model in distinct_models(self.mode.pairs)}
        return self._swapped(
            "job.swapped_weights()", [whole.pop(id(model), {}) for model, _ in self.mode.pairs]
        )

    def outer_weights(self) -> AbstractContextManager[None]:
        """Give the models the outer weights within; those of one process are its own."""
        self._refuse_undistributed("outer_weights")
        found = self.mode.outer_weights()
        return nullcontext() if found is None else self._swapped("job.outer_weights()", found)

    @contextmanager
    def _swapped(self, block: str, by_pair: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
        """Give the models these weights within, by pair and name.

        Args:
            block: The user's call.
        """
        with self.mode.frozen(block), ExitStack() as stack:
            for (model, optimizer), weights in zip(self.mode.pairs, by_pair, strict=True):
                stack.enter_context(without_steps(optimizer, block))
                stack.enter_context(swapped_in(model, weights))
            yield

    # ---- figures

    def fingerprints(self) -> Fingerprints | None:
        """Return digests of this worker's weights, if it has any."""
        models = [m for m in distinct_models(self.mode.pairs) if not isinstance(m, HeldTensors)]
        return fingerprints_of(models) if models else None

    def settings(self) -> list[dict[str, str]]:
        """Return the optimizers' settings as text, by parameter group."""
        groups = [group for pair in self.mode.pairs for group in pair.optimizer.param_groups]
        return [as_texts(group_settings(group)) for group in groups]

    def plan_table(self) -> str:
        """Return the plans as text.

        Raises:
            ConfigError: There is none yet.
        """
        if not self.mode.plans:
            raise no_plan()
        return self.mode.plan_table()


def no_plan() -> ConfigError:
    """Return the error of a call that needs a plan."""
    return ConfigError("there is no plan before job.distribute(model, optimizer)")


def catch_up(scheduler: Any, steps: int) -> None:
    """Step a scheduler for steps that this worker missed; torch would warn if it has made none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps):
            scheduler.step()
