"""Star, trees or chain: what is taken where, and that ties go to the star."""

import pytest
from hypothesis import given, settings
from overlay_samples import LINK_BITS_S, MODEL_BYTES, networks, walk

from slipstream.errors import ConfigError
from slipstream.planning.overlays import (
    Candidate,
    Limits,
    Network,
    choose_overlay,
    even_network,
    possible_limits,
)

BLOCK_BYTES = MODEL_BYTES / 100


def choose(servers: int = 0, core: float | None = 0.5, hosts: int = 12) -> Candidate:
    network = even_network(
        hosts=hosts,
        racks=2,
        link_bits_s=LINK_BITS_S,
        uplink_bits_s=None if core is None else core * LINK_BITS_S,
        servers=servers,
    )
    return choose_overlay(network, MODEL_BYTES, BLOCK_BYTES).best


def test_a_slow_core_calls_for_trees() -> None:
    best = choose()
    assert best.name == "trees"
    assert best.prediction.seconds == pytest.approx(1.03, rel=0.03)


def test_a_full_core_with_servers_everywhere_does_not() -> None:
    assert choose(core=None).name == "star"


def test_few_dedicated_servers_call_for_relays_even_then() -> None:
    best = choose(servers=1, core=None)
    assert best.name != "star"
    assert best.prediction.seconds < 2.2


def test_large_blocks_make_a_chain_slow_and_small_ones_do_not() -> None:
    network = even_network(hosts=6, link_bits_s=LINK_BITS_S, servers=1)
    assert choose_overlay(network, MODEL_BYTES, MODEL_BYTES / 1000).best.name == "chain"
    assert choose_overlay(network, MODEL_BYTES, MODEL_BYTES).best.name != "chain"


def test_less_than_five_percent_is_not_worth_a_relay() -> None:
    """One server, two workers: a chain halves the time, less what it takes to fill it."""
    network = even_network(hosts=2, link_bits_s=LINK_BITS_S, servers=1)
    for block, name in ((0.1, "chain"), (0.85, "chain"), (0.86, "star"), (1.0, "star")):
        # A star takes 2 + block, a chain 1 + 2 · block.
        assert (1 + 2 * block <= 0.95 * (2 + block)) == (name == "chain")
        assert choose_overlay(network, MODEL_BYTES, block * MODEL_BYTES).best.name == name


@settings(max_examples=30, deadline=None)
@given(networks())
def test_nothing_that_was_looked_at_is_much_sooner_and_all_reach_everybody(
    network: Network,
) -> None:
    choice = choose_overlay(network, MODEL_BYTES, BLOCK_BYTES)
    times = [one.prediction.seconds for one in choice.candidates]
    assert choice.star.name == "star"
    assert choice.best.prediction.seconds in (min(times), times[0])
    assert 0.95 * choice.best.prediction.seconds <= min(times)
    for one in choice.candidates:
        for server, tree in enumerate(one.children):
            reached = [rank for rank, _, _ in walk(network, server, tree)]
            assert sorted(reached) == list(range(len(network.workers)))


def test_alone_there_is_nothing_to_choose() -> None:
    network = even_network(hosts=1, link_bits_s=LINK_BITS_S)
    choice = choose_overlay(network, MODEL_BYTES, BLOCK_BYTES)
    assert choice.best.name == "star"
    assert choice.best.prediction.seconds == 0


def test_given_limits_are_kept_to() -> None:
    tried = list(possible_limits(12, degree=3, alpha=0.5))
    assert {(one.degree, one.alpha) for one in tried} == {(3, 0.5)}
    assert [one.depth for one in tried] == [2, 3]
    assert list(possible_limits(12, degree=3, depth=2, alpha=0.5)) == [Limits(3, 2, 0.5)]
    # Nothing of degree 2, 3 or 4 reaches 100 hosts in two hops; a tenth hop is not needed.
    assert {one.degree for one in possible_limits(100, depth=2)} == {10}


def test_limits_within_which_there_is_no_tree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"depth of 3 or a degree of 3"):
        list(possible_limits(12, degree=2, depth=2))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (float("nan"), 1), (float("inf"), 1)])
def test_sizes_of_no_use(sizes: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="give a number of bytes above 0"):
        choose_overlay(even_network(hosts=2, link_bits_s=1e6), *sizes)
