import re
from typing import Any

import msgspec
import pytest

from slipstream.compat import check
from slipstream.errors import ConfigError
from slipstream.planning.choosing import ByTime, Ways
from slipstream.planning.costs import LayerShape
from slipstream.routes import Route
from slipstream.strategy import Strategy
from slipstream.systems import poseidon
from slipstream.types import Cluster, Spec
from slipstream.updates import Update, User

SPECS = [
    Spec("conv.weight", (3, 3), "float32", 0),
    Spec("fc.weight", (4, 4), "float32", 1, layer="fc", form="factors"),
    Spec("fc.bias", (4,), "float32", 2, layer="fc", form="factors"),
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
        ByTime().choose(LayerShape("fc", "factors", 4, 4), 1, Ways(2), item_bytes=None)


def test_layers_named_dense_are_not_considered() -> None:
    plan = poseidon(choose="bytes", dense=["fc"]).plan(SPECS, Cluster(2, 1))
    assert [spec.layer for spec in plan.specs] == [""] * 4
    assert plan.specs[1].obstacle == "named in dense"


def test_a_dense_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=re.escape("dense='fc9': the model has no such layer")):
        poseidon(choose="bytes", dense=["fc9"]).plan(SPECS, Cluster(2, 1))


def test_servers_cannot_update_what_they_do_not_see() -> None:
    at_holder = Update(outer=User(at="holder"))
    with pytest.raises(ConfigError, match=r"use User\(at='worker'\)"):
        check(msgspec.structs.replace(poseidon(choose="bytes"), update=at_holder))


def test_dense_roads() -> None:
    def road(strategy: Strategy, cluster: Cluster) -> Route:
        (route,) = strategy.routes.candidates(SPECS[0], cluster)
        return route

    shards, collective = "dense/sharded", "dense/collective"
    by_bytes, by_time = poseidon(choose="bytes"), poseidon(rate="10gbit")
    assert road(by_bytes, Cluster(4, 4)).scheme == shards
    assert road(by_time, Cluster(4)).scheme == collective
    assert road(by_time, Cluster(4, 4)).scheme == collective
    assert road(by_time, Cluster(4, 2, dedicated=True)).scheme == collective
    assert road(by_time, Cluster(4, 4, dedicated=True)).scheme == shards


def test_chunks_do_not_mix_layers() -> None:
    plan = poseidon(choose="bytes").plan(SPECS, Cluster(2, 1))
    for chunk in plan.chunks:
        assert len({plan.specs[segment.tensor].layer for segment in chunk.segments}) == 1
