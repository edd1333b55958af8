import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import make_plan, spec_lists, vector

from slipstream.codecs import Dense
from slipstream.errors import ConfigError, FrameRefused, TooManyServers
from slipstream.methods import Rounds
from slipstream.plan import Plan
from slipstream.routes import ByTensor, Large, Route, Rule
from slipstream.runtime.servers.configuration import Configuration
from slipstream.schedules import AfterBackward, Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS
from slipstream.topologies import Mesh, Sharded
from slipstream.types import Cluster, OptimizerRecipe, Spec
from slipstream.updates import Update, UserOptimizer

WIRES = st.builds(Dense, st.sampled_from(["same", "bfloat16", "float16", "float32"]))
ROUTES = st.builds(Route, st.just(Sharded()), WIRES, WIRES) | st.builds(
    Route, st.just(Mesh()), WIRES
)


def over_the_wire(plan: Plan, optimizer: OptimizerRecipe | None = None) -> Configuration:
    sent = Configuration.of(plan, {"rank 0": "tcp://127.0.0.1:1"}, {"rank 0": 7}, 5.0, optimizer)
    received = Configuration.decode(memoryview(sent.encode()))
    assert received == sent
    return received


@given(
    specs=spec_lists(min_size=1),
    routes=st.lists(ROUTES, min_size=1, max_size=3, unique=True),
    schedule=st.sampled_from([AfterBackward(), WaitFree(), Priority()]),
    update=st.sampled_from(["worker", "server"]),
    workers=st.integers(1, 9),
    servers=st.integers(1, 3),
    chunk_bytes=st.sampled_from([64, 4096, 2 << 20]),
    data=st.data(),
)
def test_a_server_makes_the_very_same_plan(
    specs: list[Spec],
    routes: list[Route],
    schedule: Priority,
    update: str,
    workers: int,
    servers: int,
    chunk_bytes: int,
    data: st.DataObject,
) -> None:
    if update == "server":  # on a mesh there is none, and weights are not rounded on the way back
        routes = [msgspec.structs.replace(r, topology=Sharded(), down=Dense()) for r in routes]
    rules = [Rule(Large(0, pattern=s.name), data.draw(st.sampled_from(routes))) for s in specs]
    strategy = Strategy(
        "drawn",
        Rounds(
            ByTensor(tuple(rules), default=routes[0]),
            update=Update(outer=UserOptimizer("server" if update == "server" else "worker")),
            schedule=schedule,
            chunk_bytes=chunk_bytes,
        ),
    )
    try:
        plan = strategy.plan(specs, Cluster(workers, servers))
    except TooManyServers:
        return
    assert over_the_wire(plan).plan() == plan


@pytest.mark.parametrize("system", sorted(SYSTEMS))
def test_every_system_can_be_told_to_a_server(system: str) -> None:
    specs = [
        vector("w", 9000, order=0),
        vector("b", 5, order=1, role="buffer"),
        Spec("fc.weight", (50, 40), "float32", 2, layer="fc", form="factors"),
        Spec("fc.bias", (50,), "float32", 3, layer="fc", form="factors"),
        Spec("words.weight", (70, 40), "float32", 4, layer="words", form="rows"),
    ]
    if system == "ako":  # whose slices are of what is trained
        specs = specs[:1]
    plan = SYSTEMS[system]().plan(specs, Cluster(3, 1))
    assert over_the_wire(plan).plan() == plan


def test_the_optimizer_travels_along() -> None:
    settings = [{"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": False, "foreach": None}]
    recipe = OptimizerRecipe("Adam", settings, [0, -1])
    told = over_the_wire(make_plan([vector("w", 9)], at_holder=True), recipe)
    assert told.optimizer == recipe
    assert told.silence_s == 5.0
    assert over_the_wire(make_plan([vector("w", 9)])).optimizer is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"workers": "two"}', b"{" * 2000]
)
def test_what_is_no_configuration_is_refused(content: bytes) -> None:
    with pytest.raises(FrameRefused, match="unreadable configuration"):
        Configuration.decode(content)


def test_half_a_configuration_is_refused() -> None:
    content = Configuration.of(make_plan([vector("w", 9)]), {}, {}, 5.0, None).encode()
    for end in range(0, len(content), 7):
        with pytest.raises(FrameRefused):
            Configuration.decode(content[:end])


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (b'"chunk_bytes":2097152', b'"chunk_bytes":0'),
        (b'"part":"Sharded"', b'"part":"Nowhere"'),
        (b'"part":"Sharded"', b'"part":"Dense"'),
        (b'"name":"sample"', b'"name":7'),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused(found: bytes, instead: bytes) -> None:
    content = Configuration.of(make_plan([vector("w", 9)]), {}, {}, 5.0, None).encode()
    assert found in content
    received = Configuration.decode(content.replace(found, instead))
    with pytest.raises(ConfigError, match="no strategy can be read"):
        received.plan()
