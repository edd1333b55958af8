"""The named systems, each a short composition; ``parse`` reads one from text."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable

from slipstream.errors import UnknownStrategy
from slipstream.strategy import Strategy
from slipstream.systems.adam_factors import adam_factors
from slipstream.systems.ako import ako
from slipstream.systems.all_to_all import all_to_all
from slipstream.systems.allreduce import allreduce
from slipstream.systems.async_sgd import async_sgd
from slipstream.systems.backup_workers import backup_workers
from slipstream.systems.bounded_staleness import bounded_staleness
from slipstream.systems.gadei import gadei
from slipstream.systems.one_bit import one_bit
from slipstream.systems.parameter_flow import parameter_flow
from slipstream.systems.poseidon import poseidon
from slipstream.systems.push_pull import push_pull

__all__ = [
    "SYSTEMS",
    "adam_factors",
    "ako",
    "all_to_all",
    "allreduce",
    "async_sgd",
    "backup_workers",
    "bounded_staleness",
    "gadei",
    "one_bit",
    "parameter_flow",
    "parse",
    "poseidon",
    "push_pull",
]

SYSTEMS: dict[str, Callable[..., Strategy]] = {
    "adam_factors": adam_factors,
    "ako": ako,
    "all_to_all": all_to_all,
    "allreduce": allreduce,
    "async_sgd": async_sgd,
    "backup_workers": backup_workers,
    "bounded_staleness": bounded_staleness,
    "gadei": gadei,
    "one_bit": one_bit,
    "parameter_flow": parameter_flow,
    "poseidon": poseidon,
    "push_pull": push_pull,
}


def parse(text: str) -> Strategy:
    """``push_pull`` or ``push_pull(overlap=False)``: what command lines and environments give."""
    name, arguments = read_call(text)
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownStrategy(f"no strategy {name!r}: there are {', '.join(SYSTEMS)}{hint}")
    factory = SYSTEMS[name]
    unknown = set(arguments) - set(inspect.signature(factory).parameters)
    if unknown:
        takes = ", ".join(inspect.signature(factory).parameters) or "no arguments"
        raise UnknownStrategy(
            f"{name} does not take {', '.join(sorted(unknown))}: it takes {takes}"
        )
    return factory(**arguments)


def read_call(text: str) -> tuple[str, dict[str, object]]:
    """The name and the literal keyword arguments of a call."""
    malformed = UnknownStrategy(
        f"cannot read strategy {text!r}: write NAME or NAME(key=value, …) with literal values"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)) or node.args:
            raise malformed
        pairs = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in node.keywords]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise malformed from error
    named = {key: value for key, value in pairs if key is not None}
    if len(named) < len(pairs):  # given twice, or as **{…}
        raise malformed
    return node.func.id, named
