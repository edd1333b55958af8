"""A host's channels in one process: sums in rank order, presence, limits, and who is named."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.errors import RuntimeFault, WaitLimit
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.hosts.follower import HostFollower
from slipstream.runtime.hosts.leader import HostLeader, HostSlots
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Settings, Spec, Values

SPECS = (
    Spec("a", (40, 3), "float32", 0),
    Spec("b", (7,), "float64", 1),
    Spec("mean", (5,), "float32", 2, role="buffer"),
)
RANKS = (1, 4, 6)
SHARE = 2.5


class Tensors:
    """One worker's tensors; implements ``Slots``."""

    def __init__(self) -> None:
        self.given: list[np.ndarray[Any, Any] | None] = [None] * len(SPECS)
        self.got = [np.full(spec.numel, np.nan, spec.dtype) for spec in SPECS]
        self.finished: list[int] = []

    def source(self, tensor: int) -> Values | None:
        given = self.given[tensor]
        return None if given is None else Values(given.view(np.uint8), SPECS[tensor].dtype)

    def sink(self, tensor: int) -> Values:
        return Values(self.got[tensor].view(np.uint8), SPECS[tensor].dtype)

    def finish(self, tensor: int) -> None:
        self.finished.append(tensor)


class Network:
    """Stands for the other hosts: adds 1 to what this one contributes; implements ``Channel``."""

    def __init__(self, slots: HostSlots, also: Sequence[int] = ()) -> None:
        self.step, self.wait_s = 0, 0.0
        self.sent: Counter[str] = Counter(dense=8)
        self.received: Counter[str] = Counter()
        self.left: list[int] = []
        self.rounds: list[list[int]] = []  # the tensors of each, if not all
        self._slots, self._also = slots, also

    def ready(self, tensor: int) -> None:
        self.left.append(tensor)

    def skip_round(self, tensors: object) -> None: ...

    def flush(self) -> None:
        wanted = self.rounds.pop(0) if self.rounds else [0, 1, 2]
        assert sorted(self.left) == wanted, "a round is whole before it is flushed"
        if self.rounds:
            self.left.clear()

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        for tensor in tensors if tensors is not None else range(3):
            own = self._slots.source(tensor)
            if own is not None or tensor in self._also:
                kind = SPECS[tensor].dtype
                sink = self._slots.sink(tensor).data.view(kind)
                sink[:] = 1 + (0 if own is None else own.data.view(kind))
                self._slots.finish(tensor)

    def refresh(self) -> None: ...


def settings_with(rate: float) -> Callable[[], Settings]:
    return lambda: [{"lr": rate}]


class Host:
    """Three workers and their channels, in one process."""

    def __init__(
        self,
        also: Sequence[int] = (),
        limit_s: float = 20.0,
        rates: Sequence[float] = (),
        is_whole: Callable[[int], bool] = lambda tensor: True,
    ) -> None:
        settings = [settings_with(rate) for rate in rates or [0.0] * len(RANKS)]
        shared = SharedMemory.create(HostSegment.of(SPECS, len(RANKS)).nbytes)
        self.memory = HostMemory(SPECS, RANKS, shared)
        self.tensors = [Tensors() for _ in RANKS]
        roster = SimpleNamespace(behind=lambda round_: ["rank 0"], round=0)
        self.member = SimpleNamespace(round=0, check=lambda: None, last_refusal="", roster=roster)
        member: Any = self.member
        slots = HostSlots(self.memory, self.tensors[0], SHARE, is_whole=is_whole)
        self.network = Network(slots, also)
        self.leader = HostLeader(slots, [self.network], member, limit_s, settings=settings[0])
        self.followers = [
            HostFollower(w, self.memory, self.tensors[w], member, limit_s, settings=settings[w])
            for w in (1, 2)
        ]

    def close(self) -> None:
        self.memory.close()

    def round(self) -> None:
        """Followers on threads of their own, as slow as the scheduler likes."""

        def follow(channel: HostFollower) -> None:
            channel.ready(1)
            channel.flush()
            channel.wait()

        threads = [threading.Thread(target=follow, args=(one,)) for one in self.followers]
        for thread in threads:
            thread.start()
        self.leader.ready(0)
        self.leader.flush()
        self.leader.wait()
        for thread in threads:
            thread.join()
        self.network.left.clear()


