"""A value in the wrong place is refused where the strategy is made, with place and way out."""

from collections.abc import Callable
from typing import Any

import pytest

import slipstream as s
from slipstream.codecs import Above, Drop, Factors, Filter
from slipstream.consistency import All, Consistency, FirstOf
from slipstream.errors import ConfigError
from slipstream.methods import Rounds
from slipstream.parts import Part
from slipstream.routes import ByRole, Cheapest, Everywhere, Prefer, Route
from slipstream.schedules import Priority
from slipstream.systems import parse
from slipstream.topologies import Sharded, Tree
from slipstream.updates import ClipNorm, Update, UserOptimizer

ROUTE = Route(Sharded())
ALL = Everywhere(ROUTE)


def routed(**fields: Any) -> s.Strategy:
    return s.Strategy("m", Rounds(Everywhere(Route(**{"topology": Sharded(), **fields}))))


def made(*args: Any, **fields: Any) -> s.Strategy:
    return s.Strategy("m", Rounds(ALL, *args, **fields))


MISPLACED: dict[str, Callable[[], object]] = {
    "routes takes Everywhere, .* not a Route: write Everywhere(Route(…))": lambda: s.Strategy(
        "m",
        Rounds(ROUTE),  # type: ignore[arg-type]
    ),
    "routes.parameter takes .* write Everywhere(Route(…))": lambda: s.Strategy(
        "m",
        Rounds(ByRole(ROUTE, ROUTE)),  # type: ignore[arg-type]
    ),
    "routes.route.topology takes Sharded, Mesh, PeerSharded, Tree or TwoLevel": lambda: routed(
        topology="sharded"
    ),
    "routes.route.topology takes .*: write Sharded()": lambda: routed(topology=Sharded),
    "topology.whole_layers takes True or False, not 'yes'": lambda: routed(
        topology=Sharded("yes")  # type: ignore[arg-type]
    ),
    "routes.route.up.select takes Above or TopK, not 0.9: write Above(0.9)": lambda: routed(
        up=Filter(0.9)  # type: ignore[arg-type]
    ),
    "routes.route.down takes .*, not a Factors$": lambda: routed(down=Factors()),
    "consistency takes Consistency, not a FirstOf: write Consistency(FirstOf(…))": lambda: made(
        FirstOf(2)
    ),
    "consistency.gate takes .*, not 2: write Lag(2)": lambda: made(Consistency(All(), 2)),  # type: ignore[arg-type]
    "update takes Update, not a UserOptimizer: write Update(outer=UserOptimizer(…))": lambda: made(
        update=UserOptimizer(at="server")
    ),
    "update.average takes Ema or None, not 0.99: write Ema(0.99)": lambda: made(
        update=Update(average=0.99)  # type: ignore[arg-type]
    ),
    "update.before takes a tuple, not a ClipNorm": lambda: made(
        update=Update(before=ClipNorm(1.0))  # type: ignore[arg-type]
    ),
    "schedule takes .*: write Priority()": lambda: made(schedule=Priority),
    "name takes text, not 3": lambda: s.Strategy(3, Rounds(ALL)),  # type: ignore[arg-type]
    "chunk_bytes takes a whole number, not True": lambda: made(chunk_bytes=True),
    "for every server give a list of lists": lambda: Tree(2),  # type: ignore[arg-type]
    "compat.check takes a strategy": lambda: s.compat.check("push_pull"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", MISPLACED)
def test_a_misplaced_value_is_refused(says: str) -> None:
    pattern = says.replace("(", r"\(").replace(")", r"\)").replace("[", r"\[")
    with pytest.raises(ConfigError, match=pattern):
        MISPLACED[says]()


def test_a_part_of_ones_own_passes_where_parts_are_taken() -> None:
    class Mine(Part, frozen=True):
        """Of nobody's module but this one."""

    assert routed(topology=Mine())
    with pytest.raises(ConfigError, match="chunk_bytes takes a whole number, not a Mine"):
        made(chunk_bytes=Mine())


def test_json_is_a_strategys_text_too() -> None:
    mine = made(
        Consistency(FirstOf(2)),
        Update(outer=UserOptimizer(at="server")),
    )
    assert parse(mine.to_json()) == mine


def test_what_a_part_refuses_names_the_text_it_came_from() -> None:
    with pytest.raises(ConfigError, match=r"push_pull\(averaged=2\): averaging with a decay of 2"):
        parse("push_pull(averaged=2)")


def test_ako_takes_a_share_as_text() -> None:
    assert parse("ako(delta='90%')").method.held_back == Above(Drop(0.9), decay="constant")  # type: ignore[union-attr]


def test_lists_become_tuples() -> None:
    lists: Any = [ROUTE]
    clips: Any = [ClipNorm(1.0)]
    assert Prefer(lists) == Prefer((ROUTE,))
    assert Update(before=clips) == Update(before=(ClipNorm(1.0),))
    assert hash(Cheapest(lists)) == hash(Cheapest((ROUTE,)))


def test_a_message_is_not_prefixed_twice() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("backup_workers(first='x')")
    assert str(refused.value).count("first='x'") == 1
