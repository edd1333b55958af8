import json
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import make_plan, spec_lists, vector

from slipstream.codecs import Bounded, Dense, Drop, OneBit
from slipstream.consistency import Asynchronous, BoundedStaleness, Rounds, WithinReach
from slipstream.errors import ConfigError, IncompatibleRoute, TooManyServers
from slipstream.schedules import AfterBackward, Priority, Schedule, WaitFree
from slipstream.strategy import PARTS, Plan, Route, Strategy, Update, describe, rebuild
from slipstream.systems import parse
from slipstream.topologies import Mesh, Sharded, Tree
from slipstream.types import Cluster, Spec

SHARDED = Route(Sharded(), push=Dense(), publish=Dense())
HALVED = Route(Sharded(), push=Dense("bfloat16"), publish=Dense())
PEERS = Route(Mesh(), push=Dense(), publish=Dense())


def strategy(
    *routes: Route,
    update: Update = "worker",
    schedule: Schedule | None = None,
    chunk_bytes: int = 1 << 21,
) -> Strategy:
    """Routes tensors in turn; builds each route anew, as a system that chooses would."""

    def route(spec: Spec, cluster: Cluster) -> Route:
        chosen = routes[spec.order % len(routes)]
        return Route(chosen.topology, chosen.push, chosen.publish, chosen.road)

    return Strategy("test", route, Rounds(), schedule or WaitFree(), update, chunk_bytes)


SPECS = [vector("a", 3000, order=0), vector("b", 20, order=1), vector("c", 7, order=2)]


def test_equal_routes_are_kept_once() -> None:
    plan = strategy(SHARDED, PEERS).plan(SPECS, Cluster(2, 1))
    assert plan.routes == (SHARDED, PEERS)
    assert plan.route_of == (0, 1, 0)
    assert [plan.route(chunk) for chunk in plan.chunks] == [
        plan.routes[plan.route_of[chunk.segments[0].tensor]] for chunk in plan.chunks
    ]


def test_routes_that_differ_only_in_a_codec_stay_apart() -> None:
    plan = strategy(SHARDED, HALVED).plan(SPECS, Cluster(2, 1))
    assert plan.routes == (SHARDED, HALVED)
    assert {plan.route(chunk).scheme for chunk in plan.chunks} == {
        "dense/sharded",
        "dense-bfloat16/sharded",
    }


def test_a_scheme_names_codec_and_place() -> None:
    assert PEERS.scheme == "dense/mesh"
    assert Route(Mesh(), Dense("float16"), Dense(), "collective").scheme == (
        "dense-float16/collective"
    )


def test_a_mesh_has_no_server_to_update_it() -> None:
    with pytest.raises(IncompatibleRoute, match=r"'a' travels dense/mesh.*update='worker'"):
        strategy(PEERS, update="server").plan(SPECS, Cluster(2, 1))


def test_collectives_cannot_serve_shards() -> None:
    road = Route(Sharded(), push=Dense(), publish=Dense(), road="collective")
    with pytest.raises(IncompatibleRoute, match=r"'a': collectives .* mesh; .*links.* sharded"):
        strategy(road).plan(SPECS, Cluster(2, 1))


def test_a_tensor_no_codec_can_carry_is_named_with_the_way_out() -> None:
    specs = [*SPECS, Spec("mask", (4,), "int64", 3)]
    with pytest.raises(IncompatibleRoute, match=r"'mask' is int64.*requires_grad_\(False\)"):
        strategy(SHARDED).plan(specs, Cluster(2, 1))


def test_the_publish_codec_is_asked_too() -> None:
    class Picky:
        name, splits, frames = "picky", True, 1

        def check(self, spec: Spec) -> None:
            raise IncompatibleRoute(f"{spec.name} cannot come back")

    picky: object = Picky()
    road = Route(Sharded(), push=Dense(), publish=picky)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleRoute, match="a cannot come back"):
        strategy(road).plan(SPECS, Cluster(2, 1))


def test_more_servers_than_chunks_is_refused_before_start() -> None:
    with pytest.raises(TooManyServers, match="5 servers but only 3 chunk"):
        strategy(SHARDED).plan(SPECS, Cluster(2, 5))


