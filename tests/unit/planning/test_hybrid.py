import re
from typing import Any

import pytest

from slipstream.consistency import Rounds
from slipstream.errors import ConfigError
from slipstream.planning.hybrid import Hybrid
from slipstream.schedules import WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import poseidon
from slipstream.systems.poseidon import COLLECTIVE, SHARDS
from slipstream.types import Cluster, Spec

SPECS = [
    Spec("conv.weight", (3, 3), "float32", 0),
    Spec("fc.weight", (4, 4), "float32", 1, layer="fc"),
    Spec("fc.bias", (4,), "float32", 2, layer="fc"),
    Spec("norm.mean", (4,), "float32", 3, "buffer"),
]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"choose": "luck"}, "choose='luck'"), ({"wire": "int8"}, "wire='int8'")],
)
def test_what_there_is_no_such_thing_as(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        poseidon(**options)


def test_time_without_speeds() -> None:
    with pytest.raises(ConfigError, match="needs speeds"):
        Hybrid("time").chooser()


def test_layers_named_dense_are_not_considered() -> None:
    plan = poseidon(choose="bytes", dense=["fc"]).plan(SPECS, Cluster(2, 1))
    assert [spec.layer for spec in plan.specs] == [""] * 4
    assert plan.specs[1].obstacle == "named in dense"


def test_a_dense_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=re.escape("dense='fc9': the model has no such layer")):
        poseidon(choose="bytes", dense=["fc9"]).plan(SPECS, Cluster(2, 1))


def test_servers_cannot_update_what_they_do_not_see() -> None:
    with pytest.raises(ConfigError, match="use update='worker'"):
        Strategy(
            "odd",
            route=lambda spec, cluster: SHARDS,
            consistency=Rounds(),
            schedule=WaitFree(),
            update="server",
            hybrid=Hybrid("bytes"),
        )


def test_dense_roads() -> None:
    by_bytes, by_time = poseidon(choose="bytes"), poseidon(rate="10gbit")
    weight = SPECS[0]
    assert by_bytes.route(weight, Cluster(4, 4)) == SHARDS
    assert by_time.route(weight, Cluster(4)) == COLLECTIVE
    assert by_time.route(weight, Cluster(4, 4)) == COLLECTIVE
    assert by_time.route(weight, Cluster(4, 2, dedicated=True)) == COLLECTIVE
    assert by_time.route(weight, Cluster(4, 4, dedicated=True)) == SHARDS


def test_chunks_do_not_mix_layers() -> None:
    plan = poseidon(choose="bytes").plan(SPECS, Cluster(2, 1))
    for chunk in plan.chunks:
        assert len({plan.specs[segment.tensor].layer for segment in chunk.segments}) == 1
