from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.tables import TABLES, Table, table
from slipstream.errors import ConfigError

# Parameters as published or as torchvision counts them; 10⁹ multiply-adds of a forward pass;
# images a second and batch of one device.
PUBLISHED = {
    "vgg19": (143_667_240, 19.6, 35.5, 32),
    "vgg19-22k": (229_052_817, 19.7, 34.2, 32),
    "googlenet": (6_998_552, 1.58, 257, 128),  # without auxiliary heads
    "inception-v3": (27_161_264, 5.72, 43.2, 32),  # with the auxiliary head
    "resnet-152": (60_192_808, 11.3, 27.9, 32),
    "alexnet": (61_100_840, 0.71, 1024, 256),  # one tower
}
every_table = pytest.mark.parametrize("net", [make() for make in TABLES.values()], ids=TABLES)


@every_table
def test_totals_are_the_published_ones(net: Table) -> None:
    parameters, giga_macs, images_per_s, batch = PUBLISHED[net.name]
    assert net.parameters == parameters
    assert net.nbytes == 4 * parameters
    assert net.flops / 2e9 == pytest.approx(giga_macs, rel=0.01)
    assert net.samples_per_s == pytest.approx(images_per_s, rel=1e-3)
    assert net.batch == batch


def test_inception_without_its_auxiliary_head() -> None:
    main = [layer for layer in table("inception-v3").layers if not layer.name.startswith("aux")]
    assert sum(layer.parameters for layer in main) == 23_834_568


@every_table
def test_times_follow_flops_a_third_of_them_forward(net: Table) -> None:
    assert net.forward_ms == pytest.approx(net.step_ms / 3)
    first = net.layers[0]
    for layer in net.layers:
        assert layer.backward_ms == pytest.approx(2 * layer.forward_ms)
        assert layer.forward_ms / first.forward_ms == pytest.approx(layer.flops / first.flops)


@every_table
def test_layers_have_names_and_weights_of_their_own(net: Table) -> None:
    assert len({layer.name for layer in net.layers}) == len(net.layers)
    for layer in net.layers:
        assert len(layer.shapes[0]) == {"conv": 4, "fc": 2}[layer.kind]
        assert all(shape == (layer.shapes[0][0],) for shape in layer.shapes[1:])


def test_layer_counts_are_those_in_the_nets_names() -> None:
    kinds = [layer.kind for layer in table("vgg19").layers]
    assert (kinds.count("conv"), kinds.count("fc")) == (16, 3)
    weighted = [layer for layer in table("resnet-152").layers if "shortcut" not in layer.name]
    assert len(weighted) == 152


def test_the_matrices_poseidon_speaks_of() -> None:
    (thin,) = [layer for layer in table("googlenet").layers if layer.kind == "fc"]
    assert thin.shapes[0] == (1000, 1024)
    big = [layer for layer in table("vgg19-22k").layers if layer.kind == "fc"]
    assert [layer.shapes[0] for layer in big] == [(4096, 25088), (4096, 4096), (21841, 4096)]
    share = sum(layer.parameters for layer in big) / table("vgg19-22k").parameters
    assert share == pytest.approx(0.91, abs=0.005)


@given(name=st.sampled_from(list(TABLES)), exponent=st.integers(0, 4))
def test_scaling_keeps_dense_and_factor_bytes_in_proportion(name: str, exponent: int) -> None:
    net, factor = table(name), 4.0**-exponent
    scaled = net.scaled(factor)
    assert scaled.step_ms == pytest.approx(net.step_ms)
    assert scaled.parameters / net.parameters == pytest.approx(factor, rel=0.05)
    for before, after in zip(net.layers, scaled.layers, strict=True):
        if before.kind == "fc":
            factors = [n.batch * sum(x.shapes[0]) for n, x in ((net, before), (scaled, after))]
            assert factors[1] / factors[0] == pytest.approx(factor, rel=0.05)


@given(rows=st.integers(1, 500), times=st.floats(0.01, 100))
def test_batch_and_speed_change_times_alone(rows: int, times: float) -> None:
    net = table("alexnet")
    assert net.at_batch(rows).samples_per_s == pytest.approx(net.samples_per_s)
    assert net.at_batch(rows).batch == rows
    assert net.slowed(times).step_ms == pytest.approx(times * net.step_ms)
    assert net.slowed(times).specs == net.specs


@pytest.mark.parametrize("factor", [0, -1, 1.5, float("nan")])
def test_a_scale_that_makes_no_sense_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="give a factor in"):
        table("vgg19").scaled(factor)


def test_no_batch_and_no_speed() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        table("vgg19").at_batch(0)
    with pytest.raises(ConfigError, match="above 0"):
        table("vgg19").slowed(0)


def test_names_are_forgiving_and_unknown_ones_listed() -> None:
    assert table("VGG19_22K").name == "vgg19-22k"
    with pytest.raises(ConfigError, match=r"there are vgg19, .*alexnet, or give a file"):
        table("lenet")
    with pytest.raises(ConfigError, match="did you mean 'resnet-152'"):
        table("resnet152")


def test_planners_need_no_torch() -> None:
    code = "import sys, slipstream.apps.bench.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
