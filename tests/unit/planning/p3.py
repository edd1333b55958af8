"""P3, the binary program for the broadcast tree of Parameter Flow, section 3.4.1, mended.

Nodes 1 … n are workers, n+1 stands for all p servers. l_ij: i sends to j; t_i: i is a leaf; h^k_ij:
the way to k has the link from i to j. At most T children (14) and H hops (16):

    min  Σ_ij l_ij c_ij  +  Σ_servers i Σ_j l_{n+1,j} c_ij  +  α Σ_i t_i                        (12)

Where we leave the paper:

- As printed, the way to k may come by k itself: a ↔ b, cut off from the root, passes for a tree if
  H ≥ 2, since h^a = h^b = {ab, ba} meets (16), (17) and (20). With h^k_kj = 0 it does not.
- The printed objective counts the root's links once for every server. Each carries 1/p of the
  model, so ours cost c_ij / p.

There are (n+1)³ + … variables: for ten hosts or so. The package solves ``overlays.counts``, whose
optimum tests compare with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.planning.overlays.shape import ROOT, Limits
from slipstream.planning.overlays.solver import Program


@dataclass(frozen=True, slots=True)
class Problem:
    """c_ij between workers (n × n), c_ij from each server to each worker (p × n), and limits."""

    worker_costs: Sequence[Sequence[float]]
    server_costs: Sequence[Sequence[float]]
    limits: Limits

    def __post_init__(self) -> None:
        n = len(self.worker_costs)
        rows = [*self.worker_costs, *self.server_costs]
        if not n or not self.server_costs or any(len(row) != n for row in rows):
            raise ConfigError(
                "P3 needs n rows of n costs between workers, and n costs from each server"
            )
        self.limits.check(n)


@dataclass(frozen=True, slots=True)
class Tree:
    """Every worker's parent (``ROOT``: the servers), and the objective."""

    parents: tuple[int, ...]
    cost: float


@dataclass(slots=True)
class P3:
    """The program and where its variables are: ``link[i][j]``, ``way[k][i][j]``, root last."""

    program: Program
    link: list[list[int]]
    way: list[list[list[int]]]

    def solve(self) -> Tree:
        solution = self.program.solve()
        n = len(self.link) - 1
        parents = []
        for worker in range(n):
            (parent,) = (i for i in range(n + 1) if solution.values[self.link[i][worker]])
            parents.append(ROOT if parent == n else parent)
        return Tree(tuple(parents), solution.cost)


def printed(problem: Problem) -> P3:
    """Equations 12 to 21, as they stand in the paper."""
    return _formulate(problem, [sum(costs) for costs in zip(*problem.server_costs, strict=True)])


def mended(problem: Problem) -> P3:
    """Without cycles, and with root links that carry 1/p of the model."""
    p = len(problem.server_costs)
    root_costs = [sum(costs) / p for costs in zip(*problem.server_costs, strict=True)]
    form = _formulate(problem, root_costs)
    for k, way in enumerate(form.way):
        for variable in way[k]:
            form.program.bounds[variable] = 0.0
    return form


def _formulate(problem: Problem, root_costs: Sequence[float]) -> P3:
    program, limits = Program(), problem.limits
    n = len(root_costs)
    nodes, costs = range(n + 1), [*problem.worker_costs, root_costs]
    # (18), (19): nobody sends to the root or to itself.
    link = [
        [
            program.variable(cost=costs[i][j]) if j != n and i != j else program.variable(most=0.0)
            for j in nodes
        ]
        for i in nodes
    ]
    leaf = [program.variable(cost=limits.alpha) for _ in nodes]
    way = [[[program.variable() for _ in nodes] for _ in nodes] for _ in nodes]
    for j in range(n):  # (13)
        program.require([(link[i][j], 1.0) for i in nodes], least=1, most=1)
    for i in nodes:
        sends = [(variable, 1.0) for variable in link[i]]
        program.require(sends, most=limits.degree)  # (14)
        program.require([*sends, (leaf[i], 1.0)], least=1)  # (15)
    for k in nodes:  # (16)
        hops = [(variable, 1.0) for row in way[k] for variable in row]
        program.require(hops, most=limits.depth)
    form = P3(program, link, way)
    _carry_ways_on(form)
    return form


def _carry_ways_on(form: P3) -> None:
    """(17), (20): if k sends to k', the way to k' is the way to k, and that link."""
    program, nodes = form.program, range(len(form.link))
    for k in nodes:
        for i in nodes:
            last = [(form.way[k][i][k], 1.0), (form.link[i][k], -1.0)]
            program.require(last, least=0, most=0)
        for child in nodes:
            if child == k:
                continue  # by (19) it says nothing
            for i in nodes:
                for j in nodes:
                    if i != k and j != child:
                        before = (form.way[k][i][j], 1.0)
                        after = (form.way[child][i][j], -1.0)
                        program.require([before, after, (form.link[k][child], 2.0)], most=2)
