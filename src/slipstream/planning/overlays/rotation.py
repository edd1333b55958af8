"""One tree per server, with hosts at different positions in each, so that all forward equally much.

A tree spans hosts. A host's first rank takes the host's position and forwards; traffic to the other
ranks of a host, or to ranks on the server's host, uses no link.
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

MOST_PASSES = 10  # over all trees, to balance what hosts send

# Of one server: the receivers of its root, then those of rank 0, 1, …
RankTree = tuple[tuple[int, ...], ...]
Placement = np.ndarray[Any, np.dtype[np.int64]]  # the host at every position of a shape


def star(network: Network) -> tuple[RankTree, ...]:
    """Return trees in which every server sends to every worker."""
    workers = len(network.workers)
    return ((tuple(range(workers)), *[()] * workers),) * len(network.servers)


def rotate(network: Network, shapes: Sequence[Shape]) -> tuple[RankTree, ...]:
    """Return a tree of ranks for every server, of its shape, with egress as even as possible."""
    placements = [_shifted_hosts(network, server, shape) for server, shape in enumerate(shapes)]
    _balance(network, shapes, placements)
    return tuple(
        _rank_tree(network, server, shape, placement)
        for server, (shape, placement) in enumerate(zip(shapes, placements, strict=True))
    )


def _shifted_hosts(network: Network, server: int, shape: Shape) -> Placement:
    """Place hosts in their order, shifted by one for every server in the same rack.

    If every host of a rack has a colocated server, each host has every position once.
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
    """Reassign one rack's positions in one tree at a time, in the best way for the loads from all
    other trees, until there is little or no gain. The sum of squared loads decreases each time."""
    slowness = 1.0 / np.array([host.link_bits_s for host in network.hosts])
    slowness /= slowness.min()
    degrees = [np.array(shape.degrees, dtype=np.int64) for shape in shapes]
    sends = np.zeros(len(network.hosts))
    for home, shape, placement, node_degrees in zip(
        network.servers, shapes, placements, degrees, strict=True
    ):
        sends[home] += shape.root_degree
        sends[placement] += node_degrees
    for _ in range(MOST_PASSES):
        has_changed = False
        for shape, placement, node_degrees in zip(shapes, placements, degrees, strict=True):
            for rack in sorted(set(shape.racks)):
                places = np.flatnonzero(np.array(shape.racks) == rack)
                has_changed |= _reassign(placement, node_degrees, places, sends, slowness)
        if not has_changed:
            return


def _reassign(
    placement: Placement, degrees: Placement, places: Placement, sends: Any, slowness: Any
) -> bool:
    """Reassign hosts to these positions if loads become more even; return True if they do."""
    hosts, needed = placement[places], degrees[places]
    others = sends[hosts] - needed
    loads = (slowness[hosts, None] * (others[:, None] + needed)) ** 2
    if np.ptp(slowness[hosts]):
        matching = np.array(cheapest_matching(loads))
    else:  # Σ (o + g)² is smallest if the busiest get the fewest, which is faster
        matching = np.empty(len(hosts), dtype=np.int64)
        matching[np.argsort(-others, kind="stable")] = np.argsort(needed, kind="stable")
    gain = loads.trace() - loads[np.arange(len(hosts)), matching].sum()
    if gain <= 1e-9 * loads.max():
        return False
    placement[places[matching]] = hosts
    sends[hosts] = others + needed[matching]
    return True


def _rank_tree(network: Network, server: int, shape: Shape, placement: Placement) -> RankTree:
    ranks = network.ranks_by_host
    leaders = [ranks[host][0] for host in placement]
    children: list[list[int]] = [[] for _ in range(len(network.workers) + 1)]
    # Links first, loopback after, so that the longest path is served first.
    for leader, parent in zip(leaders, shape.parents, strict=True):
        children[0 if parent == ROOT else leaders[parent] + 1].append(leader)
    for leader, host in zip(leaders, placement, strict=True):
        children[leader + 1].extend(ranks[host][1:])
    children[0].extend(ranks[network.servers[server]])
    return tuple(map(tuple, children))
