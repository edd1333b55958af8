"""Any two or three parts together: refused with a reason, or a run in which everything counts."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any, get_args

import pytest
from mixes import WORKERS, run_and_check, specs_for

from slipstream import compat
from slipstream.codecs import (
    Above,
    AnyCodec,
    Dense,
    Drop,
    Factors,
    Filter,
    LowRank,
    Rows,
    SegmentCodec,
    TopK,
)
from slipstream.consistency import (
    All,
    AnyAdmission,
    AnyDamping,
    Asynchronous,
    ByAge,
    Consistency,
    Constant,
    FirstOf,
    KAsync,
    Lag,
    StaleSynchronous,
)
from slipstream.errors import IncompatibleParts, IncompatibleRoute
from slipstream.methods import Rounds
from slipstream.outer_optimizers import SGD, Adam
from slipstream.planning.choosing import ByBytes
from slipstream.routes import (
    AnyPolicy,
    AnyTransport,
    ByRole,
    ByTensor,
    Cheapest,
    Collective,
    Everywhere,
    Large,
    Links,
    Prefer,
    Route,
    Rule,
)
from slipstream.schedules import AfterBackward, AnySchedule
from slipstream.strategy import Strategy
from slipstream.topologies import AnyTopology, Mesh, PeerSharded, Sharded, Tree
from slipstream.types import Cluster
from slipstream.updates import (
    Add,
    AnyInner,
    AnyOuter,
    ClipNorm,
    Ema,
    LocalSteps,
    Nesterov,
    Update,
    UserOptimizer,
    UserSteps,
)

LARGEST = Filter(TopK(0.5), values="int4")
# Parts that need arguments, or whose arguments make another part of them.
EXAMPLES: dict[type[Any], list[Any]] = {
    Tree: [Tree((((1,), (2,), (0,), ()), ((0, 2), (1,), (), ())))],
    Sharded: [Sharded(), Sharded(whole_layers=True)],
    Dense: [Dense(), Dense("bfloat16")],
    Factors: [Factors(), Factors("int8")],
    Rows: [Rows(), Rows("int8")],
    Filter: [Filter(Above(3.0, "constant")), Filter(Above(Drop(0.5))), LARGEST],
    All: [All(), All(without_lost=True)],
    FirstOf: [FirstOf(2)],
    KAsync: [KAsync(2), KAsync(1)],  # what residuals keep is checked with 1
    StaleSynchronous: [StaleSynchronous(), StaleSynchronous(without_lost=True)],
    Asynchronous: [Asynchronous(), Asynchronous(ramp_up=2)],
    Lag: [Lag(0), Lag(2)],
    Constant: [Constant(), Constant(0.5)],
    UserOptimizer: [UserOptimizer("worker"), UserOptimizer("server")],
    Add: [Add("worker"), Add("server")],
    LocalSteps: [LocalSteps(4), LocalSteps(4, fragments=2), LocalSteps(4, overlap_steps=1)],
    SGD: [SGD(at="worker"), SGD(at="server")],
    Nesterov: [Nesterov(at="worker"), Nesterov(at="server")],
    Adam: [Adam(at="worker"), Adam(at="server")],
}


def parts(kinds: Any) -> list[Any]:
    """An example of every part of an axis; a new part without arguments needs none here."""
    return [example for kind in get_args(kinds) for example in (EXAMPLES.get(kind) or [kind()])]


def beside(route: Route) -> Route:
    """A route for the tensors that do not take this one."""
    return Route(Mesh()) if route == Route(Sharded()) else Route(route.topology)


# One policy of every kind around a route, and another route where it takes several.
POLICIES: dict[type[Any], Any] = {
    Everywhere: Everywhere,
    Prefer: lambda route: Prefer((route, beside(route))),
    ByTensor: lambda route: ByTensor((Rule(Large(1000), route),), beside(route)),
    Cheapest: lambda route: Cheapest((route, beside(route)), ByBytes()),
    ByRole: lambda route: ByRole(Everywhere(route), Everywhere(beside(route))),
}
AXES: dict[str, list[Any]] = {
    "policy": list(get_args(AnyPolicy)),
    "topology": parts(AnyTopology),
    "up": parts(AnyCodec),
    "down": parts(SegmentCodec),
    "over": parts(AnyTransport),
    "admit": parts(AnyAdmission),
    "gate": EXAMPLES[Lag],
    "damping": parts(AnyDamping),
    "inner": parts(AnyInner),
    "outer": parts(AnyOuter),
    "before": [(), (ClipNorm(1.0),)],
    "average": [None, Ema(0.9)],
    "schedule": parts(AnySchedule),
}
NAMES = list(AXES)
PLAIN = tuple(AXES[name][0] for name in NAMES)
# Beside these less can be checked: a pair that a strategy with one of them is to cover has it.
LOOSELY_CHECKED = {
    ByAge(), Dense("bfloat16"), Factors("int8"), Rows("int8"), Asynchronous(ramp_up=2)
}  # fmt: skip
# What the named systems choose where it is not the plain part: the neighbourhood of these is
# where most combinations that make sense are.
HOLDER = {"outer": UserOptimizer("server")}
WHOLE = {"topology": Sharded(whole_layers=True)}
STARTS: list[dict[str, Any]] = [
    {},
    HOLDER,
    {"topology": Mesh(), "down": Dense()},
    {"topology": PeerSharded()},
    WHOLE,
    {**WHOLE, **HOLDER},
    {**WHOLE, **HOLDER, "policy": Prefer, "up": Factors()},
    {"policy": Cheapest, "topology": Mesh(), "up": Factors()},
    {"policy": ByTensor, "up": Filter(Above(Drop(0.5)))},
    {"policy": Prefer, "up": LowRank(), "down": LowRank()},
    {"policy": Prefer, "up": LowRank(), "admit": FirstOf(2), **HOLDER},
    {"policy": ByTensor, "topology": Mesh(), "up": LowRank()},
    {"policy": ByRole, "topology": Mesh(), "over": Collective()},
    {"admit": FirstOf(2), **HOLDER},
    {"admit": StaleSynchronous(), "gate": Lag(2)},
    {"admit": StaleSynchronous(), "gate": Lag(2), **HOLDER},
    {"gate": Lag(2)},
    {"admit": Asynchronous(), **HOLDER},
    {"admit": KAsync(2), **HOLDER},
    {"inner": UserSteps(), "outer": Add("worker"), "schedule": AfterBackward()},
    {"inner": LocalSteps(4), "outer": Nesterov(), "schedule": AfterBackward()},
    {"inner": LocalSteps(4), "outer": Nesterov(at="server"), "schedule": AfterBackward()},
]


def strategy_of(chosen: tuple[Any, ...]) -> Strategy:
    part = dict(zip(NAMES, chosen, strict=True))
    route = Route(part["topology"], part["up"], part["down"], part["over"])
    return Strategy(
        "mix",
        Rounds(
            POLICIES[part["policy"]](route),
            Consistency(part["admit"], part["gate"], part["damping"]),
            Update(part["inner"], part["outer"], part["before"], part["average"]),
            part["schedule"],
            chunk_bytes=4096,
        ),
    )


def has_way_out(refusal: str) -> bool:
    return "cannot travel" in refusal and ("route it to" in refusal or "give all of" in refusal)


@functools.cache
def fits(chosen: tuple[Any, ...]) -> bool:
    """Whether there is a plan; if not, it is refused with a reason and a way out."""
    strategy = strategy_of(chosen)
    found = compat.problems(strategy)
    if found:
        assert all(problem.why and problem.instead for problem in found)
        with pytest.raises(IncompatibleParts) as refused:
            compat.check(strategy)
        assert all(problem.instead in str(refused.value) for problem in found)
        return False
    try:
        strategy.plan(specs_for(strategy), Cluster(WORKERS, 2))
    except IncompatibleRoute as refused:
        return not has_way_out(str(refused))
    return True


@functools.cache
def train(chosen: tuple[Any, ...]) -> str:
    """Simulate it, unless a collective carries it."""
    strategy = strategy_of(chosen)
    if any(not isinstance(route.over, Links) for route in strategy.rounds.routes.routes()):
        return "planned"
    run_and_check(strategy)
    return "trained"


Changes = frozenset[tuple[int, Any]]  # of axes, by number, to other parts


def around(base: tuple[Any, ...]) -> dict[Changes, None]:
    """All that differs from a strategy in at most two parts."""
    found: dict[Changes, None] = {frozenset(): None}
    for (i, name), (j, other) in itertools.combinations(enumerate(NAMES), 2):
        for pair in itertools.product(AXES[name], AXES[other]):
            changes = zip((i, j), pair, strict=True)
            found[frozenset((at, part) for at, part in changes if base[at] != part)] = None
    return found


def changed(base: tuple[Any, ...], changes: Changes) -> tuple[Any, ...]:
    by_place = dict(changes)
    return tuple(by_place.get(place, part) for place, part in enumerate(base))


def loose(changes: Changes) -> set[Any]:
    return {part for _, part in changes if part in LOOSELY_CHECKED}


def packed(base: tuple[Any, ...], wanted: dict[Changes, None]) -> list[Changes]:
    """Few sets of changes, each of a strategy that fits, which have all wanted ones within them."""
    rows = []
    while wanted:
        row: Changes = next(iter(wanted))
        for more in list(wanted):
            both = row | more
            one_part_each = len(dict(both)) == len(both)
            as_strict = loose(both) == loose(row) == loose(more)
            if one_part_each and as_strict and fits(changed(base, both)):
                row = both
                del wanted[more]
        rows.append(row)
    return rows


def name_of(start: dict[str, Any]) -> str:
    return " ".join(getattr(part, "__name__", str(part)) for part in start.values()) or "plain"


def base_of(start: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(start.get(name, plain) for name, plain in zip(NAMES, PLAIN, strict=True))


@pytest.mark.parametrize("start", STARTS, ids=name_of)
def test_any_two_parts_are_refused_or_train(start: dict[str, Any]) -> None:
    base = base_of(start)
    accepted = {changes: None for changes in around(base) if fits(changed(base, changes))}
    assert len(accepted) > 10, "a start must be worth its neighbourhood"
    for changes in packed(base, accepted):
        train(changed(base, changes))


def covering(strength: int, seed: int) -> list[tuple[Any, ...]]:
    """Rows in which any parts of so many axes stand together at least once."""
    numbers = random.Random(seed)
    axes = [range(len(AXES[name])) for name in NAMES]
    open_sets = {
        (places, values)
        for places in itertools.combinations(range(len(NAMES)), strength)
        for values in itertools.product(*(axes[place] for place in places))
    }
    rows = []
    waiting = iter(sorted(open_sets))
    while open_sets:
        places, values = next(one for one in waiting if one in open_sets)
        best: tuple[int, ...] = ()
        most = -1
        for _ in range(6):
            row = [numbers.choice(axis) for axis in axes]
            for place, value in zip(places, values, strict=True):
                row[place] = value
            covered = sum(
                1
                for at in itertools.combinations(range(len(NAMES)), strength)
                if (at, tuple(row[place] for place in at)) in open_sets
            )
            if covered > most:
                best, most = tuple(row), covered
        for at in itertools.combinations(range(len(NAMES)), strength):
            open_sets.discard((at, tuple(best[place] for place in at)))
        rows.append(tuple(AXES[name][value] for name, value in zip(NAMES, best, strict=True)))
    return rows


def test_any_three_parts_are_refused_or_planned() -> None:
    outcomes = Counter(train(row) if fits(row) else "refused" for row in covering(3, seed=1))
    assert outcomes["refused"] > 200


def test_three_parts_in_place_of_others_train() -> None:
    """Of what a named system is made of; so many that fit are drawn for each."""
    numbers = random.Random(1)
    trained = 0
    for base in map(base_of, STARTS):
        drawn: dict[Changes, None] = {}
        for _ in range(300):
            places = numbers.sample(range(len(NAMES)), 3)
            changes = frozenset((place, numbers.choice(AXES[NAMES[place]])) for place in places)
            if fits(changed(base, changes)):
                drawn[changes] = None
        trained += [train(changed(base, row)) for row in packed(base, drawn)].count("trained")
    assert trained > 50
