"""``wire=``: what travels in few bits, what comes back, and who refuses it."""

import pytest

from slipstream.codecs import Dense, Quantized
from slipstream.compat import check
from slipstream.errors import ConfigError
from slipstream.systems import parse
from slipstream.types import Cluster, Spec

SPECS = (
    Spec("fc.weight", (64, 32), "float32", 0),
    Spec("fc.bias", (64,), "float32", 1),
    Spec("half.weight", (64, 32), "bfloat16", 2),
    Spec("norm.mean", (2048,), "float32", 3, role="buffer"),
)
SYSTEMS = ("push_pull", "all_to_all", "backup_workers", "bounded_staleness", "async_sgd")


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_large_fp32_parameters_are_quantised_and_nothing_else(system: str, wire: str) -> None:
    strategy = parse(f"{system}(wire={wire!r})")
    check(strategy)
    plan = strategy.plan(SPECS, Cluster(3, servers=0 if system == "all_to_all" else 1))
    ups = [plan.routes[route].up for route in plan.route_of]
    assert isinstance(ups[0], Quantized)
    assert ups[0].name == wire
    assert ups[1:] == [Dense()] * 3


def test_gradients_come_back_quantised_and_weights_do_not() -> None:
    (rule,) = parse("push_pull(wire='int8')").routes.rules  # type: ignore[union-attr]
    assert rule.route.down == rule.route.up
    (rule,) = parse("push_pull(wire='int8', update='server')").routes.rules  # type: ignore[union-attr]
    assert rule.route.down == Dense()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("push_pull(wire='int3')", "choose one of own, .*int8, int4"),
        ("allreduce(wire='int8')", r"collectives sum plain values; use push_pull\(wire='int8'\)"),
    ],
)
def test_a_form_that_cannot_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


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
