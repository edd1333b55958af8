from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, TooManyServers
from slipstream.topologies import Sharded
from slipstream.types import Cluster

SIZES = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 5), st.data())
def test_every_chunk_has_one_server_and_loads_differ_by_at_most_one_chunk(
    sizes: list[int], workers: int, data: st.DataObject
) -> None:
    cluster = Cluster(workers, data.draw(st.integers(1, len(sizes)), label="servers"))
    holders = Sharded().deal(sizes, cluster)
    assert len(holders) == len(sizes)
    loads: Counter[int] = Counter(dict.fromkeys(cluster.server_nodes, 0))
    for size, nodes in zip(sizes, holders, strict=True):
        (node,) = nodes
        assert node in cluster.server_nodes
        loads[node] += size
    assert max(loads.values()) - min(loads.values()) <= max(sizes)
    assert all(loads.values()), "a server without a chunk"


@given(SIZES, st.integers(1, 6))
def test_equal_chunks_are_dealt_as_evenly_as_counting_allows(
    sizes: list[int], servers: int
) -> None:
    count = len(sizes) + servers
    holders = Sharded().deal([64] * count, Cluster(2, servers))
    held = Counter(node for (node,) in holders)
    assert max(held.values()) - min(held.values()) <= 1


def test_a_large_chunk_is_balanced_by_small_ones() -> None:
    holders = Sharded().deal([100, *[10] * 10], Cluster(1, 2))
    assert holders == ((1,), *[(2,)] * 10)


def test_more_servers_than_chunks_says_how_many_would_do() -> None:
    with pytest.raises(TooManyServers, match=r"3 servers but only 2 chunk.* at most 2 server"):
        Sharded().deal([10, 10], Cluster(2, 3))


def test_no_servers_at_all_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="at least one server; this cluster has none"):
        Sharded().deal([10], Cluster(2))


def test_every_worker_receives_what_a_shard_publishes() -> None:
    assert Sharded().fanout(4, 4, Cluster(3, 2)) == (0, 1, 2)
    assert Sharded().fanout(1, 4, Cluster(3, 2)) == ()
    assert Sharded.needs_servers
