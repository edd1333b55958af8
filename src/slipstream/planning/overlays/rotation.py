"""One tree a server, and who has which place in each: nobody relays, or rests, in all of them.

A tree spans hosts. A host's first rank takes the host's place and passes on; what goes to the other
ranks of a host, or to those beside the server, crosses no link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.errors import ConfigError
from slipstream.planning.overlays.network import Network
from slipstream.planning.overlays.shape import ROOT, Shape
from slipstream.planning.overlays.solver import cheapest_matching

MOST_PASSES = 10  # over all trees, to even out what hosts send

# Of one server: whom its root sends to, then whom rank 0, 1, … pass on to.
RankTree = tuple[tuple[int, ...], ...]
Placement = np.ndarray[Any, np.dtype[np.int64]]  # the host at every position of a shape


def star(network: Network) -> tuple[RankTree, ...]:
    """Every server sends to every worker."""
    workers = len(network.workers)
    return ((tuple(range(workers)), *[()] * workers),) * len(network.servers)


def rotate(network: Network, shapes: Sequence[Shape]) -> tuple[RankTree, ...]:
    """A tree of ranks for every server, of its shape, with egress as even as can be."""
    placements = [_turned(network, server, shape) for server, shape in enumerate(shapes)]
    _balance(network, shapes, placements)
    return tuple(
        _rank_tree(network, server, shape, placement)
        for server, (shape, placement) in enumerate(zip(shapes, placements, strict=True))
    )


def _turned(network: Network, server: int, shape: Shape) -> Placement:
    """Hosts in their order, begun one further on for every server in the same rack.

    If every host of a rack has a server beside its worker, each takes every place once.
    """
    home = network.servers[server]
    home_rack = network.hosts[home].rack
    turn = sum(network.hosts[other].rack == home_rack for other in network.servers[:server])
    waiting: dict[int, list[int]] = {}
    for host in network.targets(server):
        waiting.setdefault(network.hosts[host].rack, []).append(host)
    if Counter(shape.racks) != {rack: len(hosts) for rack, hosts in waiting.items()}:
        raise ConfigError(f"server {server}: this shape is not made for the hosts it has to reach")
    for rack, hosts in waiting.items():
        beside = home in network.workers and rack == home_rack
        begin = sum(host < home for host in hosts) if beside else turn % len(hosts)
        waiting[rack] = hosts[begin:] + hosts[:begin]
    return np.array([waiting[rack].pop(0) for rack in shape.racks], dtype=np.int64)


def _balance(network: Network, shapes: Sequence[Shape], placements: list[Placement]) -> None:
    """Deal one rack's places in one tree anew, as is best for the loads from all other trees, until
    that helps nowhere any more, or little. The sum of squared loads falls each time."""
    slowness = 1.0 / np.array([host.link_bits_s for host in network.hosts])
    slowness /= slowness.min()
    degrees = [np.array(shape.degrees, dtype=np.int64) for shape in shapes]
    sends = np.zeros(len(network.hosts))
    for home, shape, placement, given in zip(
        network.servers, shapes, placements, degrees, strict=True
    ):
        sends[home] += shape.root_degree
        sends[placement] += given
    for _ in range(MOST_PASSES):
        moved = False
        for shape, placement, given in zip(shapes, placements, degrees, strict=True):
            for rack in sorted(set(shape.racks)):
                places = np.flatnonzero(np.array(shape.racks) == rack)
                moved |= _deal_anew(placement, given, places, sends, slowness)
        if not moved:
            return


def _deal_anew(
    placement: Placement, degrees: Placement, places: Placement, sends: Any, slowness: Any
) -> bool:
    """Whether other hosts in these places make the loads more even; if so, they are there now."""
    hosts, given = placement[places], degrees[places]
    others = sends[hosts] - given
    loads = (slowness[hosts, None] * (others[:, None] + given)) ** 2
    if np.ptp(slowness[hosts]):
        matching = np.array(cheapest_matching(loads))
    else:  # Σ (o + g)² is least where the busiest get the fewest, which is quicker to find
        matching = np.empty(len(hosts), dtype=np.int64)
        matching[np.argsort(-others, kind="stable")] = np.argsort(given, kind="stable")
    gain = loads.trace() - loads[np.arange(len(hosts)), matching].sum()
    if gain <= 1e-9 * loads.max():
        return False
    placement[places[matching]] = hosts
    sends[hosts] = others + given[matching]
    return True


def _rank_tree(network: Network, server: int, shape: Shape, placement: Placement) -> RankTree:
    ranks = network.ranks_by_host
    leaders = [ranks[host][0] for host in placement]
    children: list[list[int]] = [[] for _ in range(len(network.workers) + 1)]
    # Links first, loopback after: what has furthest to go leaves first.
    for leader, parent in zip(leaders, shape.parents, strict=True):
        children[0 if parent == ROOT else leaders[parent] + 1].append(leader)
    for leader, host in zip(leaders, placement, strict=True):
        children[leader + 1].extend(ranks[host][1:])
    children[0].extend(ranks[network.servers[server]])
    return tuple(map(tuple, children))
