"""Strategies are data: JSON text and back, and one message for whatever is no strategy."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from slipstream.codecs import (
    Above,
    Dense,
    Drop,
    Factors,
    Filter,
    LowRank,
    OneBit,
    Quantized,
    Rows,
    TopK,
)
from slipstream.consistency import (
    All,
    Asynchronous,
    ByAge,
    Consistency,
    Constant,
    FirstOf,
    KAsync,
    Lag,
    StaleSynchronous,
)
from slipstream.errors import ConfigError
from slipstream.methods import PartialExchange, Rounds, SharedMemoryUpdates
from slipstream.outer_optimizers import SGD, Adam
from slipstream.parts import FACTS, Part
from slipstream.planning.choosing import ByBytes, ByTime
from slipstream.planning.costs import Speeds
from slipstream.routes import (
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
from slipstream.schedules import AfterBackward, Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse
from slipstream.topologies import Mesh, PeerSharded, Sharded, Tree, TwoLevel
from slipstream.types import Spec
from slipstream.updates import (
    Add,
    ClipNorm,
    Ema,
    Gradients,
    LocalSteps,
    Nesterov,
    Update,
    UserOptimizer,
    UserSteps,
)

SHARDED = Route(Sharded(), up=Dense("bfloat16"), down=Dense("float16"))
FACTORS = Route(Mesh(), up=Factors("bfloat16"))


def on(route: Route) -> Strategy:
    return Strategy("mine", Rounds(Everywhere(route)))


def counted(*parts: Any) -> Strategy:
    return Strategy("mine", Rounds(Everywhere(SHARDED), Consistency(*parts)))


def updated(**parts: Any) -> Strategy:
    return Strategy("mine", Rounds(Everywhere(SHARDED), update=Update(**parts)))


# By part: a strategy that has it, and not as it comes where it has fields.
EXAMPLES: dict[type[Part], Strategy] = {
    Above: on(Route(Mesh(), up=Filter(Above(Drop(0.5), "root", 0.25, 1e6, of_mean=True)))),
    Add: updated(outer=Add("server")),
    AfterBackward: Strategy("mine", Rounds(Everywhere(SHARDED), schedule=AfterBackward())),
    All: counted(All(without_lost=True)),
    ByAge: counted(All(), Lag(), ByAge()),
    ByBytes: Strategy("mine", Rounds(Cheapest((FACTORS, SHARDED), ByBytes()))),
    ByRole: Strategy("mine", Rounds(ByRole(Everywhere(SHARDED), Everywhere(FACTORS)))),
    ByTensor: Strategy("mine", Rounds(ByTensor((Rule(Large(5, 2, "fc*"), FACTORS),), SHARDED))),
    ByTime: Strategy("mine", Rounds(Cheapest((FACTORS, SHARDED), ByTime(Speeds(1e9, 2e10, 3e9))))),
    Cheapest: Strategy("mine", Rounds(Cheapest((FACTORS, SHARDED), dense=("fc", "out")))),
    ClipNorm: updated(before=(ClipNorm(2.5),)),
    Collective: on(Route(Mesh(), over=Collective())),
    Consistency: counted(StaleSynchronous(), Lag(3), Constant(0.5)),
    Constant: counted(All(), Lag(), Constant(0.125)),
    Dense: on(Route(Sharded(), up=Dense("bfloat16"))),
    Drop: on(Route(Mesh(), up=Filter(Above(Drop(0.9), congested=Drop(0.99))))),
    Asynchronous: counted(Asynchronous(100)),
    Ema: updated(average=Ema(0.999)),
    Everywhere: on(SHARDED),
    Factors: on(FACTORS),
    Filter: on(Route(Mesh(), up=Filter(values="bfloat16", squeeze="lz4"))),
    FirstOf: counted(FirstOf(backup=2, adapts=True, close_after_s=0.5, min_first=2)),
    StaleSynchronous: counted(StaleSynchronous(without_lost=True)),
    KAsync: counted(KAsync(3)),
    Lag: counted(All(), Lag(2)),
    Large: Strategy("mine", Rounds(ByTensor((Rule(Large(9, 1, "*.weight"), SHARDED),), FACTORS))),
    Links: on(Route(Mesh(), over=Links())),
    LowRank: on(Route(Sharded(), up=LowRank(2, 5), down=LowRank(2, 5))),
    Mesh: on(Route(Mesh())),
    Gradients: updated(inner=Gradients()),
    OneBit: on(Route(Sharded(), up=OneBit(), down=OneBit())),
    Prefer: Strategy("mine", Rounds(Prefer((FACTORS, SHARDED)))),
    Priority: Strategy("mine", Rounds(Everywhere(SHARDED), schedule=Priority())),
    Quantized: on(Route(Sharded(), up=Quantized(4, 64, "stochastic", 7))),
    PeerSharded: on(Route(PeerSharded())),
    PartialExchange: Strategy("mine", PartialExchange(3, 7, 1e6, Above(0.1), True, "sqrt", 9)),
    Rounds: on(SHARDED),
    Route: on(Route(Sharded(whole_layers=True), Filter(), OneBit(), Collective())),
    Rows: on(Route(Mesh(), up=Rows("bfloat16"))),
    Rule: Strategy(
        "mine",
        Rounds(ByTensor((Rule(Large(), Prefer((SHARDED,))), Rule(Large(2), FACTORS)), SHARDED)),
    ),
    Sharded: on(Route(Sharded(whole_layers=True))),
    SharedMemoryUpdates: Strategy("mine", SharedMemoryUpdates(3, True, "direct", "/tmp/kept", 2.0)),
    TopK: on(Route(Mesh(), up=Filter(TopK(0.01), values="int4"))),
    Tree: on(Route(Tree((((1,), (), (0,)),), gone=(4,)))),
    TwoLevel: on(Route(TwoLevel(Mesh()))),
    Update: updated(inner=UserSteps(), outer=Add()),
    UserOptimizer: updated(outer=UserOptimizer("server")),
    LocalSteps: updated(inner=LocalSteps(8, fragments=2, overlap_steps=3, mix=0.5)),
    SGD: updated(outer=SGD(0.5)),
    Nesterov: updated(outer=Nesterov(0.5, 0.8, at="server")),
    Adam: updated(outer=Adam(0.5, eps=1e-6, at="server")),
    UserSteps: updated(inner=UserSteps()),
    WaitFree: Strategy("mine", Rounds(Everywhere(SHARDED), schedule=WaitFree(), chunk_bytes=4096)),
}


def known_parts() -> set[type[Any]]:
    """All parts that the JSON of a strategy can name."""
    found: dict[type[Any], None] = {}

    def walk(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls in found:
                return
            found[kind.cls] = None
        for inner in (getattr(kind, name, ()) for name in ("types", "fields", "item_types")):
            for each in inner:
                walk(each)
        for name in ("type", "item_type"):
            if (inner := getattr(kind, name, None)) is not None:
                walk(inner)

    walk(msgspec.inspect.type_info(Strategy))
    return {kind for kind in found if issubclass(kind, Part)}


def all_parts(kind: type[Any] = Part) -> set[type[Any]]:
    below = [sub for sub in kind.__subclasses__() if sub.__module__.startswith("slipstream.")]
    return {*below}.union(*map(all_parts, below))


def test_there_is_an_example_of_every_part() -> None:
    assert known_parts() == set(EXAMPLES)


def test_json_can_name_every_part_but_those_that_others_build_on() -> None:
    bases = {"Admission", "EveryRound", "LayerCodec", "SharedCodec", "Topology", "OuterOptimizer"}
    assert {part.__name__ for part in all_parts() - known_parts()} == bases


def parts_in(value: Any) -> set[type]:
    if isinstance(value, msgspec.Struct):
        inner = [parts_in(getattr(value, name)) for name in value.__struct_fields__]
        return {type(value)}.union(*inner)
    return set().union(*map(parts_in, value)) if isinstance(value, tuple) else set()


@pytest.mark.parametrize("part", EXAMPLES, ids=lambda part: part.__name__)
def test_every_part_comes_back_from_json(part: type[Part]) -> None:
    strategy = EXAMPLES[part]
    again = Strategy.from_json(strategy.to_json())
    assert part in parts_in(again)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert repr(again) == repr(strategy)
    assert Strategy.from_json(strategy.to_json().encode()) == strategy


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_comes_back_from_json(name: str) -> None:
    strategy = SYSTEMS[name]()
    text = strategy.to_json()
    json.loads(text)
    assert Strategy.from_json(text) == strategy
    assert strategy.config_fingerprint() == Strategy.from_json(text).config_fingerprint()


@pytest.mark.parametrize(
    "text",
    [
        "ako(partitions=3, staleness=7, schedule='same', rate='8mbit', delta=0.25)",
        "backup_workers(backup=2, close_after_s=0.5, averaged=0.99)",
        "gadei(slots=4, consistent=True, checkpoints='/tmp/kept', every_s=3)",
        "parameter_flow(delta={'fc*': '95%', '*': 1e-4}, codec='bfloat16+zstd', staleness=2, "
        "payload='update', congested_delta='99%', congested_below='50mbit')",
        "poseidon(rate='10gbit', wire='bfloat16', dense=['fc'])",
        "push_pull(update='server', clip_norm=1.0, averaged=0.9, chunk_bytes=4096)",
    ],
)
def test_systems_with_arguments_come_back_from_json(text: str) -> None:
    strategy = parse(text)
    assert Strategy.from_json(strategy.to_json()) == strategy


def edited(change: Any) -> str:
    told = json.loads(parse("parameter_flow").to_json())
    change(told)
    return json.dumps(told)


def up(told: Any) -> Any:
    return told["method"]["routes"]["rules"][0]["route"]["up"]


WRONG = {
    "unknown part": edited(lambda told: up(told).update(part="Zipped")),
    "part of another kind": edited(lambda told: up(told).update(part="Mesh")),
    "no part named": edited(lambda told: up(told).pop("part")),
    "unknown field": edited(lambda told: up(told).update(speed=3)),
    "unknown field of the strategy": edited(lambda told: told.update(mode="fast")),
    "missing field": edited(lambda told: told["method"].pop("routes")),
    "value of another type": edited(lambda told: up(told)["select"].update(threshold=[])),
    "value that makes no sense": edited(lambda told: up(told)["select"].update(decay="often")),
    "unknown choice": edited(lambda told: up(told).update(values="float3")),
    "bad chunk": edited(lambda told: told["method"].update(chunk_bytes=0)),
    "code": edited(lambda told: told["method"].update(routes="lambda spec: 1")),
    "no object": "[]",
    "no JSON": "push_pull()",
    "nothing": "",
    "cut off": parse("push_pull").to_json()[:-1],
    "two": parse("push_pull").to_json() * 2,
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("trouble", WRONG)
def test_what_is_no_strategy_is_refused_with_one_message(trouble: str) -> None:
    with pytest.raises(ConfigError, match=r"no strategy can be read from this JSON: .*to_json\(\)"):
        Strategy.from_json(WRONG[trouble])


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ('"Asynchronous"', '"Each"'),
        ('"StaleSynchronous"', '"Fold"'),
        ('"Gradients"', '"Off"'),
        ('"UserOptimizer"', '"User"'),
        ('"server"', '"holder"'),
        ('"same"', '"own"'),
    ],
)
def test_names_of_earlier_versions_are_refused_with_the_new_ones(new: str, old: str) -> None:
    systems = ("push_pull(update='server')", "async_sgd", "bounded_staleness(s=2)")
    text = next(text for text in (parse(name).to_json() for name in systems) if new in text)
    with pytest.raises(ConfigError, match=f"write '{new[1:-1]}' for '{old[1:-1]}'"):
        Strategy.from_json(text.replace(new, old))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="no strategy can be read"):
        Strategy.from_json(b'{"name": "\xff\xfe"}')


class Zipped(Part, frozen=True):
    """A part of somebody's own."""


