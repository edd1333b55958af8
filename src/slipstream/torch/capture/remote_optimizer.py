"""The optimizer that a loop uses where another process runs it, and keeps its state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from slipstream.errors import ConfigError, RuntimeFault
from slipstream.runtime.files.checkpoint_format import OptimizerState
from slipstream.torch.checkpoints.state_fitting import check_elementwise_state
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer, kind_of
from slipstream.torch.optimizers.own_step import STEP_HOOKS, check_own_step
from slipstream.torch.tensors.inventory import group_settings, placed

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

    Hooks of the user's optimizer are this one's, too: pre-hooks run on this worker's gradients,
    and post-hooks when the weights of this step have arrived.

    Args:
        trained: The parameters that another process updates. The state of others, which are frozen,
            stays here.
    """

    def __init__(self, local: torch.optim.Optimizer, trained: Trained) -> None:
        super().__init__(local)
        vars(self).update({name: getattr(local, name) for name in STEP_HOOKS})
        self._trained = trained
        self._keeper: StateKeeper | None = None
        self._stepped = False
        self._watch_state()

    def keep_at(self, keeper: StateKeeper | None) -> None:
        """Leave the state to a keeper from now on; None: the job is over."""
        self._keeper = keeper

    def _watch_state(self) -> None:
        """From now on notice if the loop resets the state."""
        self.local.state = self._watched = WatchedState(self.reset_state, self.local.state)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a step.

        Raises:
            ConfigError: The user's ``step`` was replaced by another function.
            RuntimeFault: The loop has changed the state, which is the keeper's.
        """
        check_own_step(self.local)
        if self._keeper is not None and self._is_changed_by_hand():
            raise RuntimeFault(
                "the optimizer's state was changed by hand, but another process has it: hand it "
                "over by optimizer.load_state_dict, of the optimizer that job.distribute has "
                "returned, on every rank; optimizer.state.clear() resets it"
            )
        return super().step(closure)

    setattr(step, "hooked", True)  # noqa: B010

    def _is_changed_by_hand(self) -> bool:
        if self.local.state is not self._watched:
            return True
        return self._stepped and bool(self.state and self.own_state())

    def own_state(self) -> State:
        """The state that was loaded here, and is for the keeper."""
        return state_by_name(self.local, self._trained)

    def forget_state(self) -> None:
        """A step is made: what was loaded here is no longer the optimizer's state."""
        self._stepped = True
        for parameter in self._trained.values() if self.state else ():
            self.state.pop(parameter, None)

    @property
    def state(self) -> Any:
        return self.local.state

    @state.setter
    def state(self, state: Any) -> None:
        """Go on from this state: an empty one is a reset, which every rank must make."""
        self.local.state = state
        self._watch_state()
        self._hand_over()

    def reset_state(self) -> None:
        """The loop has cleared the state: the keeper begins with none, too."""
        self._hand_over()

    def _hand_over(self) -> None:
        """Let the keeper go on from the state that is here.

        Raises:
            ConfigError: It is too late for that, or this optimizer cannot go on without state.
        """
        if self._keeper is None:
            return
        state = self.own_state()
        if not state and begins_with_state(self.local):
            raise ConfigError(
                f"the state of {type(self.local).__name__} cannot be reset to none: load that of a "
                "new optimizer, by optimizer.load_state_dict on every rank"
            )
        if state or self._stepped:
            self._keeper.take(state)
            self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        """The state, fetched from the keeper, and the settings: as torch's own.

        Raises:
            RuntimeFault: The job is over, or has failed.
        """
        with self._state_here():
            return super().state_dict()

    @contextmanager
    def _state_here(self) -> Iterator[None]:
        """Within, the user's optimizer has the state."""
        if self._keeper is None:
            raise RuntimeFault(
                "the job is over, and with it the process that had the optimizer's state: call "
                "optimizer.state_dict() within the `with` block"
            )
        held, trained = self._keeper.fetch(), set(self._trained.values())
        here = {p: entries for p, entries in self.state.items() if p not in trained}
        for name, parameter in self._trained.items():
            if entries := held.get(name):
                here[parameter] = {k: placed(v, parameter) for k, v in entries.items()}
        self.local.state = defaultdict(dict, here)
        try:
            yield
        finally:
            self.local.state = self._watched

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._keeper is None:
            return super().__reduce_ex__(protocol)
        with self._state_here():
            return super().__reduce_ex__(protocol)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the state to the keeper; every rank must call it.

        Raises:
            ConfigError: It is not of this model, or comes too late.
        """
        before = self.local.state, self.local.param_groups
        super().load_state_dict(state_dict)
        try:
            check_own_state(self.local, self._trained)
            if self._keeper is not None:
                self._keeper.take(self.own_state())
        except ConfigError:
            self.local.state, self.local.param_groups = before
            raise
        self._watch_state()
        self._stepped = False


class WatchedState(defaultdict[Any, Any]):
    """An optimizer's state of which another process has the entries.

    Args:
        on_clear: Called after all of it was removed.
        state: What there is of it here.
    """

    def __init__(self, on_clear: Callable[[], None], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._on_clear = on_clear

    def clear(self) -> None:
        super().clear()
        self._on_clear()

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def begins_with_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a new optimizer of this type has state before its first step, as Adagrad's has."""
    new = type(optimizer)([torch.nn.Parameter(torch.zeros(1))], **optimizer.defaults)
    return bool(new.state)


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
