"""P3: what is wrong with it as printed, and that the mended one finds the cheapest tree."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from p3 import Problem, mended, printed

from slipstream.errors import ConfigError
from slipstream.planning.overlays.shape import ROOT, Limits

COSTS = st.integers(0, 64).map(lambda eighths: eighths / 8)  # sums of them are exact


@dataclass(frozen=True)
class AllTrees:
    """Every tree of n workers below a root, which is node n."""

    parents: Any
    depth: Any
    degree: Any
    leaves: Any

    def cheapest(self, problem: Problem) -> float:
        root = np.mean(problem.server_costs, axis=0)
        costs = np.vstack([problem.worker_costs, root])
        n = len(root)
        totals = costs[self.parents, np.arange(n)].sum(axis=1) + problem.limits.alpha * self.leaves
        allowed = (self.depth <= problem.limits.depth) & (self.degree <= problem.limits.degree)
        return float(totals[allowed].min())


@cache
def all_trees(n: int) -> AllTrees:
    parents = np.indices([n + 1] * n).reshape(n, -1).T
    above = np.hstack([parents, np.full((len(parents), 1), n)])  # the root is above itself
    at = np.tile(np.arange(n), (len(parents), 1))
    hops = np.zeros_like(parents)
    for _ in range(n):
        hops += at != n
        at = np.take_along_axis(above, at, axis=1)
    trees = (at == n).all(axis=1)
    children = np.stack([(parents == node).sum(axis=1) for node in range(n + 1)], axis=1)[trees]
    assert len(children) == (n + 1) ** (n - 1), "Cayley's formula"
    leaves = (children[:, :n] == 0).sum(axis=1)
    return AllTrees(parents[trees], hops[trees].max(axis=1), children.max(axis=1), leaves)


def square(draw: st.DrawFn, rows: int, columns: int) -> list[list[float]]:
    return draw(
        st.lists(st.lists(COSTS, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )


@st.composite
def problems(draw: st.DrawFn, most: int) -> Problem:
    n = draw(st.integers(1, most))
    degree, depth = draw(st.integers(1, 4)), draw(st.integers(1, n))
    limits = Limits(degree, depth, draw(COSTS))
    while limits.capacity < n:
        limits = Limits(limits.degree + 1, depth, limits.alpha)
    servers = draw(st.integers(1, 3))
    return Problem(square(draw, n, n), square(draw, servers, n), limits)


def test_as_printed_two_workers_that_send_to_each_other_pass_for_a_tree() -> None:
    # The way to a is {b→a, a→b}, and so is that to b: no way is longer than H = 2, each contains
    # the way to its parent, and its last link. No equation asks that a way begins at the root.
    problem = Problem([[0.0, 0.1], [0.1, 0.0]], [[1.0, 1.0]], Limits(2, 2, alpha=0.1))
    cycle = printed(problem).solve()
    assert cycle.parents == (1, 0)
    assert cycle.cost == pytest.approx(0.1 + 0.1 + 0.1)  # both links, and the root is a leaf

    tree = mended(problem).solve()
    assert sorted(tree.parents) in ([ROOT, 0], [ROOT, 1])
    assert tree.cost == pytest.approx(1.0 + 0.1 + 0.1)


def test_the_roots_links_cost_a_pth_of_what_is_printed() -> None:
    problem = Problem([[0.0]], [[1.0], [0.5], [0.5], [0.4]], Limits(1, 1, alpha=0.25))
    assert printed(problem).solve().cost == pytest.approx(2.4 + 0.25)
    assert mended(problem).solve().cost == pytest.approx(0.6 + 0.25)


@settings(max_examples=40, deadline=None)
@given(problems(most=5))
def test_mended_it_finds_the_cheapest_of_all_trees(problem: Problem) -> None:
    tree = mended(problem).solve()
    assert tree.cost == pytest.approx(all_trees(len(tree.parents)).cheapest(problem))
    costs = [*problem.worker_costs, np.mean(problem.server_costs, axis=0)]
    links = sum(costs[parent][child] for child, parent in enumerate(tree.parents))
    leaves = set(range(len(tree.parents))) - set(tree.parents)
    assert tree.cost == pytest.approx(links + problem.limits.alpha * len(leaves))


@pytest.mark.parametrize(("degree", "depth", "alpha"), [(2, 3, 0.1), (3, 2, 1.0), (1, 6, 0.0)])
def test_with_six_workers_too(degree: int, depth: int, alpha: float) -> None:
    random = np.random.default_rng(degree)
    costs = random.integers(0, 64, (6, 6)) / 8
    servers = random.integers(0, 64, (2, 6)) / 8
    problem = Problem(costs.tolist(), servers.tolist(), Limits(degree, depth, alpha))
    assert mended(problem).solve().cost == pytest.approx(all_trees(6).cheapest(problem))


def test_the_papers_figure_7() -> None:
    """Six workers that cost alike: a price on leaves makes three of them."""
    alike = [[0.1] * 6 for _ in range(6)]
    tree = mended(Problem(alike, [[0.1] * 6], Limits(3, 2, alpha=1.0))).solve()
    leaves = set(range(6)) - set(tree.parents)
    assert len(leaves) == 3
    assert tree.parents.count(ROOT) == 3


def test_limits_without_a_tree_say_which_would_have_one() -> None:
    alike = [[0.1] * 7 for _ in range(7)]
    with pytest.raises(
        ConfigError, match=r"reaches 6 hosts at most, not 7.*depth of 3 or a degree"
    ):
        Problem(alike, [[0.1] * 7], Limits(2, 2))


def test_costs_of_no_use() -> None:
    with pytest.raises(ConfigError, match="n rows of n costs"):
        Problem([[0.0, 1.0]], [[1.0]], Limits(1, 1))
    with pytest.raises(ConfigError, match="n costs from each server"):
        Problem([[0.0]], [], Limits(1, 1))


@pytest.mark.parametrize(
    ("limits", "says"),
    [((0, 2), "degree of 0"), ((2, 0), "depth of 0"), ((2, 2, -1.0), "a leaf costs 0 or more")],
)
def test_limits_of_no_use(limits: tuple[int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Limits(*limits)
