"""Data-parallel training where the network, stragglers or the batch size limit the speed.

with slipstream.init() as job:
    model, optimizer = job.distribute(model, optimizer, slipstream.push_pull())
"""

from __future__ import annotations

import ast
import logging
from importlib import import_module
from importlib.resources import files
from typing import Any

# Nothing is printed unless the user adds a handler.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "0.1.0"

# Names are imported when first used, so that servers and the command line start without torch.
# The stub next to this file lists them once, for type checkers and for this module.
_HOMES: dict[str, str] = {
    name.name: node.module
    for node in ast.parse(files(__name__).joinpath("__init__.pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for name in node.names
}
# Modules, not names of modules; integrations need their framework.
_PACKAGES = (__name__, "slipstream.integrations")
__all__ = sorted(name for name, home in _HOMES.items() if home not in _PACKAGES)


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    if _HOMES[name] in _PACKAGES:
        return import_module(f"{_HOMES[name]}.{name}")
    return getattr(import_module(_HOMES[name]), name)
