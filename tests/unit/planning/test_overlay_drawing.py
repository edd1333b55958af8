"""Where ranks stand in a picture: nobody on top of another, parents above their children."""

from itertools import combinations

from hypothesis import given, settings
from overlay_samples import LINK_BITS_S, networks

from slipstream.planning.overlays import Network, even_network, rotated_chains, star
from slipstream.planning.overlays.drawing import SERVER, Spot, spots


def test_a_tree_by_hand() -> None:
    network = even_network(hosts=4, link_bits_s=LINK_BITS_S, servers=1)
    # The server → 0 → 1, 2 and the server → 3.
    assert spots(network, 0, ((0, 3), (1, 2), (), (), ())) == [
        Spot(SERVER, 4, 0, 1.25, 0),
        Spot(0, 0, 0, 0.5, 1),
        Spot(1, 1, 1, 0.0, 2),
        Spot(2, 2, 1, 1.0, 2),
        Spot(3, 3, 0, 2.0, 1),
    ]


@settings(deadline=None)
@given(networks())
def test_everybody_has_a_spot_below_whoever_sends_to_it(network: Network) -> None:
    for children in (star(network), rotated_chains(network)):
        for server, tree in enumerate(children):
            placed = spots(network, server, tree)
            assert sorted(spot.rank for spot in placed) == list(range(-1, len(network.workers)))
            for spot in placed[1:]:
                above = placed[spot.above]
                assert spot.rank in tree[above.rank + 1]
                assert spot.depth == above.depth + 1
                assert spot.host == network.workers[spot.rank]
            for one, other in combinations(placed, 2):
                assert one.depth != other.depth or abs(one.x - other.x) >= 1
