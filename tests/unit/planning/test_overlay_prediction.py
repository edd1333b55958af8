"""Predicted times, against figures that can be worked out by hand.

In units of model / link: 12 workers in 2 racks, uplinks of half a link, blocks of a hundredth of
the model.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from overlay_samples import LINK_BITS_S, MODEL_BYTES, networks

from slipstream.planning.overlays import (
    Host,
    Limits,
    Network,
    Rack,
    RankTree,
    even_network,
    predict,
    rotated_chains,
    rotated_trees,
    star,
)

HALF = LINK_BITS_S / 2


def seconds(
    network: Network, children: tuple[RankTree, ...], block_bytes: float = MODEL_BYTES / 100
) -> float:
    prediction = predict(network, children, model_bytes=MODEL_BYTES, block_bytes=block_bytes)
    return prediction.seconds


def twelve(servers: int = 0, core: float | None = HALF) -> Network:
    return even_network(
        hosts=12, racks=2, link_bits_s=LINK_BITS_S, uplink_bits_s=core, servers=servers
    )


def shared_tree() -> tuple[RankTree, ...]:
    """One tree for all twelve shards: rank 0 relays to its rack, rank 6 to the other.

    What a worker beside the server gets from it need not come over the tree.
    """
    relays = {0: (1, 2, 3, 4, 5), 6: (7, 8, 9, 10, 11)}
    trees = []
    for own in range(12):
        tree = [(0, 6) if own in relays else (0, 6, own)]
        for rank in range(12):
            tree.append(tuple(child for child in relays.get(rank, ()) if child != own))
        trees.append(tuple(tree))
    return tuple(trees)


def test_one_dedicated_server() -> None:
    network = twelve(servers=1)
    assert seconds(network, star(network)) == pytest.approx(12, rel=0.1)
    assert seconds(network, rotated_trees(network, Limits(3, 3))) == pytest.approx(3, rel=0.1)
    assert seconds(network, rotated_chains(network)) == pytest.approx(2.1, rel=0.1)


def test_servers_beside_workers() -> None:
    network = twelve()
    assert seconds(network, star(network)) == pytest.approx(6, rel=0.1)
    assert seconds(network, shared_tree()) == pytest.approx(4.7, rel=0.1)
    assert seconds(network, rotated_trees(network, Limits(2, 3))) == pytest.approx(1.03, rel=0.1)


def test_a_full_core_leaves_nothing_to_gain() -> None:
    network = twelve(core=None)
    soonest = seconds(network, star(network))
    assert soonest == pytest.approx(0.92, rel=0.1)
    assert seconds(network, rotated_trees(network, Limits(2, 3))) > soonest
    assert seconds(network, rotated_chains(network)) > soonest
    assert seconds(network, shared_tree()) > 4.5 * soonest


def test_the_busiest_link_and_the_fill_by_hand() -> None:
    # s0 → h0 → h2 → h3 and h0 → h1; h2 and h3 are in the other rack.
    network = even_network(
        hosts=4, racks=2, link_bits_s=LINK_BITS_S, uplink_bits_s=LINK_BITS_S / 4, servers=1
    )
    tree = ((0,), (2, 1), (), (3,), ())
    prediction = predict(network, [tree], model_bytes=MODEL_BYTES, block_bytes=MODEL_BYTES / 10)
    assert prediction.egress_bytes == (2 * MODEL_BYTES, 0, MODEL_BYTES, 0, MODEL_BYTES)
    assert prediction.busiest.link == "uplink out of r0"
    assert prediction.busiest.nbytes == MODEL_BYTES
    assert prediction.busiest.seconds == pytest.approx(4)
    assert prediction.fill_s == pytest.approx(0.1 + 0.4 + 0.1)
    assert prediction.seconds == pytest.approx(4.6)


def test_ingress_counts() -> None:
    """Three shards to the only worker, whose link is a third of the servers'."""
    network = even_network(hosts=1, link_bits_s=LINK_BITS_S, servers=3)
    slow_worker = (Host("h0", 0, LINK_BITS_S / 3), *network.hosts[1:])
    slow = replace(network, hosts=slow_worker)
    prediction = predict(slow, star(slow), model_bytes=MODEL_BYTES, block_bytes=1)
    assert prediction.busiest.link == "into h0"
    assert prediction.seconds == pytest.approx(3, rel=0.01)


def test_an_uplink_counts_in_both_directions() -> None:
    """Two servers with fast uplinks send to two workers behind a slow one."""
    racks = (Rack("a", "a"), Rack("b", "b"), Rack("c", "c", LINK_BITS_S / 4))
    hosts = tuple(Host(f"h{i}", rack, LINK_BITS_S) for i, rack in enumerate((0, 1, 2, 2)))
    network = Network(racks, hosts, workers=(2, 3), servers=(0, 1))
    prediction = predict(network, star(network), model_bytes=MODEL_BYTES, block_bytes=1)
    assert prediction.busiest.link == "uplink into c"
    assert prediction.busiest.seconds == pytest.approx(8)


def test_a_block_is_no_larger_than_a_shard() -> None:
    network = twelve(core=None)
    whole = predict(network, star(network), model_bytes=MODEL_BYTES, block_bytes=MODEL_BYTES)
    assert whole.fill_s == pytest.approx(1 / 12)


@settings(deadline=None)
@given(networks())
def test_what_leaves_hosts_is_what_must_arrive(network: Network) -> None:
    shard = MODEL_BYTES / len(network.servers)
    entered = sum(len(network.targets(server)) for server in range(len(network.servers)))
    chains = rotated_chains(network)
    prediction = predict(network, chains, model_bytes=MODEL_BYTES, block_bytes=1000)
    assert sum(prediction.egress_bytes) == pytest.approx(entered * shard)
    for host, nbytes in zip(network.hosts, prediction.egress_bytes, strict=True):
        assert prediction.busiest.seconds >= 8 * nbytes / host.link_bits_s * 0.999
