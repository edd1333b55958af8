"""The end of a job: everybody's figures, or a word about who does not come."""

import pytest

from slipstream.errors import RuntimeFault, WaitLimit
from slipstream.runtime.members.member import BEAT_S, HUB, Member
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Final, Leave

NAMES = ("rank 0", "rank 1", "rank 2", "server 0")


class Ending:
    """Three workers and a server at the end of their work."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.closed: list[str] = []  # whose store
        self.clock = VirtualClock()
        self.members = {n: Member(n, network.endpoint(n), clock=self.clock) for n in NAMES}
        for member in self.members.values():
            for name in NAMES:
                member.transport.connect(name, "")
            member.expect(*(NAMES if member.is_hub else [HUB]))
            member.round = 7 if member.name != "server 0" else 0

    def depart(self, name: str, summary: bytes) -> list[bytes]:
        barrier = self.members[name].exit_barrier
        return barrier.leave(summary, 3, 0.0, lambda: self.closed.append(name))

    def talk(self) -> None:
        self.clock.advance(BEAT_S)
        for _ in range(12):
            for member in self.members.values():
                member.pump_once(0.0)


@pytest.fixture
def ending() -> Ending:
    return Ending()


def leave(ending: Ending, name: str) -> None:
    """A worker's own part; nobody has dismissed it yet."""
    with pytest.raises(WaitLimit, match="rank 0 to end the job; missing: rank 0"):
        ending.depart(name, f"figures of {name}".encode())


def test_rank_0_gathers_the_figures_by_rank_and_dismisses_everybody(ending: Ending) -> None:
    for name in ("rank 2", "rank 1"):
        leave(ending, name)
        ending.talk()
    assert ending.depart(HUB, b"own") == [b"figures of rank 1", b"figures of rank 2"]
    ending.talk()
    assert all(ending.members[name].dismissed for name in NAMES[1:])
    assert all(ending.members[name].fault is None for name in NAMES)
    assert ending.members[HUB].refused == 0, "who waits for its dismissal still beats"
    assert ending.depart("rank 1", b"again") == []
    assert ending.closed == [HUB]


def test_who_does_not_come_is_named(ending: Ending) -> None:
    leave(ending, "rank 1")
    ending.talk()
    with pytest.raises(WaitLimit, match=r"all ranks to finish; missing: rank 2$"):
        ending.depart(HUB, b"own")


def test_a_worker_that_trains_on_is_named_at_once(ending: Ending) -> None:
    leave(ending, "rank 1")
    ending.members["rank 2"].round = 8
    ending.talk()
    with pytest.raises(RuntimeFault, match=r"rank 2 still trains, but rank 0 has finished: .*same"):
        ending.depart(HUB, b"own")


def test_a_dismissal_needs_no_figures(ending: Ending) -> None:
    ending.members[HUB].send("server 0", Leave())
    ending.talk()
    assert ending.members["server 0"].dismissed
    assert ending.members["server 0"].exit_barrier.summaries == {}


@pytest.mark.parametrize(("sender", "ends"), [("rank 2", False), ("server 0", False), (HUB, True)])
def test_final_ends_training_only_if_rank_0_sends_it(
    ending: Ending, sender: str, ends: bool
) -> None:
    ending.members[sender].send("rank 1", Final(copied=True))
    ending.talk()
    worker = ending.members["rank 1"]
    assert worker.refused == (not ends)
    if ends:
        assert worker.exit_barrier.finish_training(1, 3, 0.0)
        return
    with pytest.raises(WaitLimit, match="finish training; missing: rank 0"):
        worker.exit_barrier.finish_training(1, 3, 0.0)
