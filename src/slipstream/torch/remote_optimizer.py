"""The optimizer that a loop uses where another process runs it, and keeps its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from slipstream.errors import ConfigError, RuntimeFault
from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.inventory import group_settings
from slipstream.torch.kept_state import placed
from slipstream.torch.loop_optimizer import LoopOptimizer, kind_of
from slipstream.torch.state_fitting import check_elementwise_state

State = Mapping[str, Mapping[str, Any]]  # by a parameter's name, and the entry's
Trained = Mapping[str, torch.nn.Parameter]


class StateKeeper(Protocol):
    """Who has an optimizer's state."""

    def fetch(self) -> State:
        """The state after all steps of this worker."""
        ...

    def take(self, state: State) -> None:
        """Go on from another state; every rank calls it."""
        ...


class RemoteOptimizer(LoopOptimizer):
    """Its ``step`` only marks the end of a step; its state is the keeper's.

    Args:
        trained: The parameters that another process updates. The state of others, which are frozen,
            stays here.

    Attributes:
        keeper: Who has the state.
    """

    def __init__(self, local: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(local)
        self._trained = trained
        self.keeper: StateKeeper | None = None

    def own_state(self) -> State:
        """The state that was loaded here, and is for the keeper."""
        return state_by_name(self.local, self._trained)

    def forget_state(self) -> None:
        """A step is made: what was loaded here is no longer the optimizer's state."""
        for parameter in self._trained.values() if self.state else ():
            self.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """The state, fetched from the keeper, and the settings: as torch's own.

        Raises:
            RuntimeFault: The job is over, or has failed.
        """
        if self.keeper is None:
            raise RuntimeFault(
                "the job is over, and with it the process that had the optimizer's state: call "
                "optimizer.state_dict() within the `with` block"
            )
        held, before = self.keeper.fetch(), dict(self.state)
        try:
            for name, parameter in self._trained.items():
                self.state.pop(parameter, None)
                if entries := held.get(name):
                    self.state[parameter] = {k: placed(v, parameter) for k, v in entries.items()}
            return super().state_dict()
        finally:
            self.state.clear()
            self.state.update(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the state to the keeper; every rank must call it.

        Raises:
            ConfigError: It is not of this model, or comes too late.
        """
        before = self.local.state, self.local.param_groups
        super().load_state_dict(state_dict)
        try:
            check_own_state(self.local, self._trained)
            if self.keeper is not None:
                self.keeper.take(self.own_state())
        except ConfigError:
            self.local.state, self.local.param_groups = before
            self.state, self.param_groups = before
            raise


def state_by_name(optimizer: torch.optim.Optimizer, trained: Trained) -> State:
    """The state that an optimizer has of these parameters."""
    named = ((name, optimizer.state.get(parameter)) for name, parameter in trained.items())
    return {name: entries for name, entries in named if entries}


def check_own_state(optimizer: torch.optim.Optimizer, trained: Trained) -> None:
    """Refuse state that another process could not take over.

    Raises:
        ConfigError: It is of parameters of other shapes, or incomplete.
    """
    state = state_by_name(optimizer, trained)
    if not state:
        return
    groups = [group_settings(group) for group in optimizer.param_groups]
    saved = OptimizerState(
        kind_of(optimizer).__name__, {n: dict(e) for n, e in state.items()}, groups
    )
    try:
        check_elementwise_state(saved, trained, optimizer)
    except ValueError as error:
        raise ConfigError(
            f"the optimizer's state does not fit the model ({error}): load the state that belongs "
            "to these parameters, or begin with a new optimizer"
        ) from error
