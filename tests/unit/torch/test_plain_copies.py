"""Copies of modules with additions, also of modules whose type makes its own copies."""

from __future__ import annotations

import copy
import copyreg
import pickle
from typing import Any

import torch
from torch import nn

from slipstream.torch.tensors.plain_copies import (
    ModuleHook,
    PlainReduction,
    ReplacedForward,
    keep_copies_plain,
)


def negate(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return -inputs[0]


class Doubled(ReplacedForward):
    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * self.plain()(value)


class CopiesItself(nn.Linear):
    """Copies its attributes itself, as some public models do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiesItself:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),), dict(vars(self))  # type: ignore[attr-defined]


def added_to(module: nn.Linear, asked: list[str]) -> nn.Linear:
    """A module with a hook of its user, one of ours of each kind, and another forward."""
    keep_copies_plain(module)
    module.register_forward_pre_hook(negate)
    ours = ModuleHook(lambda *_: asked.append("hook"), before_copy=lambda: asked.append("copy"))
    module.register_forward_pre_hook(ours, prepend=True)
    module.register_forward_hook(ours, always_call=True)
    module.register_state_dict_pre_hook(ours)
    module.forward = Doubled(module)  # type: ignore[method-assign]
    return module


def both_copies(module: nn.Linear) -> list[nn.Linear]:
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


def test_copies_have_no_additions_but_the_users_own_hooks() -> None:
    asked: list[str] = []
    plain = nn.Linear(3, 2)
    module = added_to(copy.deepcopy(plain), asked)
    value = torch.ones(1, 3)
    for copied in both_copies(module):
        asked.clear()
        assert torch.equal(copied(value), plain(-value))
        assert asked == []
        assert vars(copied).keys() == vars(plain).keys()
        assert list(copied._forward_pre_hooks.values()) == [negate]
        assert not copied._forward_hooks
        assert not copied._forward_hooks_always_called
    assert torch.equal(module(value), 2 * plain(-value))
    assert asked == ["hook", "hook"]


def test_every_addition_is_asked_before_a_copy() -> None:
    asked: list[str] = []
    copy.deepcopy(nn.Sequential(added_to(nn.Linear(3, 2), asked)))
    assert asked == ["copy"] * 3


def test_modules_whose_type_makes_its_own_copies_get_additions_that_do_nothing() -> None:
    asked: list[str] = []
    plain = CopiesItself(3, 2)
    module = added_to(copy.deepcopy(plain), asked)
    value = torch.ones(1, 3)
    for copied in both_copies(module):
        for again in (copied, *both_copies(copied)):
            asked.clear()
            assert torch.equal(again(value), plain(-value))
            assert asked == []


def test_removed_handles_still_remove_the_users_hooks() -> None:
    module = nn.Linear(3, 2)
    handle = module.register_forward_pre_hook(negate)
    added_to(module, [])
    copy.deepcopy(module)
    handle.remove()
    assert list(module._forward_pre_hooks.values()).count(negate) == 1  # the one of `added_to`


class Registered(nn.Linear):
    """Of which ``copyreg`` already knew how to take it apart."""


def test_an_earlier_registration_is_kept() -> None:
    made: list[nn.Module] = []

    def earlier(module: Registered) -> Any:
        made.append(module)
        return copyreg.__newobj__, (Registered,), dict(vars(module))  # type: ignore[attr-defined]

    copyreg.pickle(Registered, earlier)
    module = Registered(3, 2)
    added_to(module, [])
    keep_copies_plain(module)  # a second job
    assert isinstance(copyreg.dispatch_table[Registered], PlainReduction)
    copied = copy.deepcopy(module)
    assert made == [module]
    assert not copied._forward_hooks
