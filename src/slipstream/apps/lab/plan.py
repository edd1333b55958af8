"""The lab as data: names, and the commands that make it. Pure; runs without root.

    namespace slip1a2b3c-sw                      namespace slip1a2b3c-h0
    ┌──────────────────────────────┐             ┌──────────────────────────┐
    │ bridge slip1a2b3c-br         │             │ lo                       │
    │   port slip1a2b3c-p0   tbf → ┼─ veth pair ─┼ ← tbf   slip1a2b3c-e0    │
    │   port slip1a2b3c-p1 …       │             │         10.26.43.1/24    │
    └──────────────────────────────┘             └──────────────────────────┘

With several racks every rack has its own bridge (-b0, -b1, …) for its hosts, and a link
(-u0 to -d0, …) from there to -br, which is then the core.

The six hex digits are the lab's own: they make its names and its subnet, so labs coexist.
Everything lives in the lab's namespaces; nothing appears in the root's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.apps.lab.removal import NAME_PREFIX
from slipstream.apps.lab.shaping import Rate, Trouble, bucket_or_none, bucket_within_netem, queue
from slipstream.errors import LaunchError

Command = tuple[str, ...]

TAG_NBYTES = 3  # with "slip" and "-e249" it fills the 15 characters an interface name may have
MOST_HOSTS = 250


@dataclass(frozen=True, slots=True)
class Site:
    """The place of one host: its namespace, both ends of its link, its address."""

    namespace: str
    interface: str
    port: str
    address: str
    rack: int

    @property
    def prefix(self) -> Command:
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True)
class Plan:
    """Hosts on one switch, or on racks' switches around a core."""

    name: str
    sites: tuple[Site, ...]
    racks: int = 1

    @property
    def switch(self) -> str:
        """The namespace of all switches."""
        return f"{self.name}-sw"

    @property
    def core(self) -> str:
        return f"{self.name}-br"

    def bridge(self, rack: int) -> str:
        """Return the switch that a rack's hosts are on."""
        return self.core if self.racks == 1 else f"{self.name}-b{rack}"

    def uplink(self, rack: int) -> tuple[str, str]:
        """Return the ends of a rack's link to the core: at the rack's switch, and at the core."""
        return f"{self.name}-u{rack}", f"{self.name}-d{rack}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(site.namespace for site in self.sites))


def plan(name: str, hosts: int, racks: int = 1) -> Plan:
    """Return the plan of a lab of this name; hosts fill the racks in order."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise LaunchError(f"a lab has 1 to {MOST_HOSTS} hosts, not {hosts}")
    if racks < 1 or hosts % racks:
        raise LaunchError(
            f"{hosts} hosts cannot fill {racks} racks evenly; take a multiple of the racks"
        )
    high, low, _ = bytes.fromhex(name.removeprefix(NAME_PREFIX))
    sites = tuple(
        Site(
            namespace=f"{name}-h{index}",
            interface=f"{name}-e{index}",
            port=f"{name}-p{index}",
            address=f"10.{high}.{low}.{index + 1}",
            rack=index * racks // hosts,
        )
        for index in range(hosts)
    )
    return Plan(name, sites, racks)


def rate_per_host(hosts: int, rate: Rate | Sequence[Rate]) -> tuple[Rate, ...]:
    """Return every host's rate, from one rate for all or a sequence with one for each."""
    if rate is None or isinstance(rate, str | int | float):
        return (rate,) * hosts
    if len(rate) != hosts:
        raise LaunchError(f"{len(rate)} rates for {hosts} hosts; give one rate, or one per host")
    return tuple(rate)


def build(
    lab: Plan,
    rates: Sequence[Rate],
    core_rate: Rate,
    trouble: Trouble,
    *,
    congestion: str | None,
) -> Iterator[Command]:
    """Yield the commands that make the lab, in order. The first fails if the name is taken."""
    yield ("ip", "netns", "add", lab.switch)
    yield from _add_bridge(lab, lab.core)
    if lab.racks > 1:
        for rack in range(lab.racks):
            yield from _rack(lab, rack)
            yield from shape_uplink(lab, rack, core_rate)
    for index, site in enumerate(lab.sites):
        yield from _host(lab, site)
        if congestion is not None:
            yield set_congestion(site, congestion)
        yield from shape(lab, index, rates[index], trouble)


