"""Star, trees or chain: the one with the shortest predicted broadcast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.planning.overlays import counts
from slipstream.planning.overlays.network import Network
from slipstream.planning.overlays.prediction import Prediction, predict
from slipstream.planning.overlays.rotation import RankTree, rotate, star
from slipstream.planning.overlays.shape import Limits, chain, least_degree, least_depth

DEGREES = (2, 3, 4, 8)
# 0 does not limit the number of leaves; 0.1 keeps it small as long as that needs no further link
# across the core.
ALPHAS = (0.0, 0.1)
DEPTHS_TRIED = 2  # depths that are tried, from the smallest on
# The program is exact, and fast for a few racks. For many racks, a solution near the optimum is
# enough: the predicted time decides.
EXACT_RACKS = 4
GAP = 0.1
# One program is solved for all servers with the same view of the racks. If hosts' own costs are
# measured, each server has its own view; with more servers than this, those of a rack share one.
MOST_OWN_PROBLEMS = 32
MOST_EFFORT = 1 << 14  # programs times racks³
MOST_BYTES = 1e18  # of a model
WORTH_WHILE = 0.95  # forwarding has other costs: keep a star unless 5 % are gained


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broadcast, its predicted time, and the ``limits`` of its trees."""

    name: str
    children: tuple[RankTree, ...]
    prediction: Prediction
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """All candidates, star and chain first, and the chosen one."""

    candidates: tuple[Candidate, ...]
    best: Candidate

    @property
    def star(self) -> Candidate:
        return self.candidates[0]

    @property
    def trees(self) -> tuple[Candidate, ...]:
        """The candidates that are trees, the fastest first."""
        trees = (one for one in self.candidates if one.limits is not None)
        return tuple(sorted(trees, key=lambda one: one.prediction.seconds))

    def leading(self, trees: int) -> tuple[Candidate, ...]:
        """Return star, chain, and the first ``trees`` trees, for display."""
        return (*self.candidates[:2], *self.trees[:trees])


def choose_overlay(
    network: Network,
    model_bytes: float,
    block_bytes: float,
    limits: Sequence[Limits] | None = None,
) -> Choice:
    """Choose the fastest of star, chain and trees within limits; a star unless 5 % are gained."""
    for name, size in (("model_bytes", model_bytes), ("block_bytes", block_bytes)):
        if not 0 < size <= MOST_BYTES:
            raise ConfigError(
                f"{name}={size}: give a number of bytes above 0, up to {MOST_BYTES:g}"
            )

    def candidate(
        name: str, children: tuple[RankTree, ...], limits: Limits | None = None
    ) -> Candidate:
        sizes = {"model_bytes": model_bytes, "block_bytes": block_bytes}
        return Candidate(name, children, predict(network, children, **sizes), limits)

    if limits is None:
        limits = list(possible_limits(network.most_targets))
    candidates = [candidate("star", star(network)), candidate("chain", rotated_chains(network))]
    for tried in limits:
        children = rotated_trees(network, tried)
        if all(children != tree.children for tree in candidates[2:]):
            candidates.append(candidate("trees", children, tried))
    best = min(candidates, key=lambda one: one.prediction.seconds)
    if best.prediction.seconds > WORTH_WHILE * candidates[0].prediction.seconds:
        best = candidates[0]
    return Choice(tuple(candidates), best)


def possible_limits(
    hosts: int,
    *,
    degree: int | None = None,
    depth: int | None = None,
    alpha: float | None = None,
) -> Iterator[Limits]:
    """Yield limits to try for so many hosts; given values are kept."""
    if depth is not None:
        depth = min(depth, max(1, hosts))  # no tree is deeper
    if degree is not None and depth is not None:
        Limits(degree, depth).check(hosts)
    degrees = {t for t in DEGREES if t < hosts} or {1} if degree is None else {degree}
    if degree is None and depth is not None:
        degrees.add(least_degree(depth, hosts))
    for t in sorted(degrees):
        least = least_depth(t, hosts)
        for h in range(least, least + DEPTHS_TRIED) if depth is None else (depth,):
            if h >= least:
                for a in ALPHAS if alpha is None else (alpha,):
                    yield Limits(t, h, a)


def rotated_trees(network: Network, limits: Limits) -> tuple[RankTree, ...]:
    """Return the cheapest tree for every server, rotated."""
    gap = 0.0 if len(network.racks) <= EXACT_RACKS else GAP
    posed = _problems(network, limits)
    distinct = dict.fromkeys(problem for problem, _ in posed)
    if len(distinct) * len(network.racks) ** 3 > MOST_EFFORT:
        raise ConfigError(
            f"{len(distinct)} servers see the {len(network.racks)} racks differently: to work out "
            "their trees would take too long; describe several racks as one, or give racks as many "
            "hosts and the same costs"
        )
    solved = {problem: counts.build(counts.solve(problem, gap=gap)) for problem in distinct}
    return rotate(network, [solved[problem].among(order) for problem, order in posed])


def _problems(network: Network, limits: Limits) -> list[tuple[counts.Problem, list[int]]]:
    """Return every server's problem, and the order of the racks in it."""
    racks, costs = range(len(network.racks)), network.costs
    between = [[costs.between_racks(network, r, s) for s in racks] for r in racks]
    posed = []
    for server, home in enumerate(network.servers):
        home_rack = network.hosts[home].rack
        from_root = between[home_rack]
        if len(network.servers) <= MOST_OWN_PROBLEMS:
            from_root = [costs.from_host(network, home, rack) for rack in racks]
        # Racks in order of distance, so that servers with the same view have the same problem.
        nearness = [(from_root[r], (r - home_rack) % len(racks)) for r in racks]
        order = sorted(racks, key=nearness.__getitem__)
        num_targets = _targets_by_rack(network, server)
        problem = counts.Problem(
            hosts=tuple(num_targets[rack] for rack in order),
            rack_costs=tuple(tuple(between[r][s] for s in order) for r in order),
            root_costs=tuple(from_root[rack] for rack in order),
            limits=limits,
        )
        posed.append((problem, order))
    return posed


def rotated_chains(network: Network) -> tuple[RankTree, ...]:
    """Return chains from host to host, rack by rack; each direction of an uplink is used once."""
    racks = len(network.racks)
    shapes = []
    for server, home in enumerate(network.servers):
        num_targets = _targets_by_rack(network, server)
        turn = [(network.hosts[home].rack + step) % racks for step in range(racks)]
        shapes.append(chain(rack for rack in turn for _ in range(num_targets[rack])))
    return rotate(network, shapes)


def _targets_by_rack(network: Network, server: int) -> Counter[int]:
    return Counter(network.hosts[host].rack for host in network.targets(server))
