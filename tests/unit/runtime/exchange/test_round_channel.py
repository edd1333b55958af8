"""The worker's half of a round, against a server played by hand."""

import msgspec
import numpy as np
import pytest
from samples import make_plan, vector

from slipstream.errors import PeerLost, RuntimeFault, WaitLimit
from slipstream.plan import Plan
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.exchange.send_context import SendContext
from slipstream.runtime.members.member import Member
from slipstream.testing import VirtualClock
from slipstream.testing.members import ByteSlots
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Publish, Push, checksum
from slipstream.types import Buffer, Settings, rank_of

# Chunks of 1024 elements, in backward order: c with the end of b, the rest of b and a, the rest.
SPECS = [vector("a", 1500, order=0), vector("b", 600, order=1), vector("c", 700, order=2)]


class Recorder(ByteSlots):
    """Writes down which tensors were settled."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.specs)
        self.settled: list[int] = []

    def finish(self, tensor: int) -> None:
        super().finish(tensor)
        self.settled.append(tensor)


class Desk:
    """Rank 0 of two workers, and the hand that plays the others."""

    def __init__(
        self,
        *,
        servers: int = 1,
        colocated: tuple[str, ...] = (),
        settings: Settings | None = None,
    ) -> None:
        self.plan = make_plan(SPECS, workers=2, servers=servers, chunk_bytes=4096)
        self.network = MemoryNetwork()
        transport = self.network.endpoint("rank 0")
        self.member = Member("rank 0", transport, silence_s=1e9, clock=VirtualClock())
        self.slots = Recorder(self.plan)
        self.exchange = RoundChannel(
            0,
            self.plan,
            self.member,
            self.slots,
            colocated=colocated,
            context=SendContext(settings=None if settings is None else lambda: settings),
            limit_s=0.0,
        )
        for name in ("rank 1", "server 0"):
            transport.connect(name, "")
            self.network.endpoint(name).connect("rank 0", "")

    def begin(self, **numbers: float) -> None:
        """This worker's contributions: a number for every element, by tensor's name."""
        self.slots.begin(
            [
                np.full(spec.numel, numbers[spec.name], np.float32).tobytes()
                if spec.name in numbers
                else None
                for spec in SPECS
            ]
        )

    def pushed(self, name: str = "server 0") -> list[Push]:
        """What has come to somebody since last asked."""
        bodies = []
        while (message := self.network.endpoint(name).receive(0.0)) is not None:
            if isinstance(message.body, Push):
                bodies.append(message.body)
        return bodies

    def publish(self, body: Publish, frames: list[Buffer], sender: str = "server 0") -> None:
        self.network.endpoint(sender).send("rank 0", body, frames)
        self.member.pump_once(0.0)

    def result(self, chunk: int, number: float, round_: int = 0) -> tuple[Publish, list[Buffer]]:
        """A result in which every element is the same number."""
        segments = self.plan.chunks[chunk].segments
        frames: list[Buffer] = [
            np.full(s.numel, number, np.float32).view(np.uint8) for s in segments
        ]
        return Publish(chunk, 0, round_, [1] * len(frames), checksum(frames)), frames

    def held(self, tensor: int) -> set[float]:
        return set(self.slots.sink(tensor).data.view(np.float32).tolist())


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    tensors = [[SPECS[s.tensor].name for s in c.segments] for c in desk.plan.chunks]
    assert tensors == [["c", "b"], ["b", "a"], ["a"]]
    return desk


def test_a_chunk_leaves_when_its_last_tensor_is_ready(desk: Desk) -> None:
    desk.begin(a=1, b=2, c=3)
    desk.exchange.ready(2)
    assert desk.pushed() == []
    desk.exchange.ready(1)
    assert [body.unit for body in desk.pushed()] == [0]
    desk.exchange.ready(0)
    assert [body.unit for body in desk.pushed()] == [1, 2]
    desk.exchange.flush()
    assert desk.pushed() == []


def test_what_was_never_ready_leaves_at_the_flush_and_absent_is_marked(desk: Desk) -> None:
    desk.begin(b=2)
    desk.exchange.step = 17
    desk.exchange.ready(1)
    desk.exchange.flush()
    bodies = {body.unit: body for body in desk.pushed()}
    assert {unit: body.counts for unit, body in bodies.items()} == {
        0: [0, 1],
        1: [1, 0],
        2: [0],
    }
    assert {(body.round, body.step) for body in bodies.values()} == {(0, 17)}
    assert desk.member.round == 1


def test_settings_travel_with_every_push() -> None:
    desk = Desk(settings=[{"lr": 0.25}])
    desk.begin(a=1)
    desk.exchange.flush()
    assert [body.settings for body in desk.pushed()] == [[{"lr": 0.25}]] * 3


def test_a_gradient_completed_twice_is_named(desk: Desk) -> None:
    desk.begin(a=1, b=2, c=3)
    desk.exchange.ready(2)
    with pytest.raises(RuntimeFault, match=r"'c' was completed twice .*use_reentrant=False"):
        desk.exchange.ready(2)


def test_results_are_written_while_waiting_and_settled_when_whole(desk: Desk) -> None:
    desk.begin(a=1, b=2, c=3)
    desk.exchange.flush()
    desk.pushed()
    desk.publish(*desk.result(0, 10))
    assert desk.slots.settled == [], "written by whoever waits, not by whoever receives"
    desk.exchange.wait([2])
    assert desk.slots.settled == [2]
    assert desk.held(2) == {10}
    with pytest.raises(WaitLimit, match="the results of round 1"):
        desk.exchange.wait([1])
    desk.publish(*desk.result(1, 20))
    desk.publish(*desk.result(2, 30))
    desk.exchange.wait()
    assert desk.slots.settled[0] == 2
    assert sorted(desk.slots.settled) == [0, 1, 2]
    assert desk.held(1) == {10, 20}, "b lies in two chunks"
    assert desk.held(0) == {20, 30}


def test_waiting_for_nothing_outstanding_returns(desk: Desk) -> None:
    desk.exchange.wait()
    desk.exchange.wait([0])


def test_what_nobody_contributed_to_is_left_alone(desk: Desk) -> None:
    desk.begin(b=2)
    desk.exchange.flush()
    desk.pushed()
    number = np.full(600, 5, np.float32).view(np.uint8)
    split = 4 * desk.plan.chunks[0].segments[1].numel
    desk.publish(Publish(0, 0, 0, [0, 1], checksum([number[:split]])), [number[:split]])
    desk.publish(Publish(1, 0, 0, [1, 0], checksum([number[split:]])), [number[split:]])
    desk.publish(Publish(2, 0, 0, [0], checksum([])), [])
    desk.exchange.wait()
    assert desk.slots.settled == [1]
    assert desk.held(1) == {5}


def test_a_round_begins_only_when_the_one_before_is_written(desk: Desk) -> None:
    desk.begin(a=1, b=2, c=3)
    desk.exchange.flush()
    desk.pushed()
    desk.exchange.ready(2)
    with pytest.raises(WaitLimit):
        desk.exchange.ready(1)
    assert desk.pushed() == []


def test_rounds_follow_each_other(desk: Desk) -> None:
    for round_ in range(3):
        desk.begin(a=1, b=2, c=3)
        desk.exchange.flush()
        assert {body.round for body in desk.pushed()} == {round_}
        for chunk in range(3):
            desk.publish(*desk.result(chunk, 10 * round_, round_))
        desk.exchange.wait()
        assert desk.held(0) == {10 * round_}
    assert desk.member.refused == 0


TROUBLE = [
    "unknown unit",
    "unknown part",
    "from another worker",
    "from a stranger",
    "round to come",
    "no such mark",
    "frame missing",
    "frame too short",
    "checksum",
]


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_result_that_does_not_fit_is_refused_and_the_right_one_counts(
    desk: Desk, trouble: str
) -> None:
    desk.begin(a=1, b=2, c=3)
    desk.exchange.flush()
    desk.pushed()
    body, frames = desk.result(0, 10)
    wrong, wrong_frames, sender = body, frames, "server 0"

    def changed(**fields: object) -> Publish:
        return msgspec.structs.replace(body, **fields)

    if trouble == "unknown unit":
        wrong = changed(unit=9)
    elif trouble == "unknown part":
        wrong = changed(part=1)
    elif trouble == "from another worker":
        sender = "rank 1"
    elif trouble == "from a stranger":
        sender = "stranger"
        desk.network.endpoint("stranger").connect("rank 0", "")
    elif trouble == "round to come":
        wrong = changed(round=1)
    elif trouble == "no such mark":
        wrong = changed(counts=[1, 1, 1])
    elif trouble == "frame missing":
        wrong_frames = frames[:1]
    elif trouble == "frame too short":
        wrong_frames = [frames[0][:-4], frames[1]]
        wrong = changed(crc=checksum(wrong_frames))
    elif trouble == "checksum":
        wrong = changed(crc=body.crc ^ 1)
    desk.publish(wrong, wrong_frames, sender)
    assert desk.member.refused == 1
    with pytest.raises(WaitLimit):
        desk.exchange.wait([2])
    desk.publish(body, frames)
    desk.exchange.wait([2])
    assert desk.held(2) == {10}
    assert desk.exchange.received == {"dense/sharded": sum(memoryview(f).nbytes for f in frames)}


def test_a_result_comes_once_and_after_the_contribution(desk: Desk) -> None:
    desk.publish(*desk.result(0, 10))
    assert desk.member.refused == 1, "nothing has been contributed yet"
    desk.begin(a=1, b=2, c=3)
    desk.exchange.flush()
    desk.pushed()
    desk.publish(*desk.result(0, 10))
    desk.publish(*desk.result(0, 11))
    assert desk.member.refused == 2
    desk.exchange.wait([2])
    desk.publish(*desk.result(0, 12))
    assert desk.member.refused == 3
    assert desk.held(2) == {10}


def test_a_fault_of_the_job_ends_a_wait(desk: Desk) -> None:
    desk.begin(a=1)
    desk.exchange.flush()
    desk.member.fail(PeerLost("server 0", 6.0))
    with pytest.raises(PeerLost):
        desk.exchange.wait()


def test_payload_is_counted_unless_it_stays_beside_this_worker() -> None:
    for beside, counted in (((), 2800 * 4), (("server 0",), 0)):
        desk = Desk(colocated=beside)
        desk.begin(a=1, b=2, c=3)
        desk.exchange.flush()
        assert desk.exchange.sent["dense/sharded"] == counted


# ---- a mesh: this worker holds everything itself


def test_on_a_mesh_a_result_waits_until_the_contribution_has_left() -> None:
    """The result is written over the memory that a slow peer has yet to be sent."""
    desk = Desk(servers=0)
    desk.begin(a=1, b=1, c=1)
    desk.exchange.flush()
    for chunk in desk.plan.chunks:
        frames: list[Buffer] = [
            np.full(s.numel, 3, np.float32).view(np.uint8) for s in chunk.segments
        ]
        body = Push(chunk.index, 0, 0, [1] * len(frames), checksum(frames))
        desk.network.post("rank 1", "rank 0", encoded(body), frames, -1)
    arrive_first(desk)
    with pytest.raises(WaitLimit, match="a contribution to leave"):
        desk.exchange.wait()
    assert desk.held(0) == {1}, "still what has to leave"


def encoded(body: Push) -> bytes:
    from slipstream.transports.wire import encode_header

    return encode_header("rank 1", body)


def arrive_first(desk: Desk) -> None:
    """All that is under way to rank 0 arrives, nothing of what it sends leaves."""
    links = desk.network._links
    kept = links.pop(("rank 0", "rank 1"))
    for _ in range(2 * len(desk.plan.chunks)):
        desk.member.pump_once(0.0)
    links["rank 0", "rank 1"] = kept


def test_names_of_workers_are_told_from_others() -> None:
    assert [rank_of(f"rank {i}") for i in (0, 7, 123)] == [0, 7, 123]
    for name in ("server 0", "rank", "rank ", "rank -1", "rank x", "rank 1 ", "", "rank ²"):
        assert rank_of(name) == -1
    assert rank_of("rank 9999999999999") == -1