class Doubled(Dense, frozen=True):
    """One that is like one of slipstream's, and does something else."""


class Foreign:
    """Not even a part."""

    name, form, lossy, splits = "foreign", "dense", False, True

    def obstacle(self, spec: Spec) -> str:
        return ""


@pytest.mark.parametrize("own", [Zipped(), Doubled()], ids=lambda p: type(p).__name__)
def test_a_part_of_somebodys_own_is_refused_by_name(own: Any) -> None:
    strategy = on(Route(Mesh(), up=own))
    said = rf"mine: .*{type(own).__name__}: the module {__name__} may not be imported .*--parts"
    with pytest.raises(ConfigError, match=said):
        strategy.to_json()


def test_what_is_no_part_is_refused_by_name() -> None:
    foreign: Any = Foreign()
    with pytest.raises(ConfigError, match=r"'mine': routes.route.up takes Dense, .*Foreign"):
        on(Route(Mesh(), up=foreign))


def test_a_part_in_the_wrong_place_is_refused() -> None:
    odd: Any = Mesh()
    with pytest.raises(ConfigError, match=r"'mine': routes.route.up takes .*Mesh"):
        on(Route(Mesh(), up=odd))


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_json_does_not_have_are_refused(number: float) -> None:
    with pytest.raises(ConfigError, match="mine: "):
        on(Route(Mesh(), up=Filter(Above(congested_below=number)))).to_json()


def test_numbers_that_are_not_pythons_own_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"numpy\.float64 .*; give Python's own numbers"):
        updated(average=Ema(np.float64(0.5))).to_json()


def test_strategies_are_frozen_values() -> None:
    strategy = parse("push_pull")
    with pytest.raises(AttributeError):
        strategy.name = "other"  # type: ignore[misc]
    assert {strategy: 1}[parse("push_pull()")] == 1
    other = Strategy(strategy.name, msgspec.structs.replace(strategy.rounds, chunk_bytes=64))
    assert (other.rounds.chunk_bytes, other.rounds.routes) == (64, strategy.rounds.routes)
    assert other != strategy


@pytest.mark.parametrize("part", EXAMPLES, ids=lambda part: part.__name__)
def test_facts_are_known_ones(part: type[Part]) -> None:
    def facts_in(value: Any) -> set[str]:
        own = set(value.facts()) if isinstance(value, Part) else set()
        if isinstance(value, msgspec.Struct):
            nested = [getattr(value, name) for name in value.__struct_fields__]
            return own.union(*map(facts_in, nested))
        return own.union(*map(facts_in, value)) if isinstance(value, tuple) else own

    assert facts_in(EXAMPLES[part]) <= FACTS
