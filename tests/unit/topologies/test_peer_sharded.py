from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.topologies import PeerSharded
from slipstream.types import Cluster, Spec

SIZES = st.lists(st.integers(1, 1 << 40), max_size=60)


@given(SIZES, st.integers(1, 9))
def test_every_chunk_has_one_worker_and_loads_differ_by_at_most_one_chunk(
    sizes: list[int], workers: int
) -> None:
    cluster = Cluster(workers)
    loads: Counter[int] = Counter(dict.fromkeys(cluster.worker_nodes, 0))
    for size, (node,) in zip(sizes, PeerSharded().deal(sizes, cluster), strict=True):
        loads[node] += size
    assert set(loads) == set(cluster.worker_nodes)
    assert max(loads.values()) - min(loads.values()) <= max(sizes, default=0)


@given(st.integers(1, 9))
def test_a_holder_sends_to_each_other_worker_once(workers: int) -> None:
    cluster = Cluster(workers)
    for holder in cluster.worker_nodes:
        sent = PeerSharded().fanout(holder, holder, cluster)
        assert sorted((holder, *sent)) == list(cluster.worker_nodes)
        others = [node for node in cluster.worker_nodes if node != holder]
        assert all(PeerSharded().fanout(node, holder, cluster) == () for node in others)


def test_each_begins_with_another_worker() -> None:
    first = [PeerSharded().fanout(node, node, Cluster(4))[0] for node in range(4)]
    assert sorted(first) == [0, 1, 2, 3]


@given(st.integers(1, 7), st.integers(20_000, 1_000_000))
def test_workers_hold_equal_shares_of_a_model(workers: int, numel: int) -> None:
    strategy = Strategy("peers", Rounds(Everywhere(Route(PeerSharded()))))
    plan = strategy.plan([Spec("w", (numel,), "float32", 0)], Cluster(workers))
    held = [sum(chunk.numel for chunk in plan.chunks_of(node)) for node in range(workers)]
    assert sum(held) == numel
    assert max(held) - min(held) < len(plan.chunks)
