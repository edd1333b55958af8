"""Counting hosts by rack and depth costs no optimum, and loses no tree."""

from collections import Counter

import p3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.planning.overlays.counts import Problem, build, solve
from slipstream.planning.overlays.shape import ROOT, Limits, Shape

COSTS = st.integers(0, 24).map(lambda eighths: eighths / 8)


@st.composite
def problems(draw: st.DrawFn, most: int, least: int = 1) -> Problem:
    racks = draw(st.integers(1, 3))
    hosts = draw(
        st.lists(st.integers(0, most), min_size=racks, max_size=racks).filter(
            lambda sizes: least <= sum(sizes) <= most
        )
    )
    row = st.tuples(*[COSTS] * racks)
    degree, depth = draw(st.integers(1, 4)), draw(st.integers(1, sum(hosts)))
    while Limits(degree, depth).capacity < sum(hosts):
        degree += 1
    limits = Limits(degree, depth, draw(COSTS))
    return Problem(tuple(hosts), draw(st.tuples(*[row] * racks)), draw(row), limits)


def price(problem: Problem, shape: Shape) -> float:
    links = sum(
        problem.root_costs[rack]
        if parent == ROOT
        else problem.rack_costs[shape.racks[parent]][rack]
        for rack, parent in zip(shape.racks, shape.parents, strict=True)
    )
    return links + problem.limits.alpha * shape.degrees.count(0)


def by_host(problem: Problem) -> p3.Problem:
    """The same problem for P3, which knows every host."""
    racks = [rack for rack, hosts in enumerate(problem.hosts) for _ in range(hosts)]
    return p3.Problem(
        [[problem.rack_costs[i][j] for j in racks] for i in racks],
        [[problem.root_costs[j] for j in racks]],
        problem.limits,
    )


@settings(max_examples=20, deadline=None)
@given(problems(most=6))
def test_the_optimum_is_that_of_p3(problem: Problem) -> None:
    expected = p3.mended(by_host(problem)).solve().cost
    assert solve(problem).cost == pytest.approx(expected)


# Few of them, and always the same: P3 takes a second, and of some a minute.
@pytest.mark.slow
@settings(max_examples=6, derandomize=True, deadline=None)
@given(problems(least=7, most=8))
def test_the_optimum_is_that_of_p3_for_as_many_hosts_as_p3_can_bear(problem: Problem) -> None:
    expected = p3.mended(by_host(problem)).solve().cost
    assert solve(problem).cost == pytest.approx(expected)


@settings(deadline=None)
@given(problems(most=30))
def test_the_tree_has_the_counts_the_price_and_keeps_the_limits(problem: Problem) -> None:
    counts = solve(problem)
    shape = build(counts)
    assert Counter(shape.racks) == {r: hosts for r, hosts in enumerate(problem.hosts) if hosts}
    assert price(problem, shape) == pytest.approx(counts.cost)
    assert all(parent < child for child, parent in enumerate(shape.parents))
    assert max(shape.depths) <= problem.limits.depth
    assert max(*shape.degrees, shape.root_degree) <= problem.limits.degree


def test_a_tree_by_hand() -> None:
    # From a root in rack 0, one link across the core, and as few leaves as depth 2 allows.
    limits = Limits(degree=3, depth=2, alpha=0.1)
    problem = Problem((3, 2), ((0.1, 1.0), (1.0, 0.1)), (0.1, 1.0), limits)
    counts = solve(problem)
    assert counts.cost == pytest.approx(4 * 0.1 + 1.0 + 3 * 0.1)
    shape = build(counts)
    crossing = [r for r, p in zip(shape.racks, shape.parents, strict=True) if r and p == ROOT]
    assert crossing == [1]
    assert sorted(shape.depths) == [1, 1, 1, 2, 2]


def test_parents_of_a_level_share_their_children_evenly() -> None:
    problem = Problem((30,), ((0.1,),), (0.1,), Limits(degree=8, depth=2, alpha=0.0))
    shape = build(solve(problem))
    relaying = [degree for degree in shape.degrees if degree]
    assert max(relaying) - min(relaying) <= 1


def test_no_host_to_reach_is_an_empty_tree() -> None:
    assert build(solve(Problem((0,), ((0.1,),), (0.1,), Limits(2, 2)))) == Shape((), ())


def test_problems_of_no_use() -> None:
    with pytest.raises(ConfigError, match="2 racks need 2 root costs and 2 rows"):
        Problem((1, 1), ((0.1, 1.0), (1.0, 0.1)), (0.1,), Limits(2, 2))
    with pytest.raises(ConfigError, match="reaches 6 hosts at most, not 7"):
        Problem((7,), ((0.1,),), (0.1,), Limits(2, 2))
