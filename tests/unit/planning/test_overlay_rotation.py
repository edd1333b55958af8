"""Trees of ranks: everybody once in each, and nobody the mule of all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay_samples import LINK_BITS_S, networks, sends, walk

from slipstream.errors import ConfigError
from slipstream.planning.overlays import (
    Host,
    Limits,
    Network,
    Rack,
    RankTree,
    Shape,
    even_network,
    possible_limits,
    rotate,
    rotated_chains,
    rotated_trees,
    star,
)
from slipstream.planning.overlays.shape import ROOT


def crossings(network: Network, server: int, tree: RankTree) -> int:
    rack = {-1: network.hosts[network.servers[server]].rack}
    rack |= {rank: network.hosts[host].rack for rank, host in enumerate(network.workers)}
    return sum(rack[giver] != rack[rank] for rank, giver, _ in walk(network, server, tree))


@settings(deadline=None)
@given(networks(), st.data())
def test_every_worker_is_reached_once_in_every_tree_within_the_limits(
    network: Network, data: st.DataObject
) -> None:
    degree = data.draw(st.integers(1, 4), label="degree")
    limits = data.draw(st.sampled_from(list(possible_limits(network.most_targets, degree=degree))))
    for children, most, deepest in (
        (rotated_trees(network, limits), limits.degree, limits.depth),
        (rotated_chains(network), 1, len(network.hosts)),
        (star(network), len(network.workers), 1),
    ):
        assert len(children) == len(network.servers)
        for server, tree in enumerate(children):
            reached = list(walk(network, server, tree))
            assert sorted(rank for rank, _, _ in reached) == list(range(len(network.workers)))
            assert max(hops for _, _, hops in reached) <= deepest
            assert max(sends(network, server, tree)) <= most


@settings(deadline=None)
@given(networks())
def test_a_tree_enters_every_host_once(network: Network) -> None:
    for children in (rotated_trees(network, Limits(8, 1)), rotated_chains(network)):
        for server, tree in enumerate(children):
            assert sum(sends(network, server, tree)) == len(network.targets(server))


@settings(deadline=None)
@given(networks())
def test_a_chain_passes_an_uplink_once_in_each_direction(network: Network) -> None:
    for server, tree in enumerate(rotated_chains(network)):
        racks = {network.hosts[host].rack for host in network.targets(server)}
        home = network.hosts[network.servers[server]].rack
        assert crossings(network, server, tree) == len(racks - {home})


def test_beside_workers_everybody_sends_alike() -> None:
    network = even_network(hosts=12, racks=2, link_bits_s=LINK_BITS_S)
    children = rotated_trees(network, Limits(degree=2, depth=3))
    by_tree = [sends(network, server, tree) for server, tree in enumerate(children)]
    assert [sum(sent) for sent in zip(*by_tree, strict=True)] == [11] * 12
    assert [crossings(network, server, tree) for server, tree in enumerate(children)] == [1] * 12
    for host in range(12):
        relayed = [by_tree[server][host] for server in range(12) if server != host]
        assert any(relayed), f"host {host} is a leaf in all trees"
        assert not all(relayed), f"host {host} relays in all trees"


def test_a_servers_own_worker_gets_its_shard_from_it() -> None:
    network = even_network(hosts=5, link_bits_s=LINK_BITS_S)
    for server, tree in enumerate(rotated_trees(network, Limits(2, 2))):
        assert server in tree[0]
        assert tree[server + 1] == ()
        assert len(tree[0]) <= 2 + 1, "the worker beside it is no link"


def test_ranks_of_one_host_pass_on_to_each_other() -> None:
    network = Network(
        racks=(Rack("r0", "a0"),),
        hosts=(Host("a", 0, 1e9), Host("b", 0, 1e9), Host("c", 0, 1e9)),
        workers=(0, 0, 1, 1, 1),
        servers=(2,),
    )
    assert rotated_chains(network) == (((0,), (2, 1), (), (3, 4), (), ()),)


@pytest.mark.parametrize("servers", [2, 3, 4, 6, 12])
def test_dedicated_servers_share_the_relaying_out(servers: int) -> None:
    network = even_network(hosts=12, racks=1, link_bits_s=LINK_BITS_S, servers=servers)
    children = rotated_trees(network, Limits(degree=3, depth=3, alpha=0.1))
    sent = [0] * 12
    for server, tree in enumerate(children):
        sent = [sum(both) for both in zip(sent, sends(network, server, tree)[:12], strict=True)]
    assert max(sent) - min(sent) <= 1


def test_a_slow_host_relays_less() -> None:
    rates = [LINK_BITS_S / 4, *[LINK_BITS_S] * 4]
    hosts = tuple(Host(f"h{i}", 0, rate) for i, rate in enumerate(rates))
    server = Host("s0", 0, LINK_BITS_S)
    network = Network((Rack("r0", "a0"),), (*hosts, server), (0, 1, 2, 3, 4), (5,) * 4)
    relay_and_four = Shape((0,) * 5, (ROOT, 0, 0, 0, 0))
    children = rotate(network, [relay_and_four] * 4)
    assert sorted(tree[0] for tree in children) == [(1,), (2,), (3,), (4,)]


def test_a_shape_for_another_network_is_refused() -> None:
    network = even_network(hosts=3, link_bits_s=LINK_BITS_S, servers=1)
    with pytest.raises(ConfigError, match="not made for the hosts"):
        rotate(network, [Shape((0, 0), (ROOT, 0))])
