"""The named systems, each a short composition; ``parse`` reads one from text."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Sequence

from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.strategy import Strategy
from slipstream.systems.adam_factors import adam_factors as adam_factors
from slipstream.systems.ako import ako as ako
from slipstream.systems.all_to_all import all_to_all as all_to_all
from slipstream.systems.allreduce import allreduce as allreduce
from slipstream.systems.async_sgd import async_sgd as async_sgd
from slipstream.systems.backup_workers import backup_workers as backup_workers
from slipstream.systems.bounded_staleness import bounded_staleness as bounded_staleness
from slipstream.systems.diloco import diloco as diloco
from slipstream.systems.diloco import local_sgd as local_sgd
from slipstream.systems.gadei import gadei as gadei
from slipstream.systems.k_async import k_async as k_async
from slipstream.systems.low_rank import low_rank as low_rank
from slipstream.systems.one_bit import one_bit as one_bit
from slipstream.systems.parameter_flow import parameter_flow as parameter_flow
from slipstream.systems.poseidon import poseidon as poseidon
from slipstream.systems.push_pull import push_pull as push_pull

SYSTEMS: dict[str, Callable[..., Strategy]] = {
    system.__name__: system
    for system in (
        adam_factors,
        ako,
        all_to_all,
        allreduce,
        async_sgd,
        backup_workers,
        bounded_staleness,
        diloco,
        gadei,
        k_async,
        local_sgd,
        low_rank,
        one_bit,
        parameter_flow,
        poseidon,
        push_pull,
    )
}


def parse(text: str, *, parts: Sequence[str] = ()) -> Strategy:
    """Parse a strategy from text, as given on a command line or in an environment variable.

    Args:
        text: The name of a system, a call of it with literal keyword arguments, or the JSON of a
            strategy.
        parts: The modules that may be imported for parts of your own that the JSON names.

    Returns:
        The system's strategy, or the one in the JSON.
    Raises:
        UnknownStrategy: There is no such system, or it does not take these arguments.
        ConfigError: An argument's value is invalid.

    >>> parse("push_pull(overlap=False)") == push_pull(overlap=False)
    True
    """
    if is_json(text):
        return Strategy.from_json(text, parts=parts)
    name, arguments = read_call(text)
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name, SYSTEMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownStrategy(f"no strategy {name!r}: there are {', '.join(SYSTEMS)}{hint}")
    factory = SYSTEMS[name]
    if unknown := set(arguments) - set(inspect.signature(factory).parameters):
        takes = ", ".join(inspect.signature(factory).parameters) or "no arguments"
        raise UnknownStrategy(
            f"{name} does not take {', '.join(sorted(unknown))}: it takes {takes}"
        )
    try:
        return factory(**arguments)
    except ConfigError as error:
        if str(error).startswith(name):
            raise
        # A part's field names differ from the argument names: show what the user wrote.
        raise ConfigError(f"{text.strip()}: {error}") from error


def call_of(strategy: Strategy) -> str:
    """Return a strategy's name, with the argument that moves the update to servers, for messages.

    >>> call_of(push_pull(update="server")), call_of(async_sgd())
    ('push_pull(update="server")', 'async_sgd')
    """
    at_server = strategy.name == "push_pull" and strategy.rounds.update.holder_applies
    return 'push_pull(update="server")' if at_server else strategy.name


def is_json(text: str) -> bool:
    """Return True if a strategy's text is JSON, not a call."""
    return text.lstrip().startswith("{")


def read_call(text: str) -> tuple[str, dict[str, object]]:
    """Return the name and the literal keyword arguments of a call."""
    malformed = UnknownStrategy(
        f"cannot read strategy {text!r}: write NAME or NAME(key=value, …) with literal values "
        "(text in quotes)"
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
    arguments = {key: value for key, value in pairs if key is not None}
    if len(arguments) < len(pairs):  # given twice, or as **{…}
        raise malformed
    return node.func.id, arguments