def numbers(seed: int, tensor: int) -> np.ndarray[Any, Any]:
    spec = SPECS[tensor]
    return np.random.default_rng((seed, tensor)).normal(size=spec.numel).astype(spec.dtype)


def test_every_worker_gets_what_became_of_the_hosts_sum_round_after_round() -> None:
    host = Host()
    for round_ in range(5):
        for worker, own in enumerate(host.tensors):
            own.given = [numbers(10 * round_ + worker, t) for t in range(3)]
        host.round()
        for tensor, spec in enumerate(SPECS):
            first, second, third = (numbers(10 * round_ + w, tensor) for w in range(3))
            total = (first + second) + third  # in rank order
            wanted = total / np.asarray(SHARE, spec.dtype) + 1
            for own in host.tensors:
                np.testing.assert_array_equal(own.got[tensor], wanted)
    assert host.member.round == 5
    host.close()


def test_a_sum_that_others_are_added_to_is_divided_by_all_and_rounded_once() -> None:
    spec = Spec("w", (64,), "bfloat16", 0)
    shared = SharedMemory.create(HostSegment.of([spec], 2).nbytes)
    memory, own = HostMemory([spec], (0, 1), shared), Tensors()
    given = [torch.randn(64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2)]
    raw = [values.view(torch.uint8).numpy() for values in given]
    own.source = lambda tensor: Values(raw[0], "bfloat16")  # type: ignore[method-assign]
    memory.place(1, 0).data[:] = raw[1]
    memory.board.publish(1, 0, 0, True)
    slots = HostSlots(memory, own, 5 / 3, {0: 5.0})
    slots.aggregate(0, 0)
    found = slots.source(0)
    assert found is not None
    wanted = ((given[0].float() + given[1].float()) / 5.0).bfloat16()
    assert torch.equal(torch.from_numpy(found.data.copy()).view(torch.bfloat16), wanted)
    twice = ((given[0].float() + given[1].float()) / (5 / 3)).bfloat16() / 3
    assert not torch.equal(twice, wanted)
    memory.close()


def test_after_a_checkpoint_all_workers_of_a_host_count_steps() -> None:
    """Collectives count steps, too; rank 0 takes a worker with a lower count for one that left."""
    host = Host()
    for channel in (host.leader, *host.followers):
        channel.step = 1000
    for own in host.tensors:
        own.given = [numbers(0, t) for t in range(3)]
    host.round()
    assert host.member.round == 1001
    host.member.round = 0
    for follower in host.followers:
        follower.flush()
    assert host.member.round == 1001
    host.close()


def test_a_contribution_is_made_only_when_the_last_result_was_taken() -> None:
    """Nobody waits by itself between these rounds: the sum would overwrite the result."""
    host = Host()
    for round_ in range(2):
        for worker, own in enumerate(host.tensors):
            own.given = [numbers(10 * round_ + worker, t) for t in range(3)]
        if round_ == 0:
            for follower in host.followers:
                follower.flush()
            host.leader.flush()
            host.network.left.clear()
    host.leader.ready(1)  # hands on what came of the round before
    host.followers[0].ready(1)
    total = (numbers(0, 1) + numbers(1, 1)) + numbers(2, 1)
    np.testing.assert_array_equal(host.tensors[1].got[1], total / SHARE + 1)
    np.testing.assert_array_equal(host.tensors[0].got[1], total / SHARE + 1)
    assert np.isnan(host.tensors[1].got[0]).all()
    host.close()


def test_what_nobody_of_any_host_has_does_not_come_back_and_what_one_has_does() -> None:
    host = Host(also=[1])
    host.tensors[2].given[0] = numbers(1, 0)
    host.round()
    for own in host.tensors:
        assert sorted(own.finished) == [0, 1]
        np.testing.assert_array_equal(own.got[0], numbers(1, 0) / np.float32(SHARE) + 1)
        np.testing.assert_array_equal(own.got[1], np.ones(7))
        assert np.isnan(own.got[2]).all()
    host.close()


def test_a_buffer_counts_the_workers_on_which_it_changed() -> None:
    host = Host()
    for worker in (0, 2):
        host.tensors[worker].given = [None, None, numbers(worker, 2)]
    host.round()
    slots = host.leader._slots
    assert [slots.weight(tensor) for tensor in range(3)] == [1, 1, 2]
    total = numbers(0, 2) + numbers(2, 2)
    np.testing.assert_array_equal(host.tensors[1].got[2], total / np.float32(SHARE) + 1)
    host.close()


