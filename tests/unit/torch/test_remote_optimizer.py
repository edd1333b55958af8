"""An optimizer whose state is elsewhere, as a script sees it."""

from __future__ import annotations

import collections
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError, RuntimeFault
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer, State, check_own_state
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer


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
        self.keeper = Elsewhere(self.model, kind)
        self.remote.keep_at(self.keeper)

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


def test_remote_optimizer_reset_state_is_the_keepers_too() -> None:
    setting = Setting()
    taken: list[State] = []
    setting.keeper.take = taken.append  # type: ignore[method-assign,assignment]
    setting.remote.state.clear()  # before a step there is nothing to reset
    assert taken == []
    setting.step()
    setting.remote.state.clear()
    setting.step()
    setting.remote.state = collections.defaultdict(dict)
    assert taken == [{}, {}]
    setting.step()
    setting.remote.step()
    assert setting.remote.state is setting.local.state


def test_remote_optimizer_state_of_a_kind_that_begins_with_one_is_not_reset() -> None:
    setting = Setting(torch.optim.Adagrad)
    setting.step()
    with pytest.raises(ConfigError, match=r"Adagrad cannot be reset.*load_state_dict"):
        setting.remote.state.clear()


def set_entry(optimizer: Any) -> None:
    parameter = optimizer.param_groups[0]["params"][-1]
    optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def load_local(optimizer: Any) -> None:
    optimizer.local.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("change", [set_entry, load_local])
def test_remote_optimizer_state_changed_by_hand_is_named(change: Any) -> None:
    setting = Setting()
    setting.step()
    setting.remote.step()
    change(setting.remote)
    with pytest.raises(RuntimeFault, match=r"changed by hand.*load_state_dict"):
        setting.remote.step()


def test_remote_optimizer_replaced_step_is_named_also_later() -> None:
    setting = Setting()
    setting.remote.step()
    setting.local.step = lambda: None
    with pytest.raises(ConfigError, match=r"Adam.step was replaced"):
        setting.remote.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_remote_optimizer_copies_are_plain_ones_with_the_state(copied: Any) -> None:
    setting = Setting()
    setting.step()
    plain = copied(setting.remote)
    assert type(plain) is torch.optim.Adam
    assert str(plain.state_dict()) == str(setting.keeper.optimizer.state_dict())
    setting.remote.keep_at(None)
    assert type(copied(setting.remote)) is torch.optim.Adam
    assert type(copied(setting.local)) is torch.optim.Adam


class Own(torch.optim.SGD):
    """The user's own class, with more than torch's have."""

    rate = 2.0
    zeroed = 0

    def zero_grad(self) -> None:  # type: ignore[override]
        self.zeroed += 1
        super().zero_grad()

    def state_dict(self) -> Any:
        return super().state_dict() | {"rate": self.rate}

    def norm(self, scale: float = 1.0) -> float:
        return scale * self.rate

    @torch.no_grad()
    def halve(self, how: str) -> None:
        for parameter in self.param_groups[0]["params"]:
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "data":
                parameter.data.mul_(0.5)
            else:
                parameter.data = parameter.data * 0.5


def own_loop() -> tuple[Own, Any]:
    local = Own([nn.Parameter(torch.ones(300))], lr=0.1)
    return local, LoopOptimizer(local)


def test_loop_optimizer_has_attributes_and_methods_of_the_users() -> None:
    local, loop = own_loop()
    loop.rate = 3.0
    loop.zero_grad()
    assert (local.rate, loop.norm(scale=2.0), local.zeroed) == (3.0, 6.0, 1)
    assert loop.state_dict()["rate"] == 3.0
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'first_step'"):
        loop.first_step()
    loop.note = 1
    assert not hasattr(local, "note")
    assert str(loop) == str(local)
    assert type(copy.deepcopy(loop)) is Own


class OwnClosure(torch.optim.SGD):
    """Asks for the loss before or after it changes weights, so many times."""

    asked = 1
    changes = False

    def step(self, closure: Any = None) -> None:
        if self.changes:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        for _ in range(self.asked):
            assert closure() == 2.5


@pytest.mark.parametrize(
    ("asked", "changes", "refused"), [(1, False, False), (2, False, True), (1, True, True)]
)
def test_loop_optimizer_closure_runs_once_and_on_the_weights_of_the_step(
    asked: int, changes: bool, refused: bool
) -> None:
    local = OwnClosure([nn.Parameter(torch.ones(3))], lr=0.1)
    local.asked, local.changes = asked, changes
    loop, passes = LoopOptimizer(local), []

    def closure() -> float:
        passes.append(1)
        return 2.5

    loop.attach(loop.step_local)
    for _ in range(2):
        if refused:
            with pytest.raises(RuntimeFault, match=r"OwnClosure.step\(\) runs the loop's closure"):
                loop.step(closure)
        else:
            assert loop.step(closure) == 2.5
    assert len(passes) == 2


@pytest.mark.parametrize("how", ["in place", "data", "other memory"])
def test_loop_optimizer_method_that_changes_weights_is_named(how: str) -> None:
    _, loop = own_loop()
    with pytest.raises(RuntimeFault, match=r"Own.halve\(\) has changed weights.*\(300,\)"):
        loop.halve(how)


def test_loop_optimizer_state_dict_hooks_run_once_on_either_object() -> None:
    local, loop = own_loop()
    called: list[str] = []
    local.register_state_dict_pre_hook(lambda _: called.append("local"))
    loop.register_state_dict_pre_hook(lambda _: called.append("loop"))
    loop.state_dict()
    assert called == ["local", "loop"]


class Scaling:
    """One parameter, a scaler, and what the step finds in ``.grad``."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.ones(2))
        self.loop = LoopOptimizer(torch.optim.SGD([self.parameter], lr=1.0))
        self.found: list[list[float] | None] = []
        self.loop.attach(self._note)
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
