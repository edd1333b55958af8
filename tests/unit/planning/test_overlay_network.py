"""The network as data: who is where, what links cost, what is refused."""

import pytest

from slipstream.errors import ConfigError
from slipstream.planning.overlays import (
    Host,
    MeasuredCosts,
    Network,
    PositionCosts,
    Rack,
    even_network,
)

RACKS = (Rack("a", "east"), Rack("b", "east"), Rack("c", "west"))
HOSTS = tuple(Host(f"h{i}", rack, 1e9) for i, rack in enumerate((0, 0, 1, 2)))


def test_costs_are_the_papers() -> None:
    network = Network(RACKS, HOSTS, (0, 1, 2, 3), (0,))
    cost = [network.costs.between_hosts(network, 0, other) for other in (1, 2, 3)]
    assert cost == [0.1, 0.5, 1.0]
    assert network.costs.between_racks(network, 1, 2) == 1.0
    assert network.costs.from_host(network, 3, 2) == 0.1


def test_or_others() -> None:
    network = Network(RACKS, HOSTS, (0,), (0,), PositionCosts(0.0, 2.0, 3.0))
    assert [network.costs.between_racks(network, 0, rack) for rack in range(3)] == [0.0, 2.0, 3.0]


def test_or_follow_from_measured_bandwidths() -> None:
    measured = [[0, 10, 5, 1], [10, 0, 2.5, 2], [5, 2.5, 0, 4], [1, 2, 4, 0]]
    network = Network(RACKS, HOSTS, (0, 1, 2, 3), (0,), MeasuredCosts.of(measured))
    assert [network.costs.between_hosts(network, 0, other) for other in (1, 2, 3)] == [0.1, 0.2, 1]
    assert network.costs.from_host(network, 2, 0) == pytest.approx((0.2 + 0.4) / 2)
    assert network.costs.between_racks(network, 0, 2) == pytest.approx((1 + 0.5) / 2)
    assert network.costs.between_racks(network, 0, 0) == pytest.approx(0.1)
    assert network.costs.between_racks(network, 1, 1) == 0, "nobody else is there"


def test_hosts_fill_racks_in_order_and_servers_stand_beside_workers() -> None:
    network = even_network(hosts=5, racks=2, link_bits_s=1e8, uplink_bits_s=5e7)
    assert [host.rack for host in network.hosts] == [0, 0, 0, 1, 1]
    assert network.workers == network.servers == (0, 1, 2, 3, 4)
    assert [rack.uplink_bits_s for rack in network.racks] == [5e7, 5e7]
    assert network.targets(1) == (0, 2, 3, 4)


def test_dedicated_servers_have_hosts_of_their_own_in_each_rack_in_turn() -> None:
    network = even_network(hosts=4, racks=2, link_bits_s=1e8, servers=3)
    assert network.workers == (0, 1, 2, 3)
    assert network.servers == (4, 5, 6)
    assert [host.rack for host in network.hosts[4:]] == [0, 1, 0]
    assert network.targets(0) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"workers": ()}, "without workers"),
        ({"servers": ()}, "without servers"),
        ({"workers": (0, 4)}, "worker 1 is on host 4: there are 4"),
        ({"servers": (-1,)}, "server 0 is on host -1"),
        ({"hosts": (Host("x", 3, 1e9),)}, "host x is in rack 3: there are 3"),
        ({"hosts": (Host("x", 0, 0.0),)}, "link of host x has a rate of 0.0"),
        ({"racks": (Rack("a", "a", -1.0),) * 3}, "uplink of rack a has a rate of -1.0"),
        ({"costs": MeasuredCosts(((0.0,),))}, "bandwidths of 1 hosts for 4"),
    ],
)
def test_networks_of_no_use(changed: dict[str, object], says: str) -> None:
    fields = {"racks": RACKS, "hosts": HOSTS, "workers": (0,), "servers": (0,)}
    with pytest.raises(ConfigError, match=says):
        Network(**{**fields, **changed})


@pytest.mark.parametrize(("hosts", "racks"), [(2, 3), (2, 0)])
def test_racks_without_hosts(hosts: int, racks: int) -> None:
    with pytest.raises(ConfigError, match="give every rack a host"):
        even_network(hosts=hosts, racks=racks, link_bits_s=1e9)


@pytest.mark.parametrize(
    ("bandwidths", "says"),
    [([[0, 1], [1]], "row 1 has 1 columns; give 2"), ([[0, 0], [1, 0]], "row 0, column 1")],
)
def test_bandwidths_of_no_use(bandwidths: list[list[float]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MeasuredCosts.of(bandwidths)


def test_a_negative_cost() -> None:
    with pytest.raises(ConfigError, match="same_edge = -1"):
        PositionCosts(same_edge=-1)
