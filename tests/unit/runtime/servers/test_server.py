"""A server behind a transport: whom it listens to, and that nothing it hears brings it down."""

import msgspec
import numpy as np
import pytest
from samples import floats, make_plan, push, vector

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.files.state_entries import FIRST_WEIGHTS, STATE, WEIGHTS
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import Server
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import (
    AnyBody,
    Arrived,
    Commit,
    Configure,
    Fetch,
    Inquire,
    Lease,
    Leave,
    Message,
    Publish,
    Push,
    Ready,
    State,
    WorkerLeft,
    checksum,
)
from slipstream.types import Buffer, OptimizerRecipe, Spec

SPECS = [vector("w", 3)]
SGD = OptimizerRecipe("SGD", [{"lr": 1.0, "momentum": 0.0}], [0])


class Bench:
    """One server, and a hand that plays everybody else."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        transport = self.network.endpoint("server 0")
        self.member = Member("server 0", transport, silence_s=1e9, clock=VirtualClock())
        self.server = Server(0, self.member)
        for name in ("rank 0", "rank 1", "server 1", "stranger"):
            self.network.endpoint(name).connect("server 0", "")

    def tell(self, sender: str, body: AnyBody, *frames: Buffer) -> None:
        self.network.endpoint(sender).send("server 0", body, frames)
        self.member.pump_once(0.0)

    def heard(self, name: str) -> list[Message]:
        messages = []
        while (message := self.network.endpoint(name).receive(0.0)) is not None:
            if isinstance(message.body, Ready | Publish | State | Leave):
                messages.append(message)
        return messages

    def configure(
        self,
        plan: Plan,
        optimizer: OptimizerRecipe | None = None,
        processes: dict[str, int] | None = None,
    ) -> None:
        workers = {"rank 0": "", "rank 1": ""}
        content = Configuration.of(plan, workers, processes or {}, 1e9, optimizer).encode()
        self.tell(HUB, Configure(), content)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_rank_0s_plan_is_taken_and_answered(bench: Bench) -> None:
    bench.configure(make_plan(SPECS))
    (answer,) = bench.heard(HUB)
    assert answer.body == Ready()
    assert not bench.server.done


def test_only_rank_0_configures_and_only_once(bench: Bench) -> None:
    content = Configuration.of(make_plan(SPECS), {"rank 0": ""}, {}, 1e9, None).encode()
    bench.tell("rank 1", Configure(), content)
    bench.tell(HUB, Configure())
    bench.tell(HUB, Configure(), content, content)
    bench.tell(HUB, Configure(), b"{}")
    assert bench.member.refused == 4
    bench.configure(make_plan(SPECS))
    bench.configure(make_plan(SPECS))
    assert bench.member.refused == 5
    assert [message.body for message in bench.heard(HUB)] == [Ready()]


def test_a_plan_that_cannot_be_made_is_answered_with_the_reason(bench: Bench) -> None:
    plan = make_plan(SPECS, at_holder=True)
    bench.configure(plan, OptimizerRecipe("LBFGS", [{}], [0]))
    (answer,) = bench.heard(HUB)
    assert answer.body == Ready("LBFGS is not an elementwise optimizer")


def test_a_round_is_published_to_every_worker(bench: Bench) -> None:
    plan = make_plan(SPECS)
    bench.configure(plan)
    (chunk,) = plan.chunks
    for rank, numbers in enumerate([(1, 2, 3), (3, 4, 5)]):
        body, frames = push(chunk, [floats(*numbers)])
        bench.tell(f"rank {rank}", body, *frames)
    for name in ("rank 0", "rank 1"):
        result = bench.heard(name)[-1]
        assert result.body == Publish(0, 0, 0, [1], checksum(result.frames))
        assert np.frombuffer(result.frames[0], np.float32).tolist() == [2, 3, 4]


def test_a_push_before_the_plan_or_from_no_worker_is_refused(bench: Bench) -> None:
    plan = make_plan(SPECS)
    (chunk,) = plan.chunks
    body, frames = push(chunk, [floats(1, 2, 3)])
    bench.tell("rank 0", body, *frames)
    assert "before the plan" in bench.member.last_refusal
    bench.configure(plan)
    for sender in ("stranger", "server 1"):
        bench.tell(sender, body, *frames)
    assert bench.member.refused == 3
    assert bench.member.fault is None


def updating(bench: Bench, specs: list[Spec] = SPECS) -> Plan:
    plan = make_plan(specs, at_holder=True)
    bench.configure(plan, SGD)
    weights = [np.float32([10, 20, 30])]
    bench.tell(HUB, State(FIRST_WEIGHTS, 0, 0, 12, checksum(weights)), *weights)
    assert bench.member.refused == 0
    return plan


def told(body: Push, settings: object) -> Push:
    return msgspec.structs.replace(body, settings=settings)


def new_weights(bench: Bench) -> list[float]:
    (result,) = (m for m in bench.heard("rank 1") if isinstance(m.body, Publish))
    numbers: list[float] = np.frombuffer(result.frames[0], np.float32).tolist()
    return numbers


def test_a_server_that_updates_publishes_weights(bench: Bench) -> None:
    plan = updating(bench)
    body, frames = push(plan.chunks[0], [floats(1, 2, 3)])
    for rank in range(2):
        bench.tell(f"rank {rank}", told(body, [{"lr": 2.0, "momentum": 0.0}]), *frames)
    assert new_weights(bench) == [8, 16, 24]


@pytest.mark.parametrize("sender", [HUB, "rank 1"])
def test_workers_may_ask_for_state(bench: Bench, sender: str) -> None:
    updating(bench)
    bench.tell(sender, Fetch(STATE))
    assert isinstance(bench.heard(sender)[-1].body, State)


def test_strangers_get_no_state(bench: Bench) -> None:
    """An answer to a stranger could not even be sent: there is no link to one."""
    updating(bench)
    bench.tell("stranger", Fetch(STATE))
    assert bench.member.refused == 1


@pytest.mark.parametrize("sender", ["rank 1", "stranger"])
def test_only_rank_0_touches_weights_or_state(bench: Bench, sender: str) -> None:
    plan = updating(bench)
    weights = [np.float32([0, 0, 0])]
    entries = [(0, "momentum_buffer", "float32")]
    for name in (FIRST_WEIGHTS, WEIGHTS):
        bench.tell(sender, State(name, 0, 0, 12, checksum(weights)), *weights)
    bench.tell(sender, State(STATE, 0, 0, 12, checksum(weights), entries), *weights)
    assert bench.member.refused == 3
    body, frames = push(plan.chunks[0], [floats(1, 2, 3)])
    for rank in range(2):
        bench.tell(f"rank {rank}", told(body, [{"lr": 1.0}]), *frames)
    assert new_weights(bench) == [9, 18, 27]


def test_workers_out_of_step_end_the_job_by_name(bench: Bench) -> None:
    plan = make_plan(SPECS)
    bench.configure(plan)
    body, frames = push(plan.chunks[0], [floats(1, 2, 3)], step=1)
    bench.tell("rank 0", body, *frames)
    body, frames = push(plan.chunks[0], [floats(1, 2, 3)], step=2)
    with pytest.raises(RuntimeFault, match="rank 0 at step 1, rank 1 at step 2"):
        bench.tell("rank 1", body, *frames)
    said = bench.heard(HUB)[-1].body
    assert isinstance(said, Leave)
    assert said.reason is not None
    assert "rank 1 at step 2" in said.reason


def test_the_hubs_leave_ends_a_server(bench: Bench) -> None:
    bench.configure(make_plan(SPECS))
    bench.tell("rank 1", Leave())
    assert not bench.server.done
    bench.tell(HUB, Leave())
    assert bench.server.done


@pytest.mark.parametrize("process", [11, 99], ids=["of the worker itself", "of another process"])
def test_a_gradient_that_does_not_fit(bench: Bench, process: int) -> None:
    """A round cannot be made without it: if it is the worker's own, the job ends and says why."""
    bench.configure(make_plan(SPECS), processes={"rank 0": 0, "rank 1": 11, "server 0": 0})
    bench.heard(HUB)
    bench.network.endpoint("rank 1").process = process
    twice_as_large = floats(1, 2, 3, 4, 5, 6).data
    bench.tell("rank 1", Push(0, 0, 0, [1], checksum([twice_as_large])), twice_as_large)
    assert bench.member.refused == 1
    told = [message.body for message in bench.heard(HUB)]
    if process == 99:
        assert (told, bench.member.fault) == ([], None)
        return
    (leave,) = told
    assert isinstance(leave, Leave)
    assert leave.about == "rank 1"
    assert "'w': 24 bytes where 3 values take 12" in str(leave.reason)
    assert bench.server.done


def test_only_server_0_decides_and_leases() -> None:
    network = MemoryNetwork()
    member = Member("server 1", network.endpoint("server 1"), clock=VirtualClock())
    server = Server(1, member)
    plan = make_plan([vector("w", 3), vector("v", 3)], servers=2, chunk_bytes=12)
    content = Configuration.of(plan, {"rank 0": "", "server 0": ""}, {}, 1e9, None).encode()
    network.endpoint(HUB).connect("server 1", "")
    for body, frames in ((Configure(), [content]), (Lease(8, 0), []), (Arrived(0, 0), [])):
        network.endpoint(HUB).send("server 1", body, frames)
        member.pump_once(0.0)
    assert server.shard is not None
    assert member.refused == 2
    assert member.last_refusal == "rank 0: server 1 takes no Arrived under this plan"


@pytest.mark.parametrize(
    "body", [Inquire(), Lease(8, 0), WorkerLeft(0), Fetch(STATE), Commit(0, [])]
)
def test_nothing_but_the_plan_is_taken_before_the_plan(bench: Bench, body: AnyBody) -> None:
    bench.tell(HUB, body)
    kind = type(body).__name__
    assert bench.member.last_refusal == f"rank 0: {kind} before the plan is known"
