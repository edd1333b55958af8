"""Two levels as a value, and as the plan of hosts."""

from __future__ import annotations

import pytest

import slipstream as s
from slipstream.errors import ConfigError
from slipstream.types import Cluster, Spec

SPECS = [Spec("w", (300, 20), "float32", 0), Spec("b", (20,), "float32", 1)]
HOSTS = Cluster(2, 2, members=((0, 1, 4), (2, 3)))


def test_a_plan_of_hosts_is_that_of_the_topology_between_them() -> None:
    two = s.push_pull(chunk_bytes=4096).plan(SPECS, HOSTS)
    one = s.push_pull(chunk_bytes=4096, hosts="flat").plan(SPECS, Cluster(2, 2))
    assert (two.routes, two.units, two.holders) == (one.routes, one.units, one.holders)


@pytest.mark.parametrize(
    "policy",
    [
        s.Everywhere(s.Route(s.TwoLevel())),
        s.Prefer((s.Route(s.TwoLevel()), s.Route(s.TwoLevel(s.Mesh())))),
        s.ByTensor((s.Rule(s.Large(), s.Route(s.TwoLevel())),), s.Route(s.TwoLevel())),
        s.ByRole(s.Everywhere(s.Route(s.TwoLevel())), s.Everywhere(s.Route(s.TwoLevel()))),
        s.Cheapest((s.Route(s.TwoLevel()),)),
    ],
)
def test_no_route_of_a_plan_has_two_levels(policy: s.Everywhere) -> None:
    strategy = s.Strategy("mine", policy)
    assert strategy.two_levels
    assert s.Strategy.from_json(strategy.to_json()) == strategy
    plan = strategy.plan(SPECS, HOSTS)
    assert {type(route.topology) for route in plan.routes} <= {s.Sharded, s.Mesh}


def test_nodes_have_the_names_of_the_ranks_that_speak_for_hosts() -> None:
    assert [HOSTS.name(node) for node in range(4)] == ["rank 0", "rank 2", "server 0", "server 1"]
    names = ["rank 0", "rank 2", "rank 1", "rank 3", "server 0", "rank", "rank x", "rank 9" * 20]
    assert [HOSTS.worker(name) for name in names] == [0, 1, -1, -1, -1, -1, -1, -1]
    assert (HOSTS.ranks, Cluster(3).ranks) == (5, 3)
    assert [Cluster(3).worker(name) for name in ("rank 2", "rank 3", "server 0")] == [2, -1, -1]


@pytest.mark.parametrize("system", [s.push_pull, s.allreduce])
def test_systems_have_two_levels_unless_they_are_told_not_to(system: object) -> None:
    assert system().two_levels  # type: ignore[operator]
    assert not system(hosts="flat").two_levels  # type: ignore[operator]
    with pytest.raises(ConfigError, match="hosts='none': choose 'first' or 'flat'"):
        system(hosts="none")  # type: ignore[operator]
