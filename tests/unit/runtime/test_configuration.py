from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import make_plan, spec_lists, vector

from slipstream.codecs import Dense
from slipstream.consistency import Rounds
from slipstream.errors import FrameRefused, TooManyServers
from slipstream.runtime.configuration import Configuration, OptimizerRecipe
from slipstream.schedules import AfterBackward, Priority, WaitFree
from slipstream.strategy import Plan, Route
from slipstream.systems import SYSTEMS
from slipstream.topologies import Mesh, Sharded
from slipstream.types import Cluster, Spec

ROUTES = st.builds(
    Route,
    st.sampled_from([Sharded(), Mesh()]),
    st.builds(Dense, st.sampled_from(["own", "bfloat16", "float16", "float32"])),
    st.builds(Dense, st.sampled_from(["own", "bfloat16"])),
    st.just("links"),
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
    route_of = [data.draw(st.integers(0, len(routes) - 1)) for _ in specs]
    try:
        plan = Plan.make(
            cluster=Cluster(workers, servers),
            specs=specs,
            routes=routes,
            route_of=route_of,
            consistency=Rounds(),
            schedule=schedule,
            update="server" if update == "server" else "worker",
            chunk_bytes=chunk_bytes,
        )
    except TooManyServers:
        return
    assert over_the_wire(plan).plan() == plan


@pytest.mark.parametrize("system", sorted(SYSTEMS.keys() - {"gadei"}))  # whose server has no links
def test_every_system_can_be_told_to_a_server(system: str) -> None:
    specs = [vector("w", 9000, order=0), vector("b", 5, order=1, role="buffer")]
    plan = SYSTEMS[system]().plan(specs, Cluster(3, 1))
    # What layers choose among themselves, and workers send each other, is not a server's business.
    assert over_the_wire(plan).plan() == replace(
        plan, hybrid=None, slices=None, travels="gradients"
    )


def test_the_optimizer_travels_along() -> None:
    settings = [{"lr": 0.1, "betas": [0.9, 0.99], "amsgrad": False, "foreach": None}]
    recipe = OptimizerRecipe("Adam", settings, [0, -1])
    told = over_the_wire(make_plan([vector("w", 9)], update="server"), recipe)
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
