"""The mean of vectors, and how far apart they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runtime.exchange.consensus import MEAN, VECTOR, Consensus, Differences
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.testing.clock import VirtualClock
from slipstream.testing.members import SimulatedMember
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Fetch, Message, State, checksum


@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0, 10))
def test_mean_and_spread_are_what_numpy_says(count: int, seed: int, apart: float) -> None:
    numbers = np.random.default_rng(seed)
    vectors = numbers.normal(3, 1, 40) + apart * numbers.normal(0, 1, (count, 40))
    vectors = vectors.astype(np.float32)
    told = Differences(vectors[0])
    for vector in vectors[1:]:
        told.add(vector)
    mean, spread = told.mean()
    exact = vectors.astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(mean, exact, rtol=1e-5, atol=1e-6)
    distances = ((vectors - exact) ** 2).sum(axis=1)
    assert spread == pytest.approx(np.sqrt(distances.mean()) / np.linalg.norm(exact), rel=1e-4)


def test_equal_vectors_are_not_apart_at_all() -> None:
    vector = np.random.default_rng(1).normal(0, 1, 1000).astype(np.float32)
    told = Differences(vector)
    for _ in range(6):
        told.add(vector.copy())
    mean, spread = told.mean()
    np.testing.assert_array_equal(mean, vector)
    assert spread == 0


class Scene:
    """Rank 0 and two others that say what the test wants, as the first is about to be asked."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        endpoint = self.network.endpoint("rank 0")
        self.member = SimulatedMember(
            "rank 0", self.network, VirtualClock(), move=self.move, waits=lambda: True, trace=[]
        )
        self.others = {name: self.network.endpoint(name) for name in ("rank 1", "rank 2", "rank 7")}
        for name, other in self.others.items():
            other.connect("rank 0", endpoint.address)
            endpoint.connect(name, other.address)
        self.consensus = Consensus(0, 3, Transfer(self.member), numel=4, limit_s=1000.0)
        self.script: list[Callable[[], None]] = []

    def move(self) -> bool:
        """While rank 0 waits: what comes next in the script, and what has arrived."""
        if self.script:
            self.script.pop(0)()
        while (name := self.network.deliver()) is not None:
            if name == "rank 0":
                self.member.take(1)
        return True

    def say(self, name: str, start: int, values: list[float]) -> None:
        piece = np.array(values, np.float32).tobytes()
        body = State(VECTOR, 1, 4 * start, 16, checksum([piece]))
        self.others[name].send("rank 0", body, [piece])


def test_of_one_that_dies_while_it_speaks_nothing_counts() -> None:
    scene = Scene()
    scene.script = [
        lambda: scene.say("rank 1", 0, [99, 99]),
        lambda: scene.member.lost.append("rank 1"),
        lambda: scene.say("rank 2", 0, [7, 7, 7, 7]),
    ]
    mean, spread = scene.consensus.reach(np.ones(4, np.float32))
    assert mean.tolist() == [4, 4, 4, 4]
    assert spread == pytest.approx(3 / 4)


ONES = np.ones(4, np.float32).tobytes()


def reply(frame: bytes, *, number: int = 1, start: int = 0, total: int = 16) -> State:
    return State(VECTOR, number, start, total, checksum([frame]))


@pytest.mark.parametrize(
    ("sender", "body", "frames", "word"),
    [
        ("rank 7", reply(ONES), [ONES], "from rank 7 is not expected"),
        ("rank 2", reply(ONES), [ONES], "from rank 2 is not expected"),
        ("rank 1", reply(ONES, number=2), [ONES], "own weights 2 from rank 1 is not expected"),
        ("rank 1", reply(ONES, start=16), [ONES], "not the next"),
        ("rank 1", reply(ONES * 4), [ONES * 4], "expected 16 in all"),
        ("rank 1", reply(ONES * 4, total=64), [ONES * 4], "expected 16 in all"),
        ("rank 1", reply(ONES * 2), [ONES, ONES], "2 frames"),
        ("rank 1", State(VECTOR, 1, 0, 16, 7), [ONES], "checksum"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    sender: str, body: State, frames: list[bytes], word: str
) -> None:
    scene = Scene()
    refusals = []

    def forge() -> None:
        scene.others[sender].send("rank 0", body, frames)

    def tick() -> None:
        refusals.append(scene.member.last_refusal)
        scene.say("rank 1", 0, [1, 1, 1, 1])

    scene.script = [forge, tick, lambda: scene.say("rank 2", 0, [1, 1, 1, 1])]
    mean, _ = scene.consensus.reach(np.ones(4, np.float32))
    assert word in refusals[0]
    assert mean.tolist() == [1, 1, 1, 1]


def test_worker_answers_rank_0_and_takes_mean_and_spread() -> None:
    network = MemoryNetwork()
    hub = network.endpoint("rank 0")
    said: list[Message] = []
    mean = np.float32([2, 4])

    def move() -> bool:
        """Rank 0 asks for the fifth time, and gets the vector before it sends the mean."""
        while (message := hub.receive(0.0)) is not None:
            said.append(message)
        if not asked:
            asked.append(True)
            hub.send("rank 1", Fetch(VECTOR, 5))
        elif said:
            frame = np.float64([0.5]).tobytes() + mean.tobytes()
            hub.send("rank 1", State(MEAN, 5, 0, 16, checksum([frame])), [frame])
        member.take(1)
        return True

    asked: list[bool] = []
    member = SimulatedMember(
        "rank 1", network, VirtualClock(), move=move, waits=lambda: True, trace=[]
    )
    hub.connect("rank 1", member.transport.address)
    member.transport.connect("rank 0", hub.address)
    consensus = Consensus(1, 2, Transfer(member), numel=2, limit_s=1000.0)
    found, spread = consensus.reach(np.float32([1, 3]))
    assert (found.tolist(), spread) == ([2, 4], 0.5)
    assert said[0].body.number == 5
    assert bytes(said[0].frames[0]) == np.float32([1, 3]).tobytes()


def test_only_rank_0_asks_for_weights() -> None:
    scene = Scene()
    scene.others["rank 1"].send("rank 0", Fetch(VECTOR, 1))
    scene.move()
    assert scene.member.last_refusal == "rank 1: rank 1 asks for weights, expected rank 0"
