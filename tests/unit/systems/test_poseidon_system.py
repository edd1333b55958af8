import re
from typing import Any

import msgspec
import pytest

from slipstream.codecs import Dense, OneBit
from slipstream.codecs.quantized import FEW_BITS
from slipstream.compat import check
from slipstream.errors import ConfigError
from slipstream.planning.choosing import ByTime, Ways
from slipstream.planning.costs import LayerShape
from slipstream.routes import (
    Cheapest,
    Collective,
    Large,
    Route,
    Rule,
    between_hosts,
    dense_only,
)
from slipstream.strategy import Strategy
from slipstream.systems import poseidon
from slipstream.topologies import Mesh, PeerSharded, Sharded
from slipstream.types import Cluster, Spec
from slipstream.updates import Update, UserOptimizer

SHARDS, SHARES = Route(Sharded()), Route(PeerSharded())
COLLECTIVE = Route(Mesh(), over=Collective())
SPECS = [
    Spec("conv.weight", (3, 3), "float32", 0),
    Spec("fc.weight", (4, 4), "float32", 1, layer="fc", form="factors"),
    Spec("fc.bias", (4,), "float32", 2, layer="fc", form="factors"),
    Spec("norm.mean", (4,), "float32", 3, "buffer"),
]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"choose": "luck"}, "choose='luck'"), ({"wire": "int3"}, "wire='int3': .*int8, int4")],
)
def test_what_there_is_no_such_thing_as(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        poseidon(**options)


def test_time_without_speeds() -> None:
    with pytest.raises(ConfigError, match="needs speeds"):
        ByTime().choose(LayerShape("fc", "factors", 4, 4), 1, Ways(2))


def test_layers_named_dense_are_not_considered() -> None:
    plan = poseidon(choose="bytes", dense=["fc"]).plan(SPECS, Cluster(2, 1))
    assert [spec.layer for spec in plan.specs] == [""] * 4
    assert plan.specs[1].obstacle == "named in dense"


def test_a_dense_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=re.escape("dense='fc9': the model has no such layer")):
        poseidon(choose="bytes", dense=["fc9"]).plan(SPECS, Cluster(2, 1))


def test_servers_cannot_update_what_they_do_not_see() -> None:
    at_holder = Update(outer=UserOptimizer(at="server"))
    with pytest.raises(ConfigError, match=r"use UserOptimizer\(at='worker'\)"):
        check(
            Strategy(
                "poseidon",
                msgspec.structs.replace(poseidon(choose="bytes").rounds, update=at_holder),
            )
        )


def test_dense_roads() -> None:
    def road(strategy: Strategy, cluster: Cluster) -> Route:
        (route,) = strategy.rounds.routes.candidates(SPECS[0], cluster)
        return route

    shards, collective = "dense/sharded", "dense/collective"
    by_bytes, by_time = poseidon(choose="bytes"), poseidon(rate="10gbit")
    assert road(by_bytes, Cluster(4, 4)).scheme == shards
    assert road(by_time, Cluster(4)).scheme == collective
    assert road(by_time, Cluster(4, 4)).scheme == collective
    assert road(by_time, Cluster(4, 2, dedicated=True)).scheme == collective
    assert road(by_time, Cluster(4, 4, dedicated=True)).scheme == shards


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_dense_roads_in_few_bits(wire: Any) -> None:
    """Workers that hold shares take the place of collectives; small tensors stay as they are."""
    large = Spec("conv.weight", (64, 64), "float32", 0)
    shares = Route(PeerSharded(), up=FEW_BITS[wire], down=FEW_BITS[wire])
    shards = Route(Sharded(), up=FEW_BITS[wire], down=FEW_BITS[wire])
    by_bytes, by_time = poseidon(choose="bytes", wire=wire), poseidon(rate="10gbit", wire=wire)
    enough = Cluster(4, 4, dedicated=True)
    for strategy, cluster, wanted in (
        (by_time, Cluster(4), (shares, SHARES)),
        (by_time, enough, (shards, SHARDS)),
        (by_bytes, Cluster(4, 4), (shards, SHARDS)),
    ):
        policy = between_hosts(strategy.rounds.routes)
        chosen = [policy.candidates(spec, cluster)[-1] for spec in (large, SPECS[0])]
        assert tuple(chosen) == wanted
    assert not by_time.needs_servers([large, *SPECS], Cluster(4))
    assert Strategy.from_json(by_time.to_json()) == by_time
    assert [r.up.form for r in dense_only(by_time.rounds.routes).routes()] == ["dense"] * 5


def test_a_rule_keeps_a_route_to_tensors_that_fit_unless_it_is_given_to_all() -> None:
    ruled = Rule(Large(1024), SHARES)
    small, cluster = SPECS[0], Cluster(4)
    assert Cheapest((ruled, COLLECTIVE)).candidates(small, cluster) == (COLLECTIVE,)
    assert Cheapest((ruled, SHARES, COLLECTIVE)).candidates(small, cluster) == (SHARES,)
    with pytest.raises(ConfigError, match="needs a dense route"):
        Cheapest((ruled,))


def test_the_cheapest_dense_route_is_the_one_of_fewest_bytes() -> None:
    """One bit a value over servers beats a ring of floats, which beats servers of floats."""
    bits, fc = Route(Sharded(), up=OneBit(), down=OneBit()), Spec("fc", (64, 64), "float32", 0)
    colocated = Cluster(4, servers=2)
    assert Cheapest((COLLECTIVE, SHARDS)).candidates(fc, colocated) == (COLLECTIVE,)
    assert Cheapest((COLLECTIVE, bits)).candidates(fc, colocated) == (bits,)
    halved = Route(Mesh(), up=Dense("bfloat16"), over=Collective())
    apart = Cluster(4, servers=4, dedicated=True)
    assert Cheapest((COLLECTIVE, SHARDS)).candidates(fc, apart) == (SHARDS,)
    assert Cheapest((halved, SHARDS)).candidates(fc, apart) == (halved,)


def test_few_bits_are_counted_by_the_rules() -> None:
    large = [
        Spec("fc.weight", (1024, 1024), "float32", 1, layer="fc", form="factors"),
        Spec("fc.bias", (1024,), "float32", 2, layer="fc", form="factors"),
    ]
    for choose in ("bytes", "time"):
        moved = []
        for wire in ("same", "int8", "int4"):
            strategy = poseidon(choose=choose, wire=wire, rate="1mbit")  # type: ignore[arg-type]
            plan = strategy.plan(large, Cluster(4, 4))
            few, many = (plan.verdicts(rows, None)["fc"] for rows in (16, 4096))
            assert (few.compact, many.compact) == (True, False)
            moved.append((few.link_bytes, many.link_bytes))
        for few_bits, part in zip(moved[1:], (1 / 4, 1 / 8), strict=True):
            for taken, own in zip(few_bits, moved[0], strict=True):
                assert part < taken / own < 1.07 * part


def test_chunks_do_not_mix_layers() -> None:
    plan = poseidon(choose="bytes").plan(SPECS, Cluster(2, 1))
    for chunk in plan.chunks:
        assert len({plan.specs[segment.tensor].layer for segment in chunk.segments}) == 1
