"""An optimizer whose state is elsewhere, as a script sees it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.torch.loop_optimizer import LoopOptimizer
from slipstream.torch.remote_optimizer import RemoteOptimizer, State, check_own_state


class Elsewhere:
    """Runs a real optimizer on parameters of its own; implements ``StateKeeper``."""

    def __init__(self, model: nn.Module, kind: Any) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def fetch(self) -> State:
        state = self.optimizer.state
        return {name: dict(state[p]) for name, p in self.names.items() if p in state}

    def take(self, state: State) -> None:
        for name, entries in state.items():
            self.optimizer.state[self.names[name]] = dict(entries)


class Setting:
    def __init__(self, kind: Any = torch.optim.Adam) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        self.model[0].weight.requires_grad_(False)
        self.local = kind(self.model.parameters(), lr=0.1)
        named = self.model.named_parameters()
        trained = {name: p for name, p in named if p.requires_grad}
        self.remote = RemoteOptimizer(self.local, trained)
        self.keeper = self.remote.keeper = Elsewhere(self.model, kind)

    def step(self) -> None:
        self.keeper.optimizer.zero_grad()
        self.keeper.model(torch.ones(4, 3)).pow(2).sum().backward()
        self.keeper.optimizer.step()
        self.remote.forget_state()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_state_goes_there_and_back_like_torchs_own(kind: Any) -> None:
    setting, other = Setting(kind), Setting(kind)
    setting.step()
    setting.step()
    saved, plain = setting.remote.state_dict(), setting.keeper.optimizer.state_dict()
    # What is frozen keeps the state that it had here, as Adagrad's has from the beginning.
    assert str(saved) == str(plain)
    other.remote.load_state_dict(saved)
    assert str(other.keeper.optimizer.state_dict()) == str(plain)
    assert str(other.remote.state_dict()) == str(plain)
    other.step()
    assert all(not p.requires_grad for p in other.local.state)


def test_a_state_of_other_shapes_changes_nothing() -> None:
    setting = Setting()
    setting.step()
    saved = setting.remote.state_dict()
    for entries in saved["state"].values():
        entries["exp_avg"] = torch.zeros(7)
    saved["param_groups"][0]["lr"] = 5.0
    before = str(setting.keeper.optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"does not fit.*exp_avg.*\(7,\)"):
        setting.remote.load_state_dict(saved)
    assert str(setting.keeper.optimizer.state_dict()) == before
    assert setting.remote.param_groups[0]["lr"] == 0.1
    assert setting.remote.param_groups is setting.local.param_groups


def test_incomplete_state_is_refused() -> None:
    setting = Setting(torch.optim.Adagrad)
    trained = {name: p for name, p in setting.model.named_parameters() if p.requires_grad}
    check_own_state(setting.local, trained)
    del setting.local.state[setting.model[1].bias]
    with pytest.raises(ConfigError, match=r"no optimizer state of '1.bias'"):
        check_own_state(setting.local, trained)


class Scaling:
    """One parameter, a scaler, and what the step finds in ``.grad``."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.loop = LoopOptimizer(torch.optim.SGD([self.parameter], lr=1.0))
        self.found: list[list[float] | None] = []
        self.loop.end_step = self._note
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def _note(self) -> None:
        gradient = self.parameter.grad
        self.found.append(None if gradient is None else gradient.tolist())

    def step(self, factor: float, *, unscale: bool) -> None:
        self.loop.zero_grad()
        self.scaler.scale(self.parameter.sum() * factor).backward()
        if unscale:
            self.scaler.unscale_(self.loop)
        self.scaler.step(self.loop)
        self.scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["by the step", "by the loop"])
def test_a_step_without_finite_gradients_is_made_without_any(unscale: bool) -> None:
    scaling = Scaling()
    for factor in (3.0, torch.inf, 5.0):
        scaling.step(factor, unscale=unscale)
    assert scaling.found == [[3.0, 3.0], None, [5.0, 5.0]]
    assert scaling.scaler.get_scale() == 32.0
    scaling.loop.zero_grad()
    scaling.parameter.sum().backward()
    scaling.loop.step()
    assert scaling.found[-1] == [1.0, 1.0]
