"""The positions of a tree's ranks in a picture. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from slipstream.planning.overlays.network import Network
from slipstream.planning.overlays.rotation import RankTree

SERVER = -1


@dataclass(frozen=True, slots=True)
class Spot:
    """A rank (or ``SERVER``): its host, the index of its parent's spot, and its position."""

    rank: int
    host: int
    above: int
    x: float
    depth: int


def spots(network: Network, server: int, tree: RankTree) -> list[Spot]:
    """Place the server first and children after their parents; leaves are next to each other,
    parents in the middle of their children."""
    order: list[tuple[int, int, int]] = []  # rank, index of its parent, depth
    waiting = [(SERVER, 0, 0)]
    while waiting:
        rank, above, depth = waiting.pop()
        waiting += [(child, len(order), depth + 1) for child in reversed(tree[rank + 1])]
        order.append((rank, above, depth))
    below: list[list[float]] = [[] for _ in order]
    right = [0.0] * len(order)
    leaves = sum(not tree[rank + 1] for rank, _, _ in order)
    for index in reversed(range(len(order))):
        rank, above, _ = order[index]
        if not tree[rank + 1]:
            leaves -= 1
        right[index] = fmean((below[index][0], below[index][-1])) if below[index] else float(leaves)
        below[above].append(right[index])
    hosts = {SERVER: network.servers[server], **dict(enumerate(network.workers))}
    return [
        Spot(rank, hosts[rank], above, x, depth)
        for (rank, above, depth), x in zip(order, right, strict=True)
    ]
