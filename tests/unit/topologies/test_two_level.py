"""Two levels as a value, and as the plan of hosts."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream as s
from slipstream.consistency import Closed, FirstOf
from slipstream.errors import ConfigError
from slipstream.methods import Rounds
from slipstream.routes import ByRole, ByTensor, Cheapest, Everywhere, Large, Prefer, Route, Rule
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Contribution
from slipstream.topologies import Mesh, Sharded, TwoLevel
from slipstream.types import Cluster, Spec

SPECS = [Spec("w", (300, 20), "float32", 0), Spec("b", (20,), "float32", 1)]
HOSTS = Cluster(2, 2, members=((0, 1, 4), (2, 3)))


def test_a_plan_of_hosts_is_that_of_the_topology_between_them() -> None:
    two = s.push_pull(chunk_bytes=4096).plan(SPECS, HOSTS)
    one = s.push_pull(chunk_bytes=4096, hierarchical=False).plan(SPECS, Cluster(2, 2))
    assert (two.routes, two.units, two.holders) == (one.routes, one.units, one.holders)


@pytest.mark.parametrize(
    "policy",
    [
        Everywhere(Route(TwoLevel())),
        Prefer(
            (
                Route(TwoLevel()),
                Route(TwoLevel(Mesh())),
            )
        ),
        ByTensor(
            (Rule(Large(), Route(TwoLevel())),),
            Route(TwoLevel()),
        ),
        ByRole(
            Everywhere(Route(TwoLevel())),
            Everywhere(Route(TwoLevel())),
        ),
        Cheapest((Route(TwoLevel()),)),
    ],
)
def test_no_route_of_a_plan_has_two_levels(policy: Everywhere) -> None:
    strategy = s.Strategy("mine", Rounds(policy))
    assert strategy.two_levels
    assert s.Strategy.from_json(strategy.to_json()) == strategy
    plan = strategy.plan(SPECS, HOSTS)
    assert {type(route.topology) for route in plan.routes} <= {
        Sharded,
        Mesh,
    }


def test_nodes_have_the_names_of_the_ranks_that_speak_for_hosts() -> None:
    assert [HOSTS.name(node) for node in range(4)] == ["rank 0", "rank 2", "server 0", "server 1"]
    names = ["rank 0", "rank 2", "rank 1", "rank 3", "server 0", "rank", "rank x", "rank 9" * 20]
    assert [HOSTS.worker(name) for name in names] == [0, 1, -1, -1, -1, -1, -1, -1]
    assert (HOSTS.ranks, Cluster(3).ranks) == (5, 3)
    assert [Cluster(3).worker(name) for name in ("rank 2", "rank 3", "server 0")] == [2, -1, -1]


@pytest.mark.parametrize("system", [s.push_pull, s.allreduce])
def test_systems_have_two_levels_unless_they_are_told_not_to(system: object) -> None:
    assert system().two_levels  # type: ignore[operator]
    assert not system(hierarchical=False).two_levels  # type: ignore[operator]
    with pytest.raises(ConfigError, match="hierarchical='first': choose True or False"):
        system(hierarchical="first")  # type: ignore[operator]


def test_workers_of_the_plan_speak_for_ranks() -> None:
    assert [HOSTS.ranks_at(node) for node in (0, 1)] == [(0, 1, 4), (2, 3)]
    assert [HOSTS.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 0, -1]
    assert (Cluster(3).ranks_at(2), Cluster(3).node_of(2), Cluster(3).node_of(3)) == ((2,), 2, -1)


def test_rounds_of_the_first_hosts_count_hosts() -> None:
    plan = s.backup_workers(backup=1, hierarchical=True, chunk_bytes=4096).plan(SPECS, HOSTS)
    assert plan.consistency.admit == FirstOf(1)
    with pytest.raises(ConfigError, match=r"first=4 with 2 workers: choose from 1 to 2 .* a host"):
        s.backup_workers(first=4, hierarchical=True, chunk_bytes=4096).plan(SPECS, HOSTS)


@pytest.mark.parametrize(
    "strategy",
    [
        s.backup_workers(first=2, hierarchical=True),
        s.diloco(every=4, hierarchical=True),
        s.diloco(every=4, hierarchical=True, first=2),
        s.diloco(every=4, hierarchical=True, wire="int4"),
        s.local_sgd(every=4, hierarchical=True),
        s.push_pull(update="server"),
        s.allreduce(wire="int8"),
        s.poseidon(wire="int4"),
        s.poseidon(wire="int4", choose="bytes"),
    ],
)
def test_all_routes_of_a_system_have_two_levels(strategy: s.Strategy) -> None:
    s.compat.check(strategy)
    assert all(isinstance(route.topology, TwoLevel) for route in strategy.rounds.routes.routes())


@pytest.mark.parametrize("system", [s.backup_workers, s.diloco, s.local_sgd])
def test_where_it_changes_what_is_counted_one_has_to_ask_for_two_levels(system: object) -> None:
    assert not system().two_levels  # type: ignore[operator]


@pytest.mark.parametrize("late", [False, True])
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6), random=st.randoms())
@settings(deadline=None, max_examples=50)
def test_a_round_of_some_hosts_is_the_mean_over_their_workers(
    late: bool, sizes: list[int], random: Any
) -> None:
    """Each host divides the sum of its workers by their mean number over all hosts; with local
    steps a late host's sum covers several blocks of them."""
    ends = list(itertools.accumulate(sizes, initial=0))
    members = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    cluster = Cluster(len(sizes), 1, members=members)
    system = s.local_sgd if late else s.backup_workers
    plan = system(first=1, hierarchical=True).plan(SPECS, cluster)
    made = sorted(random.sample(range(len(sizes)), random.randint(1, len(sizes))))
    covered = {node: random.randint(1, 3) if late else 1 for node in made}
    closed = Closed(tuple((0, node) for node in made), len(made))
    contributions = tuple(
        Contribution(0, 0, ((b"",),), None, 1.0, weights=[covered[node]]) for node in made
    )
    divisor = ClosedRound(plan.units[0], 0, closed, contributions).divisor(plan, 0)
    blocks = {
        rank: [random.uniform(-1, 1) for _ in range(covered[node])]
        for node in made
        for rank in members[node]
    }
    share = cluster.ranks / cluster.workers
    sums = [sum(sum(blocks[rank]) for rank in members[node]) / share for node in made]
    expected = statistics.fmean(block for own in blocks.values() for block in own)
    assert sum(sums) / divisor == pytest.approx(expected, abs=1e-12)
    if len(made) == len(sizes) and not late:
        assert divisor == len(sizes), "as without hosts"
