"""The check that a strategy's parts go together, which runs before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError, IncompatibleParts
from slipstream.methods import Rounds
from slipstream.parts import facts
from slipstream.rules import RULES as RULES

if TYPE_CHECKING:
    from slipstream.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a strategy breaks, on one of its routes."""

    scheme: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"on {self.scheme}: {self.why}; {self.instead}"


def problems(strategy: Strategy) -> list[Problem]:
    """Return every rule that a strategy breaks, by route.

    Args:
        strategy: Any composition of parts.

    Returns:
        The problems; empty if the parts are compatible.

    >>> from slipstream import systems
    >>> problems(systems.push_pull())
    []
    """
    if not isinstance(rounds := strategy.method, Rounds):
        return []
    common = rounds.consistency.facts() | rounds.update.facts() | rounds.schedule.facts()
    common |= rounds.routes.facts()
    routes = dict.fromkeys(rounds.routes.routes())
    if len(routes) > 1:
        common |= facts("several routes")
    levels = {"hosts aggregate first" in route.facts() for route in routes}
    if len(levels) > 1:
        common |= facts("some tensors skip the host")
    broken_rules: dict[str, Problem] = {}
    for route in routes:
        known = common | route.facts()
        for rule in RULES:
            if rule.broken_by(known):
                problem = Problem(route.scheme, rule.why, rule.instead)
                broken_rules.setdefault(rule.why + rule.instead, problem)
    return list(broken_rules.values())


def check(strategy: Strategy) -> None:
    """Check that a strategy's parts are compatible.

    Args:
        strategy: Any composition of parts.

    Raises:
        IncompatibleParts: Parts are incompatible; the message has every reason and what to do
            instead.

    >>> from slipstream.routes import Everywhere, Route
    >>> from slipstream.topologies import Mesh
    >>> from slipstream import Strategy
    >>> from slipstream.updates import Update, UserOptimizer
    >>> at_servers = Update(outer=UserOptimizer(at="server"))
    >>> check(Strategy("mine", Rounds(Everywhere(Route(Mesh())), update=at_servers)))
    Traceback (most recent call last):
    ...
    slipstream.errors.IncompatibleParts: mine on dense/mesh: every worker holds the tensor: there \
is no server to update weights; use UserOptimizer(at='worker'), or Sharded()
    """
    if not hasattr(strategy, "method"):
        raise ConfigError(
            f"compat.check takes a strategy, such as slipstream.push_pull(), not {strategy!r}"
        )
    if broken_rules := problems(strategy):
        raise IncompatibleParts(f"{strategy.name} {'; also '.join(map(str, broken_rules))}")
