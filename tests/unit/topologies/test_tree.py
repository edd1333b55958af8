"""Trees of ranks as a topology: who passes on to whom, and what is no tree."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.topologies.sharded import Sharded
from slipstream.topologies.tree import RankTree, Tree
from slipstream.types import Cluster

# Server 0 → 0 → 1, 2 and 1 → 3; server 1 → 3 and 2 → 1 → 0.
BOTH = Tree((((0,), (1, 2), (3,), (), ()), ((3, 2), (), (0,), (1,), ())))
FOUR = Cluster(workers=4, servers=2)


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, Cluster]:
    """Every rank below the server or a rank that comes before it in an order."""
    workers, servers = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    drawn: list[RankTree] = []
    for _ in range(servers):
        children: list[list[int]] = [[] for _ in range(workers + 1)]
        order = draw(st.permutations(range(workers)))
        for before, rank in enumerate(order):
            giver = draw(st.sampled_from([-1, *order[:before]]))
            children[giver + 1].append(rank)
        drawn.append(tuple(map(tuple, children)))
    return Tree(tuple(drawn)), Cluster(workers, servers)


def reached(tree: Tree, holder: int, cluster: Cluster) -> list[int]:
    """Everybody whom a publication gets to, by asking each for its fan-out."""
    got = list(tree.fanout(holder, holder, cluster))
    for node in got:
        assert len(got) <= cluster.workers, "somebody is reached twice"
        got += tree.fanout(node, holder, cluster)
    return got


def test_holders_and_workers_pass_on_along_the_holders_tree() -> None:
    assert BOTH.fanout(4, 4, FOUR) == (0,)
    assert BOTH.fanout(0, 4, FOUR) == (1, 2)
    assert BOTH.fanout(1, 4, FOUR) == (3,)
    assert BOTH.fanout(5, 5, FOUR) == (3, 2)
    assert BOTH.fanout(0, 5, FOUR) == ()
    assert BOTH.fanout(5, 4, FOUR) == (), "a server relays nothing for another"


@given(trees())
def test_everybody_is_reached_once(case: tuple[Tree, Cluster]) -> None:
    tree, cluster = case
    tree.check(cluster)
    for holder in cluster.server_nodes:
        assert sorted(reached(tree, holder, cluster)) == list(cluster.worker_nodes)


@given(trees(), st.data())
def test_without_some_the_others_are_reached_once(
    case: tuple[Tree, Cluster], data: st.DataObject
) -> None:
    tree, cluster = case
    dead = data.draw(st.lists(st.sampled_from(cluster.worker_nodes), unique=True))
    for rank in dead:
        tree = tree.without(rank)
    tree.check(cluster)
    alive = sorted(set(cluster.worker_nodes) - set(dead))
    for holder in cluster.server_nodes:
        assert sorted(reached(tree, holder, cluster)) == alive


@given(trees(), st.data())
def test_a_dead_workers_children_go_to_its_parent_and_nobody_else_moves(
    case: tuple[Tree, Cluster], data: st.DataObject
) -> None:
    tree, cluster = case
    dead = data.draw(st.sampled_from(cluster.worker_nodes))
    left = tree.without(dead)
    for before, after in zip(tree.children, left.children, strict=True):
        for node, (had, has) in enumerate(zip(before, after, strict=True)):
            if node == dead + 1:
                assert has == ()
            elif dead in had:
                assert set(has) == (set(had) - {dead}) | set(before[dead + 1])
            else:
                assert has == had


def test_twice_gone_is_gone() -> None:
    assert BOTH.without(1).without(1) == BOTH.without(1)
    with pytest.raises(ConfigError, match="rank 4 is in no tree; they have ranks 0 to 3"):
        BOTH.without(4)


def test_it_survives_json_and_can_be_a_key() -> None:
    gone = BOTH.without(2)
    again = msgspec.json.decode(msgspec.json.encode(gone), type=Tree)
    assert again == gone
    assert {again: 1}[gone] == 1


def test_chunks_are_dealt_as_sharded_deals_them() -> None:
    sizes = [7, 5, 5, 3, 1]
    assert BOTH.deal(sizes, FOUR) == Sharded().deal(sizes, FOUR)
    assert (BOTH.needs_servers, BOTH.whole_layers, BOTH.name) == (True, False, "tree")


@pytest.mark.parametrize(
    ("children", "says"),
    [
        ((((0, 1), (), ()),), r"1 tree\(s\) for 2 server\(s\)"),
        ((((0,), ()),) * 2, r"tree of server 0 is made for 1 worker\(s\), not 2"),
        ((((0, 1), (), ()), ((0,), (), ())), r"server 1 reaches rank 1 0 time\(s\) instead of 1"),
        ((((0, 1), (1,), ()),) * 2, r"server 0 reaches rank 1 2 time\(s\) instead of 1"),
        ((((0, 1, 2), (), ()),) * 2, r"server 0 reaches rank 2 1 time\(s\) instead of 0"),
        ((((), (1,), (0,)),) * 2, "does not reach rank 0, which is cut off from the server"),
    ],
)
def test_what_is_no_tree_of_the_cluster_is_refused_before_anything_is_dealt(
    children: tuple[RankTree, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Tree(children).deal([1, 1], Cluster(2, 2))


def test_a_chain_that_loses_all_but_its_end() -> None:
    chain = Tree((((0,), (1,), (2,), (3,), ()),))
    for dead, _ in pairwise(range(4)):
        chain = chain.without(dead)
    assert chain.children == (((3,), (), (), (), ()),)