def test_a_wait_for_workers_of_the_host_names_them() -> None:
    host = Host(limit_s=0.1)
    host.followers[0].flush()
    with pytest.raises(WaitLimit) as late:
        host.leader.flush()
    assert late.value.missing == ("rank 6",)
    assert "this host's gradients of round 0" in str(late.value)
    host.close()


def test_a_wait_for_the_result_names_who_is_behind() -> None:
    host = Host(limit_s=0.1)
    host.followers[0].flush()
    with pytest.raises(WaitLimit) as late:
        host.followers[0].wait()
    assert late.value.missing == ("rank 0",)
    host.close()


def test_a_fault_of_the_job_ends_a_wait() -> None:
    host = Host()

    def check() -> None:
        raise RuntimeFault("rank 9 failed")

    host.member.check = check
    with pytest.raises(RuntimeFault, match="rank 9 failed"):
        host.leader.flush()
    host.close()


def test_workers_of_a_host_must_have_the_same_settings() -> None:
    host = Host(rates=[0.0, 0.0, 0.1])
    for follower in host.followers:
        follower.flush()
    with pytest.raises(RuntimeFault, match="different optimizer settings"):
        host.leader.flush()
    host.close()


def test_a_worker_may_be_a_round_further_with_other_tensors() -> None:
    """As in outer rounds of fragments: its step is then that of each contribution."""
    host = Host()
    for own in host.tensors:
        own.given = [numbers(1, t) for t in range(3)]
    channels = (host.leader, *host.followers)
    for follower in host.followers:
        for step, skipped in ((4, {1, 2}), (6, {0})):
            follower.step = step
            follower.skip_round(skipped)
            follower.flush()
    host.network.rounds = [[0], [1, 2]]
    for step, skipped in ((4, {1, 2}), (6, {0})):
        host.leader.step = step
        host.leader.skip_round(skipped)
        host.leader.flush()
    for channel in channels:
        channel.wait()
    for own in host.tensors:
        for tensor in range(3):
            assert np.isfinite(own.got[tensor]).all()
    host.close()


class Rounds:
    """Hosts may miss rounds: after this one's n-th, round 3n is open; implements
    ``MissedRounds``."""

    told_round = 0

    def open_round(self) -> int:
        return self.told_round


def test_all_workers_of_a_host_are_told_the_same_open_round() -> None:
    host = Host()
    rounds = host.leader._rounds = Rounds()
    channels = (host.leader, *host.followers)
    assert [channel.open_round() for channel in channels] == [0, 0, 0]
    for number in (1, 2):
        for follower in host.followers:
            follower.flush()
            assert follower.told_round == 3 * (number - 1), "the result is not there yet"
        host.leader.flush()
        host.network.left.clear()
        rounds.told_round = 3 * number
        if number == 1:
            assert host.leader.open_round() == 3
        else:
            host.leader.wait([1])  # a result tells it, too
        assert [channel.open_round() for channel in channels] == [3 * number] * 3
        for channel in channels:
            channel.wait()
    host.close()


def test_a_result_is_handed_on_when_all_of_it_is_there() -> None:
    whole: set[int] = set()
    host = Host(is_whole=whole.__contains__)
    slots = host.leader._slots
    for own in host.tensors:
        own.given = [numbers(1, t) for t in range(3)]
    for channel in (*host.followers, host.leader):
        channel.flush()
    slots.finish(0)  # as for the first of its chunks
    assert host.memory.board.result(0, 0) is None
    whole.add(0)
    slots.finish(0)
    assert host.memory.board.result(0, 0)
    host.close()


def test_workers_of_a_host_must_be_at_the_same_step() -> None:
    host = Host()
    host.followers[1].step = 3
    for follower in host.followers:
        follower.flush()
    with pytest.raises(RuntimeFault, match="rank 4 at step 0, rank 6 at step 3; every worker"):
        host.leader.flush()
    host.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_gradient_that_is_completed_twice_is_refused(worker: int) -> None:
    host = Host()
    channel = host.leader if worker == 0 else host.followers[0]
    channel.ready(1)
    with pytest.raises(RuntimeFault, match="'b' was completed twice"):
        channel.ready(1)
    host.close()


def test_bytes_that_leave_are_those_of_the_worker_that_speaks_for_the_host() -> None:
    host = Host()
    assert host.leader.sent == {"dense": 8}
    assert not host.followers[0].sent
    host.close()
