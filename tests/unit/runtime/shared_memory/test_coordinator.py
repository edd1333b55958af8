"""What the launcher does for learners that share memory, without any process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.errors import LaunchError
from slipstream.planning.segment import SharedTensor
from slipstream.runtime.shared_memory.coordinator import SharedMemoryCoordinator
from slipstream.runtime.shared_memory.messages import (
    Account,
    AccountReply,
    Ask,
    Awaited,
    Begin,
    Body,
    Departing,
    Done,
    Farewell,
    Filled,
    Final,
    Finish,
    Finished,
    Hello,
    Keep,
    Kept,
    Lease,
    Leased,
    Load,
    Networked,
    Note,
    Ready,
    Refused,
    Restore,
    Save,
    Share,
    Shared,
    Start,
    Trained,
    Welcome,
)

TENSORS = [SharedTensor("w", (10,), "float32", 4, 0)]


def hello(
    config_fingerprint: str = "a model", updates: str = "server", checkpoints: str | None = None
) -> Hello:
    settings = [[0.1] + [0.0] * 7]
    return Hello(
        [config_fingerprint], TENSORS, "SGD", settings, updates, 2, False, checkpoints, 30.0
    )


class Bench:
    """A coordinator whose messages are kept."""

    def __init__(
        self, learners: int = 2, updates: str = "server", checkpoints: str | None = None
    ) -> None:
        self.now, self._updates, self._checkpoints = 0.0, updates, checkpoints
        self.to_server: list[Body] = []
        self.said: list[str] = []
        self.failed: list[str] = []
        self.killed: list[int] = []
        self.servers = self.ended = 0
        self.shop = SharedMemoryCoordinator(
            learners,
            self._start,
            self._end,
            self.killed.append,
            self._directory_for,
            self.said.append,
            self.failed.append,
            clock=lambda: self.now,
        )
        self.to: dict[int, list[Body]] = {}
        for rank in range(learners):
            self.seat(rank)

    def _start(self) -> Any:
        self.servers += 1
        return lambda body, descriptor=None: self.to_server.append(body)

    def _end(self) -> None:
        self.ended += 1

    def _directory_for(self, asked: str | None) -> Path:
        if asked == "/taken":
            raise LaunchError("another job keeps its checkpoints in /taken")
        return Path(asked or "/nowhere")

    def seat(self, rank: int) -> None:
        heard: list[Body] = []
        self.to[rank] = heard
        self.shop.add_learner(rank, lambda body, descriptor=None: heard.append(body))

    def begun(self) -> Bench:
        """All learners are in."""
        for rank in self.to:
            self.shop.on_message(rank, hello(updates=self._updates, checkpoints=self._checkpoints))
        self.shop.on_server_message(Ready(False, 0, []))
        self.shop.on_message(0, Filled())
        self.kept()
        self.clear()
        return self

    def kept(self, trouble: str = "") -> None:
        """The server answers the last request."""
        request = next(
            body for body in reversed(self.to_server) if isinstance(body, Keep | Restore)
        )
        self.shop.on_server_message(Kept(trouble, request.number))

    def clear(self) -> None:
        self.to_server.clear()
        for heard in self.to.values():
            heard.clear()

    def push(self, rank: int, number: int = 1) -> None:
        assert self.shop.rings is not None
        for _ in range(number):
            assert self.shop.rings.reserve(rank, 0.0) is not None
            self.shop.rings.publish(rank)
            self.shop.rings.release(rank)
            self.shop.rings.advance()

    def kinds(self, rank: int) -> list[type]:
        return [type(body) for body in self.to[rank]]


# ---- the beginning


def test_the_first_ones_weights_are_everybodys() -> None:
    bench = Bench()
    bench.shop.on_message(1, hello())
    assert isinstance(bench.to_server[0], Start)
    bench.shop.on_message(0, hello())
    assert bench.servers == 1
    assert bench.to == {0: [], 1: []}  # nobody begins before the server is there
    bench.shop.on_server_message(Ready(False, 0, []))
    filler = 0 if bench.to[0] else 1
    assert bench.kinds(filler) == [Welcome]
    assert bench.to[1 - filler] == []
    bench.shop.on_message(filler, Filled())
    assert bench.to_server[1:] == [Keep(1)]
    bench.kept()
    assert bench.kinds(filler) == [Welcome, Begin]
    assert bench.kinds(1 - filler) == [Welcome, Begin]
    fills = [
        body.fill for heard in bench.to.values() for body in heard if isinstance(body, Welcome)
    ]
    assert sorted(fills) == [False, True]


def test_if_the_first_dies_another_fills() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.shop.on_message(rank, hello())
    bench.shop.on_server_message(Ready(False, 0, []))
    bench.shop.remove_learner(0)
    assert bench.kinds(1) == [Welcome]
    assert isinstance(bench.to[1][0], Welcome)
    assert bench.to[1][0].fill


def test_a_checkpoint_needs_nobody_to_fill() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.shop.on_message(rank, hello())
    bench.shop.on_server_message(Ready(True, 70, ["that one is damaged"]))
    assert bench.kinds(0) == bench.kinds(1) == [Welcome, Begin]
    assert bench.said == [
        "that one is damaged; the one before is taken",
        "goes on from a checkpoint of 70 updates",
    ]


def test_another_model_is_refused() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello())
    bench.shop.on_message(1, hello("another model"))
    assert bench.kinds(1) == [Refused]
    assert bench.said == ["rank 1 differs from rank 0: it has another model; rank 0 has a model"]


def test_a_directory_of_another_job_is_refused_before_anything_starts() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.shop.on_message(rank, hello(checkpoints="/taken"))
    bench.shop.tick()
    assert bench.failed == ["another job keeps its checkpoints in /taken"]
    assert (bench.servers, bench.to, bench.shop.memory) == (0, {0: [], 1: []}, None)


def test_the_server_gets_the_directory_that_the_learners_name() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello(checkpoints="/kept"))
    (start,) = bench.to_server
    assert isinstance(start, Start)
    assert start.checkpoints == "/kept"


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_job_of_fewer_learners_than_were_asked_for_is_none(joins_first: bool) -> None:
    bench = Bench()
    if joins_first:
        bench.shop.on_message(0, hello())
    bench.shop.remove_learner(1)
    bench.shop.never_joined(1)
    assert bool(bench.failed) == joins_first  # else the script may have nothing to do with it
    if not joins_first:
        bench.shop.on_message(0, hello())
    assert bench.failed == ["rank 1 exited with code 0 without joining the job (slipstream.init)"]
    assert bench.servers == int(joins_first)


@pytest.mark.parametrize("hello_first", [True, False])
def test_workers_of_two_strategies_are_refused_once(hello_first: bool) -> None:
    bench = Bench(learners=3)
    if hello_first:
        bench.shop.on_message(0, hello())
    bench.shop.on_message(1, Networked("asks for push_pull"))
    if not hello_first:
        bench.shop.on_message(0, hello())
    bench.shop.on_message(2, Networked("asks for push_pull"))
    who = "another rank" if hello_first else "rank 0"
    assert bench.failed == [
        f"rank 1 asks for push_pull, but {who} asks for learners that share memory: every rank "
        "must name the same strategy in job.distribute, before it shares anything"
    ]
    assert Refused in bench.kinds(1 if hello_first else 0)
    assert bench.servers == int(hello_first)


def test_workers_that_are_no_learners_get_no_memory() -> None:
    bench = Bench()
    for rank in range(2):
        bench.shop.on_message(rank, Networked("asks for push_pull"))
    bench.shop.tick()
    for rank in range(2):
        bench.shop.remove_learner(rank)
    assert (bench.failed, bench.said, bench.servers) == ([], [], 0)
    assert bench.shop.memory is None
    assert not bench.shop.finishing


def test_it_is_known_who_has_joined() -> None:
    bench = Bench()
    assert bench.shop.joined == set()
    bench.shop.on_message(1, hello())
    assert bench.shop.joined == {1}
    other = Bench()
    other.shop.on_message(0, Networked("asks for push_pull"))
    assert other.shop.joined == {0}


def test_learners_that_have_finished_do_not_begin_again() -> None:
    bench = Bench().begun()
    for rank in range(2):
        bench.shop.on_message(rank, Trained())
    bench.shop.tick()
    assert bench.shop.finishing
    bench.clear()
    bench.shop.on_message(0, hello())
    (refused,) = bench.to[0]
    assert isinstance(refused, Refused)
    assert "start another job with another `slipstream run`" in refused.trouble


def test_one_that_is_started_again_goes_on() -> None:
    bench = Bench().begun()
    bench.shop.remove_learner(1)
    bench.seat(1)
    bench.shop.on_message(1, hello())
    assert bench.kinds(1) == [Welcome, Begin]


# ---- on the way


def test_what_the_first_says_all_hear() -> None:
    bench = Bench().begun()
    bench.shop.on_message(1, Share("share/1", "one"))
    bench.shop.on_message(0, Share("share/1", "nought"))
    bench.shop.on_message(0, Share("share/2", None))
    assert bench.to == {0: [Shared("one"), Shared(None)], 1: [Shared("one")]}


def test_the_server_answers_whoever_asked() -> None:
    bench = Bench().begun()
    bench.shop.on_message(1, Ask())
    bench.shop.on_message(0, Save("there"))
    assert bench.to_server == [Ask(2), Keep(3, "there")]
    bench.shop.on_server_message(Note("by the way"))
    bench.shop.on_server_message(Kept("no room", 3))
    bench.shop.on_server_message(AccountReply(2, Account({0: 3})))
    assert bench.to == {0: [Done("no room")], 1: [Account({0: 3})]}
    assert bench.said[-1] == "by the way"


def test_a_file_is_loaded_once_and_all_wait_for_it() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Load("there"))
    bench.shop.on_message(1, Load("there"))
    assert bench.to_server == [Restore(2, "there")]
    assert bench.to == {0: [], 1: []}
    bench.kept()
    assert bench.to == {0: [Done()], 1: [Done()]}
    bench.push(0)
    bench.shop.remove_learner(1)
    bench.seat(1)
    bench.shop.on_message(1, Load("there"))
    assert bench.to[1] == [Done()]
    assert bench.to_server == [Restore(2, "there")]


# ---- batches


def dealt(bench: Bench, rank: int) -> list[tuple[int, int]]:
    bench.to[rank].clear()
    bench.shop.on_message(rank, Lease(6, 2, 0))
    (body,) = bench.to[rank]
    assert isinstance(body, Leased)
    return list(body.batches)


def test_batches_of_the_dead_are_dealt_again() -> None:
    bench = Bench().begun()
    assert dealt(bench, 0) == [(0, 0), (0, 1)]
    assert dealt(bench, 1) == [(0, 2), (0, 3)]
    bench.push(1)
    bench.shop.remove_learner(1)
    assert dealt(bench, 0) == [(0, 3), (0, 4)]
    bench.seat(1)
    assert dealt(bench, 1) == [(0, 5), (1, 0)]


def test_batches_of_lost_updates_are_dealt_again() -> None:
    bench = Bench().begun()
    assert dealt(bench, 0) == [(0, 0), (0, 1)]
    assert dealt(bench, 1) == [(0, 2), (0, 3)]
    bench.push(0, 2)
    bench.push(1)
    assert dealt(bench, 0) == [(0, 4), (0, 5)]
    bench.push(0)
    bench.shop.server_ended(-9)
    # In the checkpoint there are one gradient of the first learner and none of the other; and the
    # first one pushes another when the server has cleared the way, before it says so.
    assert bench.shop.rings is not None
    let_go = [bench.shop.rings.pushed(rank) for rank in (0, 1)]
    bench.push(0)
    bench.shop.on_server_message(Ready(True, 1, [], taken=[1, 0], let_go=let_go))
    assert bench.said[-1] == "training goes on from update 1, the last checkpoint"
    assert dealt(bench, 1) == [(0, 1), (0, 2)]
    assert dealt(bench, 1) == [(0, 4), (1, 0)]


def test_a_learner_that_updates_itself_may_die_with_its_slot() -> None:
    bench = Bench(updates="direct").begun()
    rings = bench.shop.rings
    assert rings is not None
    assert rings.reserve(1, 0.0) is not None
    rings.publish(1)
    bench.shop.remove_learner(1)
    assert rings.taken(1) == rings.pushed(1) == 1
    bench.seat(1)
    for _ in range(2):  # both slots
        assert rings.reserve(1, 0.0) is not None
        rings.publish(1)


def test_a_server_that_hangs_at_the_end_is_ended_after_long() -> None:
    bench = Bench().begun()
    rings = bench.shop.rings
    assert rings is not None
    for rank in (0, 1):
        bench.shop.on_message(rank, Trained())
    for now in (0.0, 20.0, 90.0):  # it writes
        bench.now = now
        rings.beat_once()
        bench.shop.tick()
    bench.now = 200.0
    bench.shop.tick()
    assert bench.ended == 0
    bench.now = 211.0
    bench.shop.tick()
    assert bench.ended == 1
    assert bench.said[-1] == "the server has done nothing for 120 s, and is ended"


def test_another_data_set_is_refused() -> None:
    bench = Bench().begun()
    dealt(bench, 0)
    bench.shop.on_message(1, Lease(7, 2, 0))
    assert bench.kinds(1) == [Refused]


# ---- servers die


def test_a_dead_server_is_replaced_and_asked_again() -> None:
    bench = Bench().begun()
    bench.push(0, 2)
    bench.shop.on_message(0, Save("there"))
    bench.shop.server_ended(-9)
    assert bench.servers == 2
    assert isinstance(bench.to_server[-1], Start)
    bench.shop.on_message(1, Ask())
    bench.shop.on_server_message(Ready(True, 0, []))
    assert bench.to_server[-2:] == [Keep(2, "there"), Ask(3)]
    bench.kept()
    bench.shop.on_server_message(AccountReply(3, Account({})))
    assert bench.to == {0: [Done()], 1: [Account({})]}


@pytest.mark.parametrize("updates", ["server", "direct"])
def test_weights_that_a_dead_server_was_changing_are_its_successors(updates: str) -> None:
    bench = Bench(updates=updates).begun()
    rings = bench.shop.rings
    assert rings is not None
    assert rings.begin_writing(2, 0.0)
    bench.shop.server_ended(-9)
    # Direct updates are the learners' own, and go on.
    assert rings.begin_reading(0, 0.01) == (updates == "direct")


def test_servers_that_get_nowhere_end_the_job() -> None:
    bench = Bench().begun()
    rings = bench.shop.rings
    assert rings is not None
    # Each lost more than it made, and yet got somewhere.
    for version in (2000, 1800, 1500, 1200, 1100):
        rings.version = version
        bench.shop.server_ended(-9)
        rings.version = 1000
        bench.shop.on_server_message(Ready(True, 1000, []))
    for _ in range(2):
        bench.shop.server_ended(-9)
        bench.shop.on_server_message(Ready(True, 1000, []))
    assert bench.failed == []
    bench.shop.server_ended(-9)
    assert bench.failed == ["4 servers died one after the other without an update"]


def test_without_any_checkpoint_nobody_goes_on() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello())
    bench.shop.on_server_message(Ready(False, 0, []))
    bench.shop.on_message(0, Filled())
    bench.kept("the disk is full")
    bench.shop.server_ended(-9)
    bench.shop.on_server_message(Ready(False, 0, []))
    assert bench.failed == ["the server died before it could keep a checkpoint"]
    assert bench.ended == 1  # else it would train on, and keep what it has


def test_a_server_that_cannot_begin_ends_the_job() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello())
    bench.shop.server_ended(1)
    assert bench.failed == ["the server exited with code 1; what it wrote above says why"]


def test_an_error_of_the_server_is_not_tried_again() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Load("damaged"))
    bench.shop.server_ended(1)
    assert bench.failed == ["the server exited with code 1; what it wrote above says why"]
    assert bench.servers == 1


@pytest.mark.parametrize("pushes", [False, True])
def test_a_server_that_does_nothing_is_ended(pushes: bool) -> None:
    bench = Bench().begun()
    rings = bench.shop.rings
    assert rings is not None
    for _ in range(20):
        rings.next(0, 0.0)  # it is well
        bench.now += 1.0
        bench.shop.tick()
    assert bench.ended == 0
    if pushes:
        rings.reserve(0, 0.0)
        rings.publish(0)
    for _ in range(7):
        if pushes:
            rings.rest(0.0)  # it looks well, but takes nothing
        bench.now += 1.0
        bench.shop.tick()
    assert bench.ended == 1
    assert "the server has done nothing for 5 s, and is ended" in bench.said
    assert bench.killed == []


def test_a_learner_that_holds_the_weights_is_ended_and_not_the_server() -> None:
    bench = Bench().begun()
    rings = bench.shop.rings
    assert rings is not None
    assert rings.begin_reading(1, 0.0)
    rings.reserve(0, 0.0)
    rings.publish(0)
    for _ in range(7):
        rings.rest(0.0)
        bench.now += 1.0
        bench.shop.tick()
    assert (bench.killed, bench.ended) == ([1], 0)
    bench.shop.remove_learner(1)
    assert not rings.reading(1)


def test_a_server_that_is_never_ready_is_ended() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello())
    bench.now += 119.0
    bench.shop.tick()
    assert bench.ended == 0
    bench.now += 2.0
    bench.shop.tick()
    assert bench.ended == 1
    assert bench.failed == [
        "the server was not ready after 120 s; can the checkpoints in /nowhere be read?"
    ]


def test_a_server_that_loads_may_take_its_time() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Load("there"))
    for _ in range(20):
        bench.now += 1.0
        bench.shop.tick()
    assert bench.ended == 0


def test_a_server_of_direct_updates_takes_the_weights_as_they_are() -> None:
    bench = Bench()
    told = msgspec.structs.replace(hello(), updates="direct")
    bench.shop.on_message(0, told)
    bench.shop.on_server_message(Ready(False, 0, []))
    bench.shop.on_message(0, Filled())
    bench.kept()
    assert isinstance(bench.to_server[0], Start)
    assert not bench.to_server[0].as_they_are
    bench.shop.server_ended(-9)
    assert isinstance(bench.to_server[-1], Start)
    assert bench.to_server[-1].as_they_are
    bench.shop.on_server_message(Ready(False, 5, []))
    assert bench.failed == []


# ---- answers for the dead


def test_a_new_life_does_not_hear_what_the_old_one_asked() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Save("there"))
    bench.shop.on_message(0, Ask())
    bench.shop.on_message(1, Load("file"))
    for rank in (0, 1):
        bench.shop.remove_learner(rank)
        bench.seat(rank)
    bench.shop.on_server_message(Kept("", 2))
    bench.shop.on_server_message(AccountReply(3, Account({})))
    bench.shop.on_server_message(Kept("", 4))
    assert bench.to == {0: [], 1: []}


def test_weights_half_filled_by_the_dead_are_filled_again() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.shop.on_message(rank, hello())
    bench.shop.on_server_message(Ready(False, 0, []))
    bench.shop.on_message(0, Filled())
    bench.shop.remove_learner(0)
    assert isinstance(bench.to[1][-1], Welcome)
    assert bench.to[1][-1].fill
    bench.shop.on_server_message(Kept("", 1))  # of what the dead one had filled
    assert bench.kinds(1) == [Welcome]
    bench.shop.on_message(1, Filled())
    bench.kept()
    assert bench.kinds(1) == [Welcome, Begin]


def test_the_first_begins_though_the_server_died_as_it_kept_its_weights() -> None:
    bench = Bench()
    bench.shop.on_message(0, hello())
    bench.shop.on_server_message(Ready(False, 0, []))
    bench.shop.on_message(0, Filled())
    bench.shop.server_ended(-9)
    bench.shop.on_server_message(Ready(True, 0, []))
    bench.kept()
    assert bench.kinds(0) == [Welcome, Begin]


# ---- the end


def test_all_leave_together_and_one_has_the_figures() -> None:
    bench = Bench().begun()
    bench.shop.on_message(1, Trained())
    bench.shop.tick()
    assert bench.to_server == []
    assert bench.to == {0: [], 1: [Awaited([0])]}
    bench.shop.on_message(0, Trained())
    bench.shop.tick()
    assert bench.to_server == [Finish()]
    bench.clear()
    bench.shop.on_server_message(Finished(Account({1: 1}, 0, 4)))
    bench.shop.tick()
    assert bench.to == {0: [Final()], 1: [Final()]}  # they take the last weights
    bench.clear()
    bench.shop.on_message(1, Departing(b"one", {2: 5}))
    bench.shop.tick()
    assert bench.to == {0: [], 1: [Awaited([0])]}
    bench.clear()
    bench.shop.on_message(0, Departing(b"nought", {}))
    bench.shop.tick()
    whole = Account({1: 1, 2: 5}, 0, 4)
    last = {0: [Farewell([b"nought", b"one"], whole, 0)], 1: [Farewell([])]}
    assert bench.to == last
    bench.shop.remove_learner(0)
    bench.shop.tick()
    assert bench.to == last


def test_the_end_waits_for_one_that_is_started_again() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Trained())
    bench.shop.on_message(1, Trained())
    bench.shop.remove_learner(1)
    bench.seat(1)
    bench.shop.tick()
    assert bench.to_server == []
    assert bench.to[0] == [Awaited([1])]
    bench.shop.on_message(1, hello())
    bench.shop.on_message(1, Trained())
    bench.shop.tick()
    assert bench.to_server == [Finish()]


def test_the_end_does_not_wait_for_one_that_is_left_out() -> None:
    bench = Bench().begun()
    bench.shop.on_message(0, Trained())
    bench.shop.remove_learner(1)
    bench.shop.tick()
    assert bench.to_server == [Finish()]


def test_the_end_does_not_wait_for_figures_of_one_that_is_killed() -> None:
    bench = Bench().begun()
    for rank in (0, 1):
        bench.shop.on_message(rank, Trained())
    bench.shop.tick()
    bench.shop.on_server_message(Finished(Account({})))
    bench.shop.on_message(1, Departing(b"one", {}))
    bench.shop.tick()
    assert bench.kinds(1)[-1] is Awaited
    bench.shop.remove_learner(0)
    bench.shop.tick()
    assert bench.to[1][-1] == Farewell([b"one"], Account({}), 0)


def test_a_server_that_dies_at_the_end_is_replaced_too() -> None:
    bench = Bench().begun()
    for rank in (0, 1):
        bench.shop.on_message(rank, Trained())
    bench.shop.tick()
    bench.shop.server_ended(-9)
    bench.shop.on_server_message(Ready(True, 0, []))
    assert bench.to_server[-1] == Finish()
    bench.shop.on_server_message(Finished(Account({})))
    assert bench.kinds(0)[-1] is Final
    bench.shop.server_ended(0)
    assert bench.servers == 2


@pytest.mark.parametrize("checkpoints", [None, "/kept"])
def test_a_last_checkpoint_that_is_missing_counts_where_it_would_stay(
    checkpoints: str | None,
) -> None:
    bench = Bench(checkpoints=checkpoints).begun()
    for rank in (0, 1):
        bench.shop.on_message(rank, Trained())
    bench.shop.tick()
    bench.shop.on_server_message(Finished(Account({}), "the disk is full; there is no checkpoint"))
    assert bench.kinds(0)[-1] is bench.kinds(1)[-1] is Final  # what they do next is their own
    assert bench.shop.lacks_checkpoint == (checkpoints is not None)
    assert ("the disk is full; there is no checkpoint" in bench.said) == (checkpoints is not None)