@pytest.mark.parametrize("chunk_bytes", [0, -1, 2.5, "2 MiB", True])
def test_a_chunk_size_that_is_no_size_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        strategy(SHARDED, chunk_bytes=chunk_bytes)


def test_servers_are_needed_if_any_route_needs_them() -> None:
    assert strategy(PEERS, SHARDED).needs_servers(SPECS, Cluster(2, 1))
    assert not strategy(PEERS).needs_servers(SPECS, Cluster(2, 1))


@given(spec_lists(min_size=1), st.integers(1, 4), st.integers(1, 3))
def test_a_plan_gives_every_chunk_of_every_route_its_holders(
    specs: list[Spec], workers: int, servers: int
) -> None:
    cluster = Cluster(workers, servers)
    try:
        plan = strategy(SHARDED, PEERS, HALVED, chunk_bytes=4096).plan(specs, cluster)
    except TooManyServers:
        return
    for chunk in plan.chunks:
        holders = plan.holders[chunk.index]
        if plan.route(chunk).topology == Mesh():
            assert holders == cluster.worker_nodes
        else:
            assert len(holders) == 1
            assert set(holders) <= set(cluster.server_nodes)
        for node in range(workers + servers):
            assert (chunk in plan.held_by(node)) == (node in holders)


@given(spec_lists(min_size=1, dtypes=["float32"]))
def test_a_chunk_is_as_urgent_as_its_most_urgent_tensor(specs: list[Spec]) -> None:
    for schedule in (Priority(), WaitFree(), AfterBackward()):
        plan = strategy(PEERS, schedule=schedule).plan(specs, Cluster(2))
        for chunk in plan.chunks:
            orders = [specs[segment.tensor].order for segment in chunk.segments]
            expected = min(orders) if schedule == Priority() else len(specs) - 1 - max(orders)
            assert plan.priority(chunk) == expected


@pytest.mark.parametrize("schedule", [Priority(), WaitFree(), AfterBackward()])
def test_training_never_overtakes_what_must_come_before_it(schedule: Schedule) -> None:
    """Servers that update get the first weights at priority -1, ahead of any gradient."""
    head = [vector("head.weight", 9, order=40), vector("head.bias", 3, order=41)]  # all else frozen
    plan = strategy(SHARDED, schedule=schedule, update="server").plan(head, Cluster(2, 1))
    assert all(plan.priority(chunk) >= 0 for chunk in plan.chunks)


def test_plans_are_values() -> None:
    plan, again = make_plan(SPECS), make_plan(SPECS)
    assert plan == again
    assert plan != make_plan(SPECS, workers=3)
    with pytest.raises(FrozenInstanceError):
        plan.update = "server"  # type: ignore[misc]


EXAMPLES = {
    "AfterBackward": AfterBackward(),
    "Asynchronous": Asynchronous(by_staleness=True, ramp_up=10),
    "Bounded": Bounded(Drop(0.9), decay="root", narrow=0.5, values="bfloat16", squeeze="lz4"),
    "BoundedStaleness": BoundedStaleness(3, rate_factor=0.5),
    "Dense": Dense("float16"),
    "Drop": Drop(0.5),
    "Mesh": Mesh(),
    "OneBit": OneBit(),
    "Priority": Priority(),
    "Rounds": Rounds(first=3, close_after_s=0.5),
    "Sharded": Sharded(),
    "Tree": Tree((((1,), (), (0,)),)),
    "WaitFree": WaitFree(),
    "WithinReach": WithinReach(5),
}


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_part_survives_being_described_as_plain_data(name: str) -> None:
    part = EXAMPLES[name]
    described = json.loads(json.dumps(describe(part)))
    assert rebuild(described) == part
    assert type(rebuild(described)) is PARTS[name]


def test_a_route_with_nothing_on_it_needs_no_holder() -> None:
    plan = Plan.make(
        cluster=Cluster(2),
        specs=[vector("none", 0)],
        routes=[PEERS],
        route_of=[0],
        consistency=Rounds(),
        schedule=WaitFree(),
        update="worker",
    )
    assert plan.chunks == ()
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
