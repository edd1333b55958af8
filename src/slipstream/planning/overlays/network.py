"""The network as data: hosts in racks, racks around a core, and the ranks of each host.

    core ──┬── uplink of rack 0 ── edge switch ──┬── link of host 0
           │                                     └── link of host 1 …
           └── uplink of rack 1 …

A host's link and a rack's uplink carry their rate each way. Racks below one aggregation switch are
nearer to each other: their traffic costs less, though it uses their uplinks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from slipstream.errors import ConfigError
from slipstream.units import LEAST_BITS_S, MOST_BITS_S

# Trees are computed for every server, over all hosts: time and memory grow faster than either.
MOST_HOSTS, MOST_RACKS, MOST_WORKERS, MOST_SERVERS = 256, 20, 512, 256


@dataclass(frozen=True, slots=True)
class Rack:
    """Hosts on one edge switch; without a rate, its uplink has no limit."""

    name: str
    aggregation: str
    uplink_bits_s: float | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """One machine, by the index of its rack."""

    name: str
    rack: int
    link_bits_s: float


@dataclass(frozen=True, slots=True)
class PositionCosts:
    """Costs by position (section 3.4.1): within edge, within aggregation, beyond."""

    same_edge: float = 0.1
    same_aggregation: float = 0.5
    otherwise: float = 1.0

    def __post_init__(self) -> None:
        for name in ("same_edge", "same_aggregation", "otherwise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"a cost {name} = {getattr(self, name)}: give 0 or more")

    def between_racks(self, network: Network, rack: int, other: int) -> float:
        if rack == other:
            return self.same_edge
        near = network.racks[rack].aggregation == network.racks[other].aggregation
        return self.same_aggregation if near else self.otherwise

    def from_host(self, network: Network, host: int, rack: int) -> float:
        return self.between_racks(network, network.hosts[host].rack, rack)

    def between_hosts(self, network: Network, host: int, other: int) -> float:
        return self.from_host(network, host, network.hosts[other].rack)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs c_ij between any two hosts. The cost between two racks is the mean over their hosts."""

    matrix: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, bandwidths: Sequence[Sequence[float]]) -> MeasuredCosts:
        """Return costs from bits/s between hosts: 1 for the slowest pair, 0.1 for 10x."""
        size = len(bandwidths)
        for i, row in enumerate(bandwidths):
            if len(row) != size:
                raise ConfigError(f"bandwidths: row {i} has {len(row)} columns; give {size}")
            for j, bits_s in enumerate(row):
                if i != j:
                    _check_rate(f"bandwidths: row {i}, column {j}", bits_s)
        apart = [b for i, row in enumerate(bandwidths) for j, b in enumerate(row) if i != j]
        slowest = min(apart, default=1.0)
        return cls(
            tuple(
                tuple(0.0 if i == j else slowest / b for j, b in enumerate(row))
                for i, row in enumerate(bandwidths)
            )
        )

    def between_racks(self, network: Network, rack: int, other: int) -> float:
        members = [h for h, host in enumerate(network.hosts) if host.rack == rack]
        return fmean([self.from_host(network, host, other) for host in members] or [0.0])

    def from_host(self, network: Network, host: int, rack: int) -> float:
        others = [h for h, o in enumerate(network.hosts) if o.rack == rack and h != host]
        return fmean([self.matrix[host][other] for other in others] or [0.0])

    def between_hosts(self, network: Network, host: int, other: int) -> float:
        return self.matrix[host][other]


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts in racks; ``workers[rank]`` and ``servers[index]`` are indices of hosts."""

    racks: tuple[Rack, ...]
    hosts: tuple[Host, ...]
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    costs: PositionCosts | MeasuredCosts = PositionCosts()

    def __post_init__(self) -> None:
        self._check_size()
        self._check_places()
        for host in self.hosts:
            if not 0 <= host.rack < len(self.racks):
                raise ConfigError(
                    f"host {host.name} is in rack {host.rack}: there are {len(self.racks)}, "
                    "counted from 0"
                )
            _check_rate(f"the link of host {host.name}", host.link_bits_s)
        for rack in self.racks:
            if rack.uplink_bits_s is not None:
                _check_rate(f"the uplink of rack {rack.name}", rack.uplink_bits_s)
        if isinstance(self.costs, MeasuredCosts):
            measured = len(self.costs.matrix)
            if measured != len(self.hosts):
                raise ConfigError(
                    f"bandwidths of {measured} hosts for {len(self.hosts)}; give a row and a "
                    "column for every host"
                )

    def _check_size(self) -> None:
        for kind, members, most in (
            ("hosts", self.hosts, MOST_HOSTS),
            ("racks", self.racks, MOST_RACKS),
            ("workers", self.workers, MOST_WORKERS),
            ("servers", self.servers, MOST_SERVERS),
        ):
            if len(members) > most:
                raise ConfigError(
                    f"a network of {len(members)} {kind}: trees are worked out for {most} at most; "
                    "describe a part of it, or let servers send to every worker (tree='star')"
                )

    def _check_places(self) -> None:
        for kind, places in (("worker", self.workers), ("server", self.servers)):
            if not places:
                raise ConfigError(f"a network without {kind}s needs no overlay; add a {kind}")
            for index, host in enumerate(places):
                if not 0 <= host < len(self.hosts):
                    raise ConfigError(
                        f"{kind} {index} is on host {host}: there are {len(self.hosts)}, "
                        "counted from 0"
                    )

    @property
    def ranks_by_host(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in self.hosts]
        for rank, host in enumerate(self.workers):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks))

    def targets(self, server: int) -> tuple[int, ...]:
        """Return the other hosts with workers, which a server must reach."""
        return tuple(sorted(set(self.workers) - {self.servers[server]}))

    @property
    def most_targets(self) -> int:
        return max(len(self.targets(server)) for server in range(len(self.servers)))


def even_network(
    *,
    hosts: int,
    racks: int = 1,
    link_bits_s: float,
    uplink_bits_s: float | None = None,
    servers: int = 0,
) -> Network:
    """Return a network with a worker on each of ``hosts`` hosts, which fill the racks in order.

    Dedicated servers have their own hosts, one in each rack in turn; without any, one is
    colocated with each worker.
    """
    if max(hosts, servers) > MOST_HOSTS:
        raise ConfigError(f"{max(hosts, servers)} hosts: trees are worked out for {MOST_HOSTS}")
    if not 1 <= racks <= hosts:
        raise ConfigError(f"{hosts} hosts in {racks} racks: give every rack a host at least")
    places = [Host(f"h{i}", i * racks // hosts, link_bits_s) for i in range(hosts)]
    places += [Host(f"s{k}", k % racks, link_bits_s) for k in range(servers)]
    return Network(
        # The core is between any two racks, so each has its own aggregation switch.
        racks=tuple(Rack(f"r{r}", f"r{r}", uplink_bits_s) for r in range(racks)),
        hosts=tuple(places),
        workers=tuple(range(hosts)),
        servers=tuple(range(hosts, hosts + servers)) or tuple(range(hosts)),
    )


def _check_rate(what: str, bits_s: float) -> None:
    if not LEAST_BITS_S <= bits_s <= MOST_BITS_S:
        raise ConfigError(
            f"{what} has a rate of {bits_s} bit/s; give one above 0, up to {MOST_BITS_S:g}"
        )
