"""Copies of a distributed model are plain ones, however they are made.

A module in training has hooks, and may have another ``forward``. Copies and pickled models have
none of these: ``copy.deepcopy``, ``torch.save``, ``pickle`` and ``AveragedModel`` see the module as
it was before ``job.distribute``, and ``torch.load(weights_only=True)`` needs to know no class of
ours. Everything that is put into a module is an ``Addition``, and the types of such modules are
registered with ``copyreg``, which both ``copy`` and ``pickle`` ask how to take an object apart.

A type that copies itself (``__deepcopy__``, ``__reduce__``) may copy additions, too: these become
something that does nothing.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Reduced = tuple[Any, ...] | str
# Torch's notes on single hooks, by a hook's number.
HOOK_NOTES = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_pre_hooks_with_kwargs",
)


class Addition:
    """Something that slipstream has put into a module; copies of the module do not have it."""

    def before_copy(self) -> None:
        """The module is about to be copied."""


class ModuleHook(Addition):
    """A hook of a module.

    Args:
        call: What the hook does.
        before_copy: Called before the module is copied.
    """

    def __init__(
        self, call: Callable[..., Any], before_copy: Callable[[], None] = lambda: None
    ) -> None:
        self._call, self._before_copy = call, before_copy

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def before_copy(self) -> None:
        self._before_copy()

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        return the_no_hook, ()


def no_hook(*_: Any) -> None:
    """What becomes of a hook in a copy that the module's own type has made."""


def the_no_hook() -> Callable[..., None]:
    return no_hook


class ReplacedMethod(Addition):
    """Another function in the place of one module's method.

    Attributes:
        module: Whose method this is.
        name: Of the method.
    """

    def __init__(self, module: Any, name: str) -> None:
        self.module, self.name = module, name

    def plain(self) -> Callable[..., Any]:
        """The method that the module's type has."""
        return types.MethodType(self.__func__, self.module)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of the module's type: torch.compile expects bound methods here."""
        found: Callable[..., Any] = getattr(type(self.module), self.name)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module))
        if copied is None:
            return self
        return types.MethodType(getattr(type(copied), self.name), copied)

    def __reduce__(self) -> Any:
        """On unpickling, the module has no attributes yet: use its class's method."""
        return getattr, (self.module, self.name)


class ReplacedForward(ReplacedMethod):
    """Another ``forward`` of one module."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, "forward")

    def plain(self) -> Callable[..., torch.Tensor]:
        """The forward that the module's type has."""
        return super().plain()


def keep_copies_plain(module: nn.Module) -> None:
    """Let copies of this module have no additions.

    The module's type stays registered after the job: without additions, nothing is different.
    """
    kind, known = type(module), copyreg.dispatch_table
    earlier = known.get(kind)
    if not isinstance(earlier, PlainReduction):
        known[kind] = PlainReduction(earlier)


class PlainReduction:
    """How modules of one type are taken apart.

    Args:
        earlier: How else ``copyreg`` does this; None: the type does it itself.
    """

    def __init__(self, earlier: Callable[[Any], Reduced] | None) -> None:
        self._earlier = earlier

    def __call__(self, module: nn.Module) -> Reduced:
        for addition in additions_in(vars(module)):
            addition.before_copy()
        reduced = module.__reduce_ex__(2) if self._earlier is None else self._earlier(module)
        if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], Mapping):
            return reduced
        return *reduced[:2], without_additions(reduced[2]), *reduced[3:]


def additions_in(state: Mapping[str, Any]) -> list[Addition]:
    """All additions to a module, given its attributes."""
    values = list(state.values())
    hooks = [unwrapped(hook) for each in values if isinstance(each, dict) for hook in each.values()]
    return [value for value in (*values, *hooks) if isinstance(value, Addition)]


def unwrapped(hook: Any) -> Any:
    """The hook itself: torch wraps those of ``load_state_dict``."""
    return getattr(hook, "hook", hook)


def without_additions(state: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes as they were without additions; nothing is changed in place."""
    plain = {name: value for name, value in state.items() if not isinstance(value, Addition)}
    ours: set[Any] = set()  # numbers of hooks
    for name, hooks in plain.items():
        if isinstance(hooks, dict):
            found = {n for n, hook in hooks.items() if isinstance(unwrapped(hook), ModuleHook)}
            ours |= found
            plain[name] = without(hooks, found) if found else hooks
    for name in HOOK_NOTES:
        if name in plain:
            plain[name] = without(plain[name], ours)
    return plain


def without(numbered: dict[Any, Any], numbers: set[Any]) -> dict[Any, Any]:
    """A copy of the same type, without these."""
    kept = numbered.copy()
    for number in numbers & kept.keys():
        del kept[number]
    return kept
