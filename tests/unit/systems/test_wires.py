"""``wire=``: what travels in few bits, what comes back, and who refuses it."""

import pytest

from slipstream.codecs import Dense, Quantized
from slipstream.compat import check
from slipstream.errors import ConfigError
from slipstream.systems import parse
from slipstream.topologies import PeerSharded
from slipstream.types import Cluster, Spec

SPECS = (
    Spec("fc.weight", (64, 32), "float32", 0),
    Spec("fc.bias", (64,), "float32", 1),
    Spec("half.weight", (64, 32), "bfloat16", 2),
    Spec("norm.mean", (2048,), "float32", 3, role="buffer"),
)
SYSTEMS = (
    "push_pull", "allreduce", "all_to_all", "poseidon", "backup_workers", "bounded_staleness",
    "async_sgd", "k_async",
)  # fmt: skip
BETWEEN_WORKERS = ("allreduce", "all_to_all", "poseidon")


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_large_fp32_parameters_are_quantised_and_nothing_else(system: str, wire: str) -> None:
    strategy = parse(f"{system}(wire={wire!r})")
    check(strategy)
    plan = strategy.plan(SPECS, Cluster(3, servers=0 if system in BETWEEN_WORKERS else 1))
    ups = [plan.routes[route].up for route in plan.route_of]
    assert isinstance(ups[0], Quantized)
    assert ups[0].name == wire
    assert ups[1:] == [Dense()] * 3


def test_gradients_come_back_quantised_and_weights_do_not() -> None:
    (rule,) = parse("push_pull(wire='int8')").rounds.routes.rules  # type: ignore[union-attr]
    assert rule.route.down == rule.route.up
    (rule,) = parse("push_pull(wire='int8', update='server')").rounds.routes.rules  # type: ignore[union-attr]
    assert rule.route.down == Dense()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_form_that_cannot_be_is_refused(system: str) -> None:
    with pytest.raises(ConfigError, match=r"wire='int3': choose one of same, .*int8, int4"):
        parse(f"{system}(wire='int3')")


def test_all_reduce_in_few_bits_needs_no_servers_and_comes_back_in_few_bits() -> None:
    strategy = parse("allreduce(wire='int4')")
    assert not strategy.needs_servers(SPECS, Cluster(3))
    routes = strategy.plan(SPECS, Cluster(3)).routes
    assert {type(route.topology) for route in routes} == {PeerSharded}
    assert [route.down for route in routes] == [route.up for route in routes]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bits": 3}, "choose 8 or 4"),
        ({"bits": True}, "choose 8 or 4"),
        ({"block": 48}, "multiple of 32, from 32 to 4096"),
        ({"block": 8192}, "multiple of 32, from 32 to 4096"),
        ({"rounding": "up"}, "choose 'nearest' or 'stochastic'"),
        ({"seed": -1}, r"from 0 to 2\*\*32 - 1"),
    ],
)
def test_a_codec_that_makes_no_sense_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Quantized(**fields)  # type: ignore[arg-type]
