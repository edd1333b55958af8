"""Networks, and what tests ask of the trees in them."""

from collections.abc import Iterator

from hypothesis import strategies as st

from slipstream.planning.overlays import Host, Network, Rack, RankTree

LINK_BITS_S = 8e6  # a model of a million bytes takes a second
MODEL_BYTES = 1e6


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Workers and servers anywhere: several on a host, none on others, beside each other or not."""
    racks = draw(st.integers(1, 3))
    rates = st.sampled_from([LINK_BITS_S, LINK_BITS_S / 3])
    uplinks = st.sampled_from([None, LINK_BITS_S, LINK_BITS_S / 2])
    hosts = draw(st.lists(st.tuples(st.integers(0, racks - 1), rates), min_size=1, max_size=8))
    anywhere = st.integers(0, len(hosts) - 1)
    return Network(
        racks=tuple(Rack(f"r{r}", f"a{r // 2}", draw(uplinks)) for r in range(racks)),
        hosts=tuple(Host(f"h{i}", rack, rate) for i, (rack, rate) in enumerate(hosts)),
        workers=tuple(draw(st.lists(anywhere, min_size=1, max_size=9))),
        servers=tuple(draw(st.lists(anywhere, min_size=1, max_size=5))),
    )


def walk(network: Network, server: int, tree: RankTree) -> Iterator[tuple[int, int, int]]:
    """Every rank that a tree reaches, with its parent (-1: the server) and hops between hosts."""
    host_of = {-1: network.servers[server], **dict(enumerate(network.workers))}
    waiting = [(-1, 0)]
    for giver, hops in waiting:
        assert len(waiting) <= len(network.workers) + 1, "somebody is reached twice"
        for rank in tree[giver + 1]:
            there = hops + (host_of[rank] != host_of[giver])
            yield rank, giver, there
            waiting.append((rank, there))


def sends(network: Network, server: int, tree: RankTree) -> list[int]:
    """By host: to how many others it sends in a tree."""
    counted = [0] * len(network.hosts)
    host_of = {-1: network.servers[server], **dict(enumerate(network.workers))}
    for rank, giver, _ in walk(network, server, tree):
        counted[host_of[giver]] += host_of[giver] != host_of[rank]
    return counted
