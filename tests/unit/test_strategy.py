"""Plans: which route each tensor takes, how units are dealt, and what is refused before a start."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import make_plan, spec_lists, vector

from slipstream.codecs import Dense, Factors
from slipstream.codecs.protocol import Form
from slipstream.errors import ConfigError, IncompatibleParts, IncompatibleRoute, TooManyServers
from slipstream.methods import Rounds
from slipstream.parts import Part
from slipstream.planning.table import as_text
from slipstream.routes import (
    ByRole,
    ByTensor,
    Cheapest,
    Collective,
    Everywhere,
    Large,
    Prefer,
    Route,
    Rule,
)
from slipstream.schedules import AfterBackward, AnySchedule, Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import parse
from slipstream.topologies import Mesh, Sharded
from slipstream.types import Cluster, Spec
from slipstream.updates import Update, UserOptimizer

SHARDED = Route(Sharded(), up=Dense())
HALVED = Route(Sharded(), up=Dense("bfloat16"))
PEERS = Route(Mesh(), up=Dense())


class InTurn(Part, frozen=True):
    """Routes tensors in turn; builds each route anew, as a policy that chooses would."""

    given: tuple[Route, ...]

    def routes(self) -> tuple[Route, ...]:
        return self.given

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        chosen = self.given[spec.order % len(self.given)]
        return (Route(chosen.topology, chosen.up, chosen.down, chosen.over),)


def strategy(
    *routes: Route,
    at_holder: bool = False,
    schedule: AnySchedule | None = None,
    chunk_bytes: int = 1 << 21,
) -> Strategy:
    policy: Any = InTurn(routes)
    return Strategy(
        "test",
        Rounds(
            policy,
            update=Update(outer=UserOptimizer("server" if at_holder else "worker")),
            schedule=schedule or WaitFree(),
            chunk_bytes=chunk_bytes,
        ),
    )


SPECS = [vector("a", 3000, order=0), vector("b", 20, order=1), vector("c", 7, order=2)]


def test_equal_routes_are_kept_once() -> None:
    plan = strategy(SHARDED, PEERS).plan(SPECS, Cluster(2, 1))
    assert plan.routes == (SHARDED, PEERS)
    assert plan.route_of == (0, 1, 0)
    assert [plan.route(plan.unit_of(chunk)) for chunk in plan.chunks] == [
        plan.routes[plan.route_of[chunk.segments[0].tensor]] for chunk in plan.chunks
    ]


def test_routes_that_differ_only_in_a_codec_stay_apart() -> None:
    plan = strategy(SHARDED, HALVED).plan(SPECS, Cluster(2, 1))
    assert plan.routes == (SHARDED, HALVED)
    assert {plan.route(unit).scheme for unit in plan.units} == {
        "dense/sharded",
        "dense-bfloat16/sharded",
    }


def test_a_scheme_names_codec_and_place() -> None:
    assert PEERS.scheme == "dense/mesh"
    assert Route(Mesh(), up=Dense("float16"), over=Collective()).scheme == (
        "dense-float16/collective"
    )


def test_a_mesh_has_no_server_to_update_it() -> None:
    with pytest.raises(IncompatibleParts, match=r"on dense/mesh: .*UserOptimizer\(at='worker'\)"):
        strategy(PEERS, at_holder=True).plan(SPECS, Cluster(2, 1))


def test_collectives_cannot_serve_shards() -> None:
    with pytest.raises(IncompatibleParts, match=r"a collective .* mesh; .*Links\(\)"):
        strategy(Route(Sharded(), over=Collective())).plan(SPECS, Cluster(2, 1))


def test_a_tensor_no_codec_can_carry_is_named_with_the_way_out() -> None:
    specs = [*SPECS, Spec("mask", (4,), "int64", 3)]
    with pytest.raises(
        IncompatibleRoute, match=r"'mask' cannot .* it is int64.*requires_grad_\(False\)"
    ):
        strategy(SHARDED).plan(specs, Cluster(2, 1))


def test_the_codec_on_the_way_down_is_asked_too() -> None:
    class Picky(Part, frozen=True):
        """Takes nothing."""

        name, lossy, splits, frames = "picky", False, True, 1
        form: Form = "dense"

        def obstacle(self, spec: Spec) -> str:
            return f"{spec.name} cannot come back"

    picky: Any = Picky()
    with pytest.raises(IncompatibleRoute, match="a cannot come back"):
        strategy(Route(Sharded(), up=Dense(), down=picky)).plan(SPECS, Cluster(2, 1))


def test_more_servers_than_chunks_is_refused_before_start() -> None:
    with pytest.raises(TooManyServers, match="5 servers but only 3 chunk"):
        strategy(SHARDED).plan(SPECS, Cluster(2, 5))


@pytest.mark.parametrize("chunk_bytes", [0, -1, 2.5, "2 MiB", True, (8 << 20) + 1])
def test_a_chunk_size_that_is_no_size_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        strategy(SHARDED, chunk_bytes=chunk_bytes)


def test_servers_are_needed_if_any_route_needs_them() -> None:
    assert strategy(PEERS, SHARDED).needs_servers(SPECS, Cluster(2, 1))
    assert not strategy(PEERS).needs_servers(SPECS, Cluster(2, 1))


@given(spec_lists(min_size=1), st.integers(1, 4), st.integers(1, 3))
def test_a_plan_gives_every_unit_of_every_route_its_holders(
    specs: list[Spec], workers: int, servers: int
) -> None:
    cluster = Cluster(workers, servers)
    try:
        plan = strategy(SHARDED, PEERS, HALVED, chunk_bytes=4096).plan(specs, cluster)
    except TooManyServers:
        return
    assert [unit.chunks for unit in plan.units] == [(chunk,) for chunk in plan.chunks]
    for chunk in plan.chunks:
        unit, holders = plan.unit_of(chunk), plan.holders_of(chunk)
        assert plan.places[chunk.index] == (unit.index, 0)
        assert holders == plan.holders[unit.index]
        if plan.route(unit).topology == Mesh():
            assert holders == cluster.worker_nodes
        else:
            assert len(holders) == 1
            assert set(holders) <= set(cluster.server_nodes)
        for node in range(workers + servers):
            assert (unit in plan.held_by(node)) == (node in holders)
            assert (chunk in plan.chunks_of(node)) == (node in holders)


@given(spec_lists(min_size=1, dtypes=["float32"]))
def test_a_unit_is_as_urgent_as_its_most_urgent_tensor(specs: list[Spec]) -> None:
    for schedule in (Priority(), WaitFree(), AfterBackward()):
        plan = strategy(PEERS, schedule=schedule).plan(specs, Cluster(2))
        for unit in plan.units:
            orders = [specs[tensor].order for tensor in unit.tensors]
            expected = min(orders) if schedule == Priority() else len(specs) - 1 - max(orders)
            assert plan.priority(unit) == expected


@pytest.mark.parametrize("schedule", [Priority(), WaitFree(), AfterBackward()])
def test_training_never_overtakes_what_must_come_before_it(schedule: AnySchedule) -> None:
    """Servers that update get the first weights at priority -1, ahead of any gradient."""
    head = [vector("head.weight", 9, order=40), vector("head.bias", 3, order=41)]  # all else frozen
    plan = strategy(SHARDED, schedule=schedule, at_holder=True).plan(head, Cluster(2, 1))
    assert all(plan.priority(unit) >= 0 for unit in plan.units)


def test_plans_are_values() -> None:
    plan, again = make_plan(SPECS), make_plan(SPECS)
    assert plan == again
    assert plan != make_plan(SPECS, workers=3)
    with pytest.raises(FrozenInstanceError):
        plan.cluster = Cluster(7)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        plan.strategy.name = "other"  # type: ignore[misc]


def test_a_route_with_nothing_on_it_needs_no_holder() -> None:
    plan = strategy(PEERS).plan([vector("none", 0)], Cluster(2))
    assert plan.chunks == plan.units == ()
    assert plan.held_by(0) == ()


@pytest.mark.parametrize(
    ("text", "each_way"),
    [
        ("all_to_all()", 3 * 4000),
        ("ako(partitions=6)", 3 * 4000 / 6),
        ("ako()", 4000),
        ("allreduce()", 2 * 3 / 4 * 4000),
    ],
)
def test_the_table_tells_what_leaves_a_worker(text: str, each_way: float) -> None:
    (row,) = parse(text).plan([vector("w", 1000, order=0)], Cluster(4)).rows({})
    assert row.link_bytes == each_way


MATRIX = Spec("w", (100, 60), "float32", 0)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("diloco(every=50)", 24_000 / 50),
        ("diloco(every=64, wire='int4')", (6000 * 0.5 + 47 * 4) / 64),  # 47 blocks of 128
        ("one_bit()", 8 + 6000 / 8),
        ("parameter_flow(delta='99%')", 12 + 60 * 4 + 60 + 46),  # entries, and gaps between them
        ("local_sgd(every=8, wire='bfloat16')", 12_000 / 8),
        ("low_rank(rank=4)", 8 + 4 * 4 * (100 + 60) / 2),  # its sides take turns
        ("allreduce(wire='bfloat16')", 12_000),
    ],
)
def test_the_table_has_the_bytes_of_a_step_and_those_of_all_dense(text: str, nbytes: float) -> None:
    plan = parse(text).plan([MATRIX], Cluster(4, servers=1))
    (row,) = plan.rows({})
    assert row.dense_link_bytes == plan.ways()[0].plain.dense_bytes(24_000), "in every step"
    assert row.link_bytes / row.dense_link_bytes == pytest.approx(nbytes / 24_000)
    spread = f"over {plan.steps_a_round} steps" in as_text([row])
    assert spread is (plan.local_steps is not None)


# ---- policies


def routes_of(policy: Any, *specs: Spec) -> list[Route]:
    plan = Strategy("test", Rounds(policy)).plan(specs, Cluster(2, 1))
    return [plan.routes[route] for route in plan.route_of]


WIDE = Spec("fc.weight", (40, 30), "float32", 0)
SLIM = Spec("fc.bias", (30,), "float32", 1)
MEAN = Spec("norm.mean", (2000,), "float32", 2, "buffer")
LONG = Spec("head.weight", (2000,), "float64", 3)


def test_the_first_rule_that_fits_a_tensor_gives_its_route() -> None:
    policy = ByTensor(
        (Rule(Large(1000, pattern="head*"), PEERS), Rule(Large(1000, dims=2), HALVED)), SHARDED
    )
    head = Spec("head.weight", (1000,), "float32", 4)
    assert routes_of(policy, WIDE, SLIM, MEAN, LONG, head) == [
        HALVED,
        SHARDED,
        SHARDED,
        SHARDED,
        PEERS,
    ]


def test_parameters_and_buffers_may_have_policies_of_their_own() -> None:
    policy = ByRole(Everywhere(HALVED), buffer=Everywhere(PEERS))
    assert routes_of(policy, WIDE, MEAN) == [HALVED, PEERS]
    assert set(policy.routes()) == {HALVED, PEERS}


def test_the_first_route_that_can_carry_a_tensor_is_preferred() -> None:
    factors = Route(Mesh(), up=Factors())
    layer = Spec("fc.weight", (40, 30), "float32", 0, layer="fc", form="factors")
    assert routes_of(Prefer((factors, SHARDED)), layer, SLIM) == [factors, SHARDED]
    with pytest.raises(ConfigError, match="at least one route"):
        Prefer(())
    with pytest.raises(IncompatibleRoute, match=r"'fc.bias' cannot travel factors/mesh: .*Dense"):
        routes_of(Prefer((factors,)), SLIM)


def test_a_choice_needs_a_dense_route() -> None:
    with pytest.raises(ConfigError, match="needs a dense route"):
        Cheapest((Route(Mesh(), up=Factors()),))


LAYERED = [
    Spec("conv.weight", (3, 3), "float32", 0),
    Spec("fc.weight", (64, 40), "float32", 1, layer="fc", form="factors"),
    Spec("fc.bias", (64,), "float32", 2, layer="fc", form="factors"),
    Spec("out.weight", (10, 64), "float32", 3, layer="out", form="factors"),
]


def test_a_layer_that_travels_whole_is_one_unit_of_several_chunks() -> None:
    plan = parse("adam_factors").plan(LAYERED, Cluster(2, 2))
    by_layer = {unit.layer.name: unit for unit in plan.units if unit.layer is not None}
    assert by_layer.keys() == {"fc", "out"}
    for unit in by_layer.values():
        assert {s.tensor for chunk in unit.chunks for s in chunk.segments} == set(unit.tensors)
        assert len(plan.holders[unit.index]) == 1
        for part, chunk in enumerate(unit.chunks):
            assert plan.places[chunk.index] == (unit.index, part)
    assert by_layer["fc"].tensors == (1, 2)
    assert plan.choices() == ()
    assert plan.chooser is None


def test_a_layer_that_may_travel_either_way_has_a_unit_beside_its_chunks() -> None:
    plan = parse("poseidon(choose='bytes')").plan(LAYERED, Cluster(3, 1))
    assert [unit.layer.name for unit in plan.choices() if unit.layer] == ["fc", "out"]
    for unit in plan.choices():
        assert unit.chunks == ()
        assert plan.holders[unit.index] == (0, 1, 2)
    dense = {s.tensor for unit in plan.units for chunk in unit.chunks for s in chunk.segments}
    assert dense == {0, 1, 2, 3}
    assert [plan.routes[route] for route in plan.route_of] == [SHARDED] * 4


def test_all_of_a_layer_takes_the_same_route() -> None:
    """Its weight and its bias share dY, so that one cannot travel as factors without the other."""
    layer = [
        Spec("fc.weight", (64, 64), "float32", 0, layer="fc", form="factors"),
        Spec("fc.bias", (64,), "float32", 1, layer="fc", form="factors"),
    ]
    factors = Rule(Large(), Route(Mesh(), up=Factors()))
    split = Strategy("split", Rounds(ByTensor((factors,), Route(Mesh()))))
    with pytest.raises(IncompatibleRoute, match=r"'fc.weight'.*bias travels another way"):
        split.plan(layer, Cluster(2))
    both = Strategy("both", Rounds(Prefer((Route(Mesh(), up=Factors()), Route(Mesh())))))
    (unit,) = both.plan(layer, Cluster(2)).units
    assert unit.tensors == (0, 1)
