"""Old argument names are refused; the error gives the new name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from slipstream.errors import UnknownStrategy

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a system whose arguments were renamed. ``names``: by old name, what to write instead."""

    def decorate(system: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(system)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in kwargs.keys() & names.keys():
                raise UnknownStrategy(f"{system.__name__} does not take {old}: {names[old]}")
            return system(*args, **kwargs)

        setattr(call, "renamed", names)  # noqa: B010
        return call

    return decorate
