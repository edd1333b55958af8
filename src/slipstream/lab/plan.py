"""The lab as data: who is called what, and the commands that make it. Pure; runs without root.

    namespace slip1a2b3c-sw                      namespace slip1a2b3c-h0
    ┌──────────────────────────────┐             ┌──────────────────────────┐
    │ bridge slip1a2b3c-br         │             │ lo                       │
    │   port slip1a2b3c-p0   tbf → ┼─ veth pair ─┼ ← tbf   slip1a2b3c-e0    │
    │   port slip1a2b3c-p1 …       │             │         10.26.43.1/24    │
    └──────────────────────────────┘             └──────────────────────────┘

The six hex digits are the lab's own: they make its names and its subnet, so labs coexist.
Everything lives in the lab's namespaces; nothing appears in the root's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.errors import LaunchError
from slipstream.lab.removal import NAME_PREFIX
from slipstream.lab.shaping import Rate, bucket

Command = tuple[str, ...]

TAG_NBYTES = 3  # with "slip" and "-e249" it fills the 15 characters an interface name may have
MOST_HOSTS = 250


@dataclass(frozen=True, slots=True)
class Site:
    """Where one host is: its namespace, its end of the cable, the switch's end, its address."""

    namespace: str
    interface: str
    port: str
    address: str

    @property
    def prefix(self) -> Command:
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True)
class Plan:
    """Hosts on one switch."""

    name: str
    sites: tuple[Site, ...]
    rates: tuple[Rate, ...]

    @property
    def switch(self) -> str:
        return f"{self.name}-sw"

    @property
    def bridge(self) -> str:
        return f"{self.name}-br"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(site.namespace for site in self.sites))


def plan(tag: str, rates: Sequence[Rate]) -> Plan:
    """A lab with one host a rate; ``tag`` is its six hex digits."""
    if not 1 <= len(rates) <= MOST_HOSTS:
        raise LaunchError(f"a lab has 1 to {MOST_HOSTS} hosts, not {len(rates)}")
    name = f"{NAME_PREFIX}{tag}"
    high, low, _ = bytes.fromhex(tag)
    sites = tuple(
        Site(
            namespace=f"{name}-h{index}",
            interface=f"{name}-e{index}",
            port=f"{name}-p{index}",
            address=f"10.{high}.{low}.{index + 1}",
        )
        for index in range(len(rates))
    )
    return Plan(name, sites, tuple(rates))


def rate_per_host(hosts: int, rate: Rate | Sequence[Rate]) -> tuple[Rate, ...]:
    """One rate for all, or a sequence with one for each."""
    if rate is None or isinstance(rate, str | int | float):
        return (rate,) * hosts
    if len(rate) != hosts:
        raise LaunchError(f"{len(rate)} rates for {hosts} hosts; give one rate, or one per host")
    return tuple(rate)


def build(lab: Plan, *, congestion: str | None) -> Iterator[Command]:
    """Every command that makes the lab, in order. The first claims the name: it fails if taken."""
    yield ("ip", "netns", "add", lab.switch)
    yield from _switch(lab)
    for index, site in enumerate(lab.sites):
        yield from _host(lab, site)
        if congestion is not None:
            yield set_congestion(site, congestion)
        if lab.rates[index] is not None:
            yield from shape(lab, index, lab.rates[index])


def shape(lab: Plan, index: int, rate: Rate) -> Iterator[Command]:
    """Both directions of one host's link: out of the host, and out of the switch towards it."""
    queue = ("noqueue",) if rate is None else bucket(rate).arguments
    site = lab.sites[index]
    for namespace, device in ((site.namespace, site.interface), (lab.switch, site.port)):
        yield ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *queue)


def counters(lab: Plan) -> Command:
    """Prints, as JSON, what every port of the switch has carried."""
    return ("ip", "-n", lab.switch, "-json", "-stats", "link", "show", "type", "veth")


def set_congestion(site: Site, algorithm: str) -> Command:
    """TCP's congestion control is set per namespace; ``sysctl`` is not installed everywhere."""
    write = 'echo "$0" > /proc/sys/net/ipv4/tcp_congestion_control'
    return (*site.prefix, "sh", "-c", write, algorithm)


def _switch(lab: Plan) -> Iterator[Command]:
    ip = ("ip", "-n", lab.switch)
    quiet = ("stp_state", "0", "forward_delay", "0", "mcast_snooping", "0")
    yield (*ip, "link", "add", lab.bridge, "type", "bridge", *quiet)
    yield (*ip, "link", "set", lab.bridge, "addrgenmode", "none", "up")


def _host(lab: Plan, site: Site) -> Iterator[Command]:
    # Without link-local addresses the counters show next to nothing that no program sent.
    on_host = ("ip", "-n", site.namespace)
    on_switch = ("ip", "-n", lab.switch)
    pair = ("type", "veth", "peer", "name", site.interface, "netns", site.namespace)
    yield ("ip", "netns", "add", site.namespace)
    yield (*on_host, "link", "set", "lo", "up")
    yield (*on_switch, "link", "add", site.port, *pair)
    yield (*on_switch, "link", "set", site.port, "master", lab.bridge, "addrgenmode", "none", "up")
    yield (*on_host, "link", "set", site.interface, "addrgenmode", "none", "up")
    yield (*on_host, "address", "add", f"{site.address}/24", "dev", site.interface)
