"""On the path of processes that tests start one by one: torch without its compiler.

The first step of an optimizer imports torch._dynamo, only to say that the step is not to be
compiled. That takes half of the time in which a process starts, and nothing here is compiled. The
module is loaded after all as soon as anything else is asked of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def disable(fn: Any = None, recursive: bool = True, **_: object) -> Any:
    return (lambda given: given) if fn is None else fn


def graph_break(*_: object, **__: object) -> None:
    """Nothing is compiled that could be broken off."""


class Light:
    """Finds and loads the module."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == NAME else None  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        own: dict[str, Callable[..., Any]] = {"disable": disable, "graph_break": graph_break}
        module.__dict__.update(own, __getattr__=self.whole)

    def whole(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if self in sys.meta_path:  # not yet; `from torch._dynamo import x` asks twice
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            del sys.modules[NAME]
            vars(sys.modules["torch"]).pop("_dynamo", None)
        return getattr(importlib.import_module(NAME), name)


sys.meta_path.insert(0, Light())  # type: ignore[arg-type]
