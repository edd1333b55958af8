import pytest

from slipstream.planning.choosing import ByBytes, ByTime, Ways
from slipstream.planning.costs import (
    LayerShape,
    Speeds,
    adam_both,
    adam_server,
    adam_worker,
    best_scheme,
    dense_link_bytes,
    ps_both,
    ps_server,
    ps_worker,
    sfb,
)

TEN_GBIT = Speeds(10e9, 6e12, 10e9)
VGG19 = [LayerShape("fc6", "factors", 4096, 25088, True), LayerShape("fc7", "factors", 4096, 4096)]
GOOGLENET = LayerShape("fc", "factors", 1000, 1024, True)


def test_worked_example_of_table_1() -> None:
    m = n = 4096
    assert ps_worker(m, n) == pytest.approx(34e6, rel=0.02)
    assert ps_server(m, n, 8, 8) == pytest.approx(34e6, rel=0.02)
    assert ps_both(m, n, 8, 8) == pytest.approx(58.7e6, rel=0.01)
    assert sfb(m, n, 32, 8) == pytest.approx(3.7e6, rel=0.01)


def test_adam_in_table_1() -> None:
    m = n = 4096
    assert adam_worker(m, n, 32) == m * n + 32 * (m + n)
    assert adam_server(m, n, 32, 8) == 8 * adam_worker(m, n, 32)
    assert adam_both(m, n, 32, 8) == 7 * adam_worker(m, n, 32)


@pytest.mark.parametrize(
    ("m", "n", "k", "p1", "p2", "scheme"),
    [
        (4096, 4096, 32, 8, 8, "SFB"),
        (4096, 25088, 32, 16, 16, "SFB"),
        (1000, 1024, 128, 16, 16, "PS"),
        (2, 2, 1, 2, 2, "SFB"),  # as much either way
        (2, 2, 2, 2, 2, "PS"),
    ],
)
def test_algorithm_1(m: int, n: int, k: int, p1: int, p2: int, scheme: str) -> None:
    assert best_scheme(m, n, k, p1, p2) == scheme


@pytest.mark.parametrize("chooser", [ByBytes(), ByTime(TEN_GBIT)])
@pytest.mark.parametrize("servers", [0, 16])
def test_wide_layers_travel_as_factors_and_thin_ones_dense(
    chooser: ByBytes | ByTime, servers: int
) -> None:
    ways = Ways(16, servers)
    for shape in VGG19:
        assert chooser.choose(shape, 32, ways).compact, shape.name
    assert not chooser.choose(GOOGLENET, 128, ways).compact


def test_slow_processors_do_not_rebuild_gradients() -> None:
    slow = Speeds(TEN_GBIT.link_bits_per_s, 20e9, TEN_GBIT.server_bytes_per_s)
    verdict = ByTime(slow).choose(VGG19[0], 32, Ways(16, 16))
    assert not verdict.compact
    assert ByBytes().choose(VGG19[0], 32, Ways(16, 16)).compact


def test_short_formats_and_few_rows_make_factors_cheaper() -> None:
    shape, ways = LayerShape("fc", "factors", 1000, 1000), Ways(8)
    chooser = ByTime(Speeds(1e8, 1e15, 1e10))
    assert not chooser.choose(shape, 160, ways).compact
    assert chooser.choose(shape, 160, ways, compact_bytes=160 * 2000 * 2).compact
    assert chooser.choose(shape, 80, ways).compact


@pytest.mark.parametrize("chooser", [ByBytes(), ByTime(TEN_GBIT)])
def test_rows_of_a_large_table(chooser: ByBytes | ByTime) -> None:
    table = LayerShape("words", "rows", 200_000, 300)
    verdict = chooser.choose(table, 2000, Ways(8, 8))
    assert verdict.compact
    assert verdict.link_bytes == 7 * 2000 * (300 * 4 + 8)
    assert not chooser.choose(table, 200_000, Ways(8, 8)).compact


@pytest.mark.parametrize("chooser", [ByBytes(), ByTime(TEN_GBIT)])
def test_a_layer_without_rows_stays_dense(chooser: ByBytes | ByTime) -> None:
    verdict = chooser.choose(VGG19[0], 0, Ways(8, 8))
    assert not verdict.compact
    assert "no rows" in verdict.why


def test_busiest_link() -> None:
    assert dense_link_bytes(100.0, 4, 0, dedicated=False) == 150
    assert dense_link_bytes(100.0, 4, 4, dedicated=False) == 150
    assert dense_link_bytes(100.0, 4, 2, dedicated=True) == 200
    assert dense_link_bytes(100.0, 4, 8, dedicated=True) == 100


def test_a_tensor_that_goes_to_every_peer_takes_as_long_as_its_bytes() -> None:
    ring, to_peers = Ways(4), Ways(4, to_each=1.0)
    assert to_peers.dense_bytes(100.0) == 2 * ring.dense_bytes(100.0) == 300
    assert to_peers.dense_seconds(100.0, TEN_GBIT) == 8 * 300 / 10e9
    assert Ways(4, 2, dedicated=True).dense_seconds(100.0, TEN_GBIT) == 8 * 200 / 10e9 + 200 / 10e9


def test_a_bias_is_part_of_what_travels_dense_but_not_of_factors() -> None:
    with_bias, without = (LayerShape("fc", "factors", 10, 20, bias) for bias in (True, False))
    assert with_bias.dense_bytes == without.dense_bytes + 40
    assert with_bias.compact_bytes(3) == without.compact_bytes(3) == 3 * 30 * 4
    assert with_bias.rebuild_flops(3) == 2 * 3 * 10 * 20


def test_a_choice_needs_speeds_only_to_choose_by_time() -> None:
    assert ByTime().needs_speeds
    assert not ByTime(TEN_GBIT).needs_speeds
    assert not ByBytes().needs_speeds
    assert ByBytes().measured(TEN_GBIT) == ByBytes()
    assert ByTime().measured(TEN_GBIT) == ByTime(TEN_GBIT)
    assert ByTime(TEN_GBIT).measured(Speeds(1.0, 1.0, 1.0)) == ByTime(TEN_GBIT)
