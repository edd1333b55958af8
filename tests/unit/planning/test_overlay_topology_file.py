"""Topology files: what they say, and how each mistake is refused."""

import pytest

from slipstream.errors import ConfigError
from slipstream.planning.overlays import (
    Host,
    MeasuredCosts,
    Network,
    PositionCosts,
    Rack,
    read_topology,
)

FULL = """
rate = "1gbit"
core_rate = "500mbit"

[costs]
same_aggregation = 0.4

[racks.left]
aggregation = "east"
core_rate = "none"

[racks.right]
aggregation = "east"

[[hosts]]
name = "alpha"
rack = "left"
workers = [0, 1]

[[hosts]]
name = "beta"
rack = "right"
rate = 2e8
workers = [2]

[[hosts]]
name = "gamma"
rack = "right"
servers = [0]
"""

TWO = (
    '{top}\n[[hosts]]\nrate = "1gbit"\nworkers = [0]\n{first}\n[[hosts]]\nrate = "1gbit"\n{second}'
)


def two(top: str = "", first: str = "", second: str = "workers = [1]") -> str:
    return TWO.format(top=top, first=first, second=second)


def test_everything_that_a_file_may_say() -> None:
    assert read_topology(FULL, "net.toml") == Network(
        racks=(Rack("left", "east", None), Rack("right", "east", 5e8)),
        hosts=(Host("alpha", 0, 1e9), Host("beta", 1, 2e8), Host("gamma", 1, 1e9)),
        workers=(0, 0, 1),
        servers=(2,),
        costs=PositionCosts(same_aggregation=0.4),
    )


def test_as_little_as_it_may() -> None:
    network = read_topology(two(), "net.toml")
    assert [host.name for host in network.hosts] == ["h0", "h1"]
    assert network.racks == (Rack("r0", "r0", None),)
    assert network.workers == (0, 1)
    assert network.servers == (0, 1), "one beside the first worker of each host"
    assert network.costs == PositionCosts()


def test_measured_bandwidths() -> None:
    text = two('bandwidths = [["none", "100mbit"], ["50mbit", "none"]]')
    assert read_topology(text, "net.toml").costs == MeasuredCosts(((0.0, 0.5), (1.0, 0.0)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rate = ", "net.toml is not TOML: "),
        ("", r"net.toml: hosts: there is none; write \[\[hosts\]\]"),
        ("hosts = 3", r"net.toml: hosts: is no list of tables; write \[\[hosts\]\]"),
        ("[[hosts]]\nworkers = [0]", r"net.toml: hosts\[0\].rate: is missing; give it here or"),
        (two(second='workers = "1"'), r"hosts\[1\].workers: '1' is no list; write it in square"),
        (two(second="workers = [true]"), r"hosts\[1\].workers: True is no number of one"),
        (two(second="workers = [0]"), r"hosts\[1\].workers: 0 is in hosts\[0\] already"),
        (two(second="workers = [2]"), "hosts: workers: 1 is on none; number them 0 to 1"),
        (two(second="servers = [1]"), "hosts: servers: 0 is on none; number them 0 to 0"),
        ('[[hosts]]\nrate = "1gbit"', r"hosts: none has a worker; write workers = \[0\]"),
        (two(first="name = 3"), r"hosts\[0\].name: 3 is no name; write it in quotation marks"),
        (two(first='name = "h1"'), r"hosts\[1\].name: another host is called 'h1'"),
        (two(first='rak = "a"'), r"hosts\[0\].rak: unknown key; known here: name, rack"),
        (two(top='core = "1gbit"'), "net.toml: core: unknown key; known here: bandw"),
        (two(top='core_rate = "fast"'), "core_rate: a rate of 'fast' is not understood"),
        (two(top="core_rate = [1]"), r"core_rate: \[1\] is no rate; write \"200mbit\""),
        (two(top="core_rate = -3"), "core_rate: a rate of -3 moves nothing"),
        (two(top="racks = 2"), r"racks: 2 is no table; write \[racks\]"),
        (two(top='[racks.left]\naggregation = "a"'), "racks.left: no host is in this rack"),
        (two(top="[racks.r0]\nrate = 3"), "racks.r0.rate: unknown key"),
        (two(top="[costs]\notherwise = -1"), "costs.otherwise: -1 is no number of 0 or more"),
        (two(top='[costs]\nsame_edge = "low"'), "costs.same_edge: 'low' is no number of 0"),
        (two(top="[costs]\nedge = 1"), "costs.edge: unknown key; known here: otherw"),
        (two(top="bandwidths = [[0, 1]]"), r"bandwidths\[0\]: give a list of 1"),
        (two(top="bandwidths = [[0]]"), "net.toml: bandwidths of 1 hosts for 2"),
        (
            two(top='bandwidths = [[0, "1gb"], [1, 0]]'),
            r"bandwidths\[0\]\[1\]: a rate of '1gb' is not",
        ),
        (
            two(top="bandwidths = [[0, 1], [1, 0]]\n[costs]\notherwise = 2"),
            "costs: bandwidths say what links cost; leave out one of the two",
        ),
    ],
)
def test_mistakes_are_refused_by_file_key_and_way_out(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        read_topology(text, "net.toml")
    assert str(refused.value).startswith("net.toml")