def shape(lab: Plan, index: int, rate: Rate, trouble: Trouble) -> Iterator[Command]:
    """Shape both directions of one host's link: out of the host, and from the switch to it."""
    site = lab.sites[index]
    yield from _shape_device(site.namespace, site.interface, rate, trouble)
    yield from _shape_device(lab.switch, site.port, rate, trouble)


def shape_uplink(lab: Plan, rack: int, rate: Rate) -> Iterator[Command]:
    """Shape both directions of a rack's link to the core."""
    for device in lab.uplink(rack):
        yield from _shape_device(lab.switch, device, rate, Trouble())


def _shape_device(namespace: str, device: str, rate: Rate, trouble: Trouble) -> Iterator[Command]:
    for arguments in queue(rate, trouble):
        yield ("tc", "-n", namespace, "qdisc", "replace", "dev", device, *arguments)


def new_rate(lab: Plan, index: int, rate: Rate, *, in_netem: bool) -> Iterator[Command]:
    """Change the rate of a host's link; delay and loss do not change."""
    site = lab.sites[index]
    for namespace, device in ((site.namespace, site.interface), (lab.switch, site.port)):
        arguments = bucket_within_netem(rate) if in_netem else ("root", *bucket_or_none(rate))
        yield ("tc", "-n", namespace, "qdisc", "replace", "dev", device, *arguments)


def set_link(lab: Plan, index: int, *, up: bool) -> Command:
    """Set the link at the switch: the host sees it disconnected."""
    state = "up" if up else "down"
    return ("ip", "-n", lab.switch, "link", "set", lab.sites[index].port, state)


def counters(lab: Plan) -> Command:
    """Print, as JSON, every port of the switches: its master, its state, its counters."""
    return ("ip", "-n", lab.switch, "-json", "-stats", "link", "show", "type", "veth")


def queues(lab: Plan) -> Command:
    """Print, as JSON, how every port of the switches is shaped."""
    return ("tc", "-n", lab.switch, "-json", "qdisc", "show")


def set_congestion(site: Site, algorithm: str) -> Command:
    """Set TCP's congestion control, which is per namespace; ``sysctl`` is not always installed."""
    write = 'echo "$0" > /proc/sys/net/ipv4/tcp_congestion_control'
    return (*site.prefix, "sh", "-c", write, algorithm)


def _add_bridge(lab: Plan, name: str) -> Iterator[Command]:
    ip = ("ip", "-n", lab.switch)
    quiet = ("stp_state", "0", "forward_delay", "0", "mcast_snooping", "0")
    yield (*ip, "link", "add", name, "type", "bridge", *quiet)
    yield (*ip, "link", "set", name, "addrgenmode", "none", "up")


def _rack(lab: Plan, rack: int) -> Iterator[Command]:
    yield from _add_bridge(lab, lab.bridge(rack))
    ip, (edge, core) = ("ip", "-n", lab.switch), lab.uplink(rack)
    yield (*ip, "link", "add", edge, "type", "veth", "peer", "name", core)
    for device, bridge in ((edge, lab.bridge(rack)), (core, lab.core)):
        yield (*ip, "link", "set", device, "master", bridge, "addrgenmode", "none", "up")


def _host(lab: Plan, site: Site) -> Iterator[Command]:
    # Without link-local addresses the counters show almost only what programs sent.
    on_host = ("ip", "-n", site.namespace)
    on_switch = ("ip", "-n", lab.switch)
    bridge = lab.bridge(site.rack)
    pair = ("type", "veth", "peer", "name", site.interface, "netns", site.namespace)
    yield ("ip", "netns", "add", site.namespace)
    yield (*on_host, "link", "set", "lo", "up")
    yield (*on_switch, "link", "add", site.port, *pair)
    yield (*on_switch, "link", "set", site.port, "master", bridge, "addrgenmode", "none", "up")
    yield (*on_host, "link", "set", site.interface, "addrgenmode", "none", "up")
    yield (*on_host, "address", "add", f"{site.address}/24", "dev", site.interface)
