from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.apps.bench.tables import Layer, read_table, table
from slipstream.errors import ConfigError

HEADER = "layer,shape,forward_ms,backward_ms\n"
LAYERS = (
    Layer("conv1", "conv", ((64, 3, 7, 7), (64,)), forward_ms=1.5, backward_ms=3),
    Layer("pool1", "other", (), forward_ms=0.25, backward_ms=0),
    Layer("fc", "fc", ((10, 64),), forward_ms=0.5, backward_ms=1),
)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + "conv1,64x3x7x7;64,1.5,3\npool1,,0.25,0\nfc, 10x64, 0.5, 1\n")
    net = read_table(path, batch=8)
    assert (net.name, net.batch, net.layers) == ("mine", 8, LAYERS)
    assert table(str(path)).batch == 32


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    layers = [
        {"layer": "conv1", "shape": [[64, 3, 7, 7], [64]], "forward_ms": 1.5, "backward_ms": 3},
        {"layer": "pool1", "forward_ms": 0.25, "backward_ms": 0},
        {"layer": "fc", "shape": [10, 64], "kind": "fc", "forward_ms": 0.5, "backward_ms": 1},
    ]
    path.write_text(json.dumps({"name": "net", "batch": 4, "layers": layers}))
    net = read_table(path, batch=8)
    assert (net.name, net.batch, net.layers) == ("net", 4, LAYERS)
    path.write_text(json.dumps(layers))
    assert read_table(path).layers == LAYERS


def test_a_kind_is_told_by_its_shape_unless_given(tmp_path: Path) -> None:
    path = tmp_path / "kinds.csv"
    path.write_text(
        "layer,kind,shape,forward_ms,backward_ms\n"
        "a,,4x4,1,1\nb,embedding,4x4,1,1\nc,,4x4x3,1,1\nd,,4,1,1\n"
    )
    kinds = [layer.kind for layer in read_table(path).layers]
    assert kinds == ["fc", "embedding", "conv", "other"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a,4x4,1,1\nb,4x4,fast,1\n", "line 3: forward_ms is 'fast'"),
        ("a,4x4,1,-1\n", "line 2: backward_ms is '-1'"),
        ("a,4xfour,1,1\n", "line 2: shape .* is not understood: write 1000x2048"),
        ("a,4x0,1,1\n", "line 2: shape .* holds nothing"),
        ("a,4;4;4;4,1,1\n", "line 2: 4 shapes, but a layer has at most 3"),
        (",4x4,1,1\n", "line 2: the layer has no name"),
        ("a,4x4,1\n", "line 2: not as many fields as columns"),
        ("a,4x4,1,1,1\n", "line 2: not as many fields as columns"),
        ("a,4,1,1\na,4,1,1\n", "layer 'a' appears twice"),
        ("a,4,0,0\n", "all times are 0"),
        ("", "no layers in it"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, rows: str, said: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + rows)
    with pytest.raises(ConfigError, match=rf"mine\.csv(, |: ){said}"):
        read_table(path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("layer,shape\n")
    with pytest.raises(ConfigError, match="line 1: no column forward_ms, backward_ms; begin with"):
        read_table(path)
    with pytest.raises(ConfigError, match=r"absent\.csv: cannot be read"):
        table(str(tmp_path / "absent.csv"))


ENTRY = '{"layer": "a", "shape": [4], "forward_ms": 1, "backward_ms": 1}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[\n{,\n]", "line 2: not JSON"),
        ("{}", "line 1: no list of layers"),
        ('{"batch": 0, "layers": []}', "batch 0; give the rows"),
        (f'[\n{ENTRY},\n{{"layer":\n "b", "kind": "dense", "shape": [4, 4]}}]', "line 3: kind"),
        (f'[\n{ENTRY},\n{{"layer": "b", "forward_ms": true}}]', "line 3: forward_ms is True"),
        ('[\n{"layer": "b", "kind": "fc", "shape": [4]}]', "line 2: an fc layer's weight has two"),
        (f'[{ENTRY}, {{"name": "b"}}]', "entry 2 names no layer"),
        ("[3]", "entry 1 names no layer"),
    ],
)
def test_json_errors_tell_the_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"mine\.json(, |: ){said}"):
        read_table(path)
