"""Rounds of the first N, by real processes: who makes them, who is missed, and how it ends."""

from __future__ import annotations

import os
import signal
import statistics
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from backup_parts import (
    Part,
    Told,
    assert_equal_at_the_end,
    flawless,
    made_and_dropped,
    makers_of,
    outcome,
    see_out,
    start,
)
from backup_worker import LEASED, SAMPLES, counter
from fork_server import ForkServer, Run
from launches import LIMIT_S, until

from slipstream.torch.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.process

EPOCHS = 3
HALF, END = 20, 40
PARAMETERS = [name for name, _ in counter().named_parameters()]

FIRST = Part(
    "the first three", "backup_workers(first=3, chunk_bytes=3072)",
    servers=3, total=500, jitter_s=0.003, within=10,
)  # fmt: skip
SLOW = Part(
    "one slow", "backup_workers(backup=1, chunk_bytes=2048)",
    total=120, pause_s=(0.002,) * 4, behind=(0, 0, 5, 0), within=20, stats=True,
)  # fmt: skip
OWN = Part(
    "loops of their own", "backup_workers(first=2, chunk_bytes=1024)", "by_own_count",
    "counter", "count", own=(60, 25, 90, 40), pause_s=(0.002, 0.004, 0.001, 0.01),
)  # fmt: skip
# Steps so long that they stay alike where a busy machine adds a little to some: else it would be
# right to wait for fewer.
AUTO = Part(
    "as many as are best", "backup_workers(first='auto', chunk_bytes=2048)",
    total=80, pause_s=(0.05, 0.05, 0.2, 0.05),
)  # fmt: skip
LEASES = Part(
    "leased", "backup_workers(first=3)", "by_leases", total=EPOCHS,
    pause_s=(0.003, 0.003, 0.003, 0.04), within=10,
)  # fmt: skip
LOADER = Part(
    "leased ahead", "backup_workers(first=3)", "by_leases", total=EPOCHS,
    pause_s=(0.003, 0.003, 0.003, 0.04), within=10, loaders=1,
)  # fmt: skip
SHARED = Part(
    "shared", "backup_workers(first=2)", "shared_at_the_end", total=30,
)  # fmt: skip
OF_FOUR = (FIRST, SLOW, AUTO, OWN, LEASES, LOADER, SHARED)

TIMED = Part(
    "by time", "backup_workers(first=3, close_after_s=0.05, min_first=2)",
    servers=1, total=30, behind=(0, 0, 3), within=10,
)  # fmt: skip
SAVES = Part(
    "saves", "backup_workers(first=2, chunk_bytes=1024)", model="counter", optimizer="count",
    servers=2, total=90, jitter_s=0.004, save_every=20, within=5,
)  # fmt: skip
LOADS = Part(
    "loads", "backup_workers(first=2, chunk_bytes=1024)", model="counter", optimizer="count",
    servers=1, total=120, jitter_s=0.004,
)  # fmt: skip
OF_THREE = (TIMED, SAVES, LOADS)

KINDS = ("sgd", "adam", "rmsprop")
PUSH_PULL = "push_pull(update='server', chunk_bytes=2048)"
NOBODY_MISSED = {
    "all first": "backup_workers(first=2, chunk_bytes=2048)",
    "no backup": "backup_workers(backup=0, chunk_bytes=2048)",
    "no staleness": "bounded_staleness(s=0, chunk_bytes=2048)",
}
SAME = [
    *(("all first", kind) for kind in KINDS),
    ("no backup", "sgd"),
    ("no staleness", "sgd"),
    ("no staleness", "adam"),
]


def same_part(name: str, strategy: str, kind: str) -> Part:
    servers = 2 if (name, kind) == ("all first", "sgd") else 1
    return Part(f"{name} {kind}", strategy, optimizer=kind, servers=servers, look=True)


WHOLE = Part(
    "whole", "backup_workers(first=2, averaged=0.9, chunk_bytes=2048)", "by_averages",
    own=(END, END), look=True, save_every=HALF,
)  # fmt: skip
AGAIN = Part(
    "again", "backup_workers(first=2, averaged=0.9, chunk_bytes=2048)", "by_averages",
    own=(END, END), look=True, servers=2,
)  # fmt: skip
OF_TWO = (
    *(same_part("reference", PUSH_PULL, kind) for kind in KINDS),
    *(same_part(name, NOBODY_MISSED[name], kind) for name, kind in SAME),
    WHOLE,
    AGAIN,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backup")


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, folder: Path) -> dict[int, Run]:
    """By number of workers, all at the same time: most of it is servers that start."""
    SAVES.save, WHOLE.save = str(folder / "saved"), str(folder / "whole")
    LOADS.load, AGAIN.load = f"{SAVES.save}.40", f"{WHOLE.save}.{HALF}"
    parts = {4: OF_FOUR, 3: OF_THREE, 2: OF_TWO}
    return {workers: start(fork_server, folder, workers, *p) for workers, p in parts.items()}


# ---- four workers, of which three are enough


@pytest.fixture(scope="module")
def of_four(runs: dict[int, Run]) -> dict[str, list[Told]]:
    return see_out(runs[4], *OF_FOUR)


def test_every_round_has_three_makers_the_same_everywhere(of_four: dict[str, list[Told]]) -> None:
    told = flawless(of_four[FIRST.name])
    makers = makers_of(told)
    assert len(makers) == FIRST.total
    assert {len(set(ranks)) for ranks in makers.values()} == {3}
    assert {len(ranks) for ranks in makers.values()} == {3}
    assert_equal_at_the_end(told)


def test_every_gradient_is_made_of_or_dropped(of_four: dict[str, list[Told]]) -> None:
    told = flawless(of_four[FIRST.name])
    made, dropped = made_and_dropped(told)
    counted = Counter(rank for ranks in makers_of(told).values() for rank in ranks)
    assert made == counted
    assert sum(dropped.values()) > 0
    for rank, each in enumerate(told):
        rounds = each["rounds"]
        assert made[rank] + dropped.get(rank, 0) == len(rounds)
        assert rounds == sorted(set(rounds))


def test_makers_are_among_those_who_tried(of_four: dict[str, list[Told]]) -> None:
    told = flawless(of_four[FIRST.name])
    for round_, ranks in makers_of(told).items():
        assert set(ranks) <= {rank for rank in range(4) if round_ in told[rank]["rounds"]}


def test_loss_falls(of_four: dict[str, list[Told]]) -> None:
    for each in flawless(of_four[FIRST.name]):
        assert statistics.fmean(each["losses"][-20:]) < statistics.fmean(each["losses"][:20]) / 2


def test_how_many_make_a_round_is_found_in_the_run(of_four: dict[str, list[Told]]) -> None:
    told = flawless(of_four[AUTO.name])
    (decided,) = [a["first"] for a in told[0]["accounts"] if a["first"]]
    assert decided[0] == [0, 4]
    assert decided[-1][1] == 3
    assert decided[-1][0] % 50 == 0
    makers = makers_of(told)
    assert {len(makers[round_]) for round_ in range(decided[1][0])} == {4}
    assert {len(makers[round_]) for round_ in range(decided[-1][0], AUTO.total)} == {3}
    assert_equal_at_the_end(told)


def test_slow_worker_is_not_waited_for(of_four: dict[str, list[Told]]) -> None:
    told = flawless(of_four[SLOW.name])
    made, dropped = made_and_dropped(told)
    steps = [len(each["rounds"]) for each in told]
    assert len(makers_of(told)) == SLOW.total
    assert steps[2] < SLOW.total / 3
    assert dropped[2] > 2 * made.get(2, 0)
    assert made.get(2, 0) + dropped[2] == steps[2]
    assert all(made[rank] >= 0.9 * SLOW.total for rank in (0, 1, 3))
    assert {each["step"] for each in told} == {SLOW.total}
    assert told[2]["stats"]["rounds"]["dropped"]["2"] == dropped[2]
    assert_equal_at_the_end(told)


def test_who_was_mostly_dropped_is_warned_of(of_four: dict[str, list[Told]]) -> None:
    assert any("rank 2" in said for said in of_four[SLOW.name][0]["warnings"])
    assert not any("too late" in said for said in of_four[LEASES.name][0]["warnings"])


def test_loops_of_different_lengths_end_without_error(of_four: dict[str, list[Told]]) -> None:
    """Who leaves is not waited for: the last one's rounds are its own."""
    told = flawless(of_four[OWN.name])
    makers = makers_of(told)
    made, dropped = made_and_dropped(told)
    for rank, steps in enumerate(OWN.own):
        assert len(told[rank]["rounds"]) == steps
        assert made.get(rank, 0) + dropped.get(rank, 0) == steps
    assert {len(ranks) for ranks in makers.values()} <= {1, 2}
    assert len(makers) >= max(OWN.own) / 2
    # Weights that count their updates: nothing is lost or applied twice, in any chunk.
    assert [each["counts"] for each in told] == [[len(makers), len(makers)]] * 4
    assert_equal_at_the_end(told)


@pytest.mark.parametrize("part", [LEASES, LOADER], ids=lambda part: part.name)
def test_every_sample_counts_once_an_epoch(of_four: dict[str, list[Told]], part: Part) -> None:
    told = flawless(of_four[part.name])
    makers = makers_of(told)
    known = {tuple(content): batch for batch, content in dealt()}
    counted = Counter(
        known[tuple(indices)]
        for rank, each in enumerate(told)
        for round_, indices in zip(each["rounds"], each["batches"], strict=True)
        if rank in makers[round_]
    )
    assert set(counted.values()) == {1}
    missing = {(e, n) for e, n in known.values() if (e, n) not in counted and e < EPOCHS}
    # Nobody is left to take what is given back after all have leased their last: it is from a
    # rank's last steps. That may also be a batch of an earlier epoch, which was late before.
    after_leasing = 2 * (1 + part.loaders)  # one in use, and one whose gradient is on its way
    last = {known[tuple(batch)] for each in told for batch in each["batches"][-after_leasing:]}
    assert missing <= last
    assert sum(made_and_dropped(told)[1].values()) > 0
    assert_equal_at_the_end(told)


def dealt() -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Epoch, number and samples of every batch of the first epochs, and of one epoch more."""
    for epoch in range(EPOCHS + 1):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for number in range(SAMPLES // LEASED):
            yield (epoch, number), order[number * LEASED : (number + 1) * LEASED]


def test_all_may_share_when_some_have_missed_rounds(of_four: dict[str, list[Told]]) -> None:
    """After the loop all ranks are at the same place, though not all made the last round."""
    told = flawless(of_four[SHARED.name])
    assert [each["shared"] for each in told] == [7] * 4


# ---- three workers


@pytest.fixture(scope="module")
def of_three(runs: dict[int, Run]) -> dict[str, list[Told]]:
    return see_out(runs[3], *OF_THREE)


def test_time_closes_rounds(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[TIMED.name])
    makers = makers_of(told)
    assert len(makers) == TIMED.total
    sizes = Counter(len(ranks) for ranks in makers.values())
    assert set(sizes) <= {2, 3}  # never fewer than min_first
    assert sizes[2] > TIMED.total / 2
    assert len(told[2]["rounds"]) < TIMED.total / 2
    assert_equal_at_the_end(told)


def test_checkpoint_is_of_one_round(of_three: dict[str, list[Told]], folder: Path) -> None:
    """Though ranks call job.save at different times, and rounds go on meanwhile."""
    flawless(of_three[SAVES.name])
    for steps in (20, 40, 60):
        checkpoint = Checkpoint.read(folder / f"saved.{steps}")
        step = checkpoint.facts["step"]
        assert step >= steps
        for name in PARAMETERS:
            moved = -checkpoint.tensors[f"model/{name}"] * 1024
            assert torch.equal(moved, torch.full_like(moved, step)), name


def test_goes_on_from_a_checkpoint(of_three: dict[str, list[Told]], folder: Path) -> None:
    step = Checkpoint.read(folder / "saved.40").facts["step"]
    told = flawless(of_three[LOADS.name])
    assert {each["loaded"]["step"] for each in told} == {step}
    assert {each["step"] for each in told} == {LOADS.total}
    assert min(each["rounds"][0] for each in told) == step
    assert [each["counts"] for each in told] == [[LOADS.total, LOADS.total]] * 3
    assert_equal_at_the_end(told)


# ---- two workers, both of which make every round


@pytest.fixture(scope="module")
def of_two(runs: dict[int, Run]) -> dict[str, list[Told]]:
    return see_out(runs[2], *OF_TWO)


@pytest.mark.parametrize(("name", "kind"), SAME)
def test_without_backup_it_is_push_pull_bit_for_bit(
    of_two: dict[str, list[Told]], name: str, kind: str
) -> None:
    reference, told = flawless(of_two[f"reference {kind}"]), flawless(of_two[f"{name} {kind}"])
    assert len(reference[0]["digests"]) == 30
    for rank, each in enumerate(told):
        assert each["digests"] == reference[rank]["digests"]
    assert told[0]["digests"] == told[1]["digests"]
    assert told[0]["summary"]["weights_sha256"] == reference[0]["summary"]["weights_sha256"]


def test_averaged_weights_follow_every_round(of_two: dict[str, list[Told]]) -> None:
    for each in flawless(of_two["whole"]):
        assert len(each["averages"]) == END / 5
        for compared in each["averages"].values():
            assert compared["away"] <= 1e-6
            assert compared["moved"] > 1e-4
            assert compared["own_again"]


def test_training_and_averages_go_on_bit_for_bit(of_two: dict[str, list[Told]]) -> None:
    """With another number of servers."""
    whole, again = flawless(of_two["whole"]), flawless(of_two["again"])
    for before, after in zip(whole, again, strict=True):
        assert after["loaded"] == {"step": HALF, "digest": before["digests"][str(HALF)]}
        assert after["loaded_averages"] == before["averages"][str(HALF)]["digest"]
        assert sorted(map(int, after["digests"])) == list(range(HALF + 1, END + 1))
        assert after["digests"] == {step: before["digests"][step] for step in after["digests"]}
        for step, compared in after["averages"].items():
            assert compared["digest"] == before["averages"][step]["digest"]


# ---- workers that stand still for a while

# A worker is given up for lost after 12 times its job's silence limit. A stop is longer than 12
# times LOST_S. It is shorter than 12 times SILENCE_S, however busy the machine is: five jobs begin
# and tick one after the other, and every wait for one of them has a limit. Others that waited for
# a worker that is not lost would stand still for longer than STILL_S.
STOP_S, TICKS = 12.0, 9
STILL_S = 60.0
SILENCE_S, LOST_S = 5 * (LIMIT_S + TICKS * (STILL_S + 1.0)) / 12, 0.8


def going_on(name: str, **different: Any) -> Part:
    """Until the test has seen enough.

    Steps are of very different lengths: among equals, one that is out of step stays the last.
    """
    part = Part(
        name, "backup_workers(first=3, chunk_bytes=1024)", "until_told", "counter", "count",
        servers=2, pause_s=(0.01,) * 4, jitter_s=0.08, silence_s=SILENCE_S,
    )  # fmt: skip
    return replace(part, **different)


STOPPED = {2: going_on("a worker stopped"), 0: going_on("rank 0 stopped", servers=1)}
LOST = [
    going_on("given up between steps", silence_s=LOST_S, servers=1),
    # The third server has its whole part of the gradient by then.
    going_on("given up within a step", silence_s=LOST_S, servers=3, stops_within=(2, 10)),
]
KILLED = going_on("killed", silence_s=LOST_S, servers=1)


class Stop:
    """A job of four, one of whom is stopped for a while, as the test sees it."""

    def __init__(self, fork_server: ForkServer, folder: Path, part: Part, culprit: int) -> None:
        self.part, self.culprit = part, culprit
        self.others = [rank for rank in range(4) if rank != culprit]
        self.run: Run = start(fork_server, folder, 4, part)
        self.seen: list[list[int]] = []  # rounds begun by rank, at most once a second of the stop
        self.told: list[Told] = []
        self.woken_in = 0

    def rounds(self) -> list[int]:
        file = self.run.folder / "board"
        content = file.read_bytes() if file.exists() else b""
        return list(struct.unpack("4q", content.ljust(32, b"\0")))

    def begin(self) -> None:
        if self.part.stops_within:
            until((self.run.folder / "stopped").exists, "the stop")
        else:
            until(lambda: min(self.rounds()) > 10, "training")
            kill = signal.SIGKILL if self.part is KILLED else signal.SIGSTOP
            os.kill(self.run.pids[self.culprit], kill)

    def tick(self) -> None:
        """Once the others have gone on since the tick before."""
        last = self.seen[-1] if self.seen else [0] * 4

        def gone_on() -> bool:
            now = self.rounds()
            return all(now[rank] - last[rank] >= 3 for rank in self.others)

        until(gone_on, f"others to go on: {self.part.name}", STILL_S)
        self.seen.append(self.rounds())

    def end(self) -> None:
        if self.part is not KILLED:
            # However busy the machine is, the others do not run on while this one wakes.
            order = f"{self.culprit} {self.seen[-1][self.culprit]}"
            (self.run.folder / "order").write_text(order)
            (self.run.folder / "order").rename(self.run.folder / "first_goes")
        self.woken_in = max(self.rounds())
        if self.part is not KILLED:
            os.kill(self.run.pids[self.culprit], signal.SIGCONT)

    def go_on(self) -> None:
        """Until the culprit is back, and some more rounds are made."""
        stood = self.seen[-1][self.culprit]
        until(lambda: self.rounds()[self.culprit] > stood, "the one that stood still")
        now = max(self.rounds())
        until(lambda: min(self.rounds()[r] for r in self.others) > now + 30, "more rounds")

    def finish(self) -> None:
        (self.run.folder / "enough").touch()
        if self.part is not KILLED:
            self.told = see_out(self.run, self.part)[self.part.name]


@pytest.fixture(scope="module")
def stops(fork_server: ForkServer, folder: Path) -> dict[str, Stop]:
    """All at the same time: most of it is waiting."""
    culprits = [*((part, rank) for rank, part in STOPPED.items()), *((p, 2) for p in LOST)]
    jobs = [Stop(fork_server, folder, part, rank) for part, rank in [*culprits, (KILLED, 2)]]
    for job in jobs:
        job.begin()
    begun = time.monotonic()
    while time.monotonic() < begun + STOP_S or len(jobs[0].seen) < TICKS:
        for job in jobs:
            job.tick()
        time.sleep(1.0)
    for job in jobs:
        job.end()
    for job in jobs[:-1]:
        job.go_on()
    for job in jobs:
        job.finish()
    return {job.part.name: job for job in jobs}


@pytest.mark.parametrize("name", [part.name for part in STOPPED.values()])
def test_stopped_worker_is_not_missed_and_joins_again(stops: dict[str, Stop], name: str) -> None:
    stop = stops[name]
    told, culprit = flawless(stop.told), stop.culprit
    assert {seen[culprit] for seen in stop.seen[1:]} == {stop.seen[1][culprit]}
    for before, after in pairwise(stop.seen):
        assert all(after[rank] - before[rank] >= 3 for rank in stop.others), stop.seen
    makers = makers_of(told)
    joined = comes_back(told[culprit]["rounds"])
    assert joined - stop.seen[1][culprit] > 20
    # Others make one or two rounds while it ends the step that it was stopped in.
    assert joined <= stop.woken_in + 4
    while_stopped = range(stop.seen[1][culprit] + 1, stop.seen[-1][stop.others[0]])
    assert {makers[round_] for round_ in while_stopped} == {tuple(stop.others)}
    assert any(culprit in makers[round_] for round_ in range(joined, joined + 20))
    assert made_and_dropped(told)[1][culprit] >= 1  # what it was about when it stopped
    assert_equal_at_the_end(told)


def comes_back(rounds: list[int]) -> int:
    """The first round after the longest absence."""
    return max(pairwise(rounds), key=lambda pair: pair[1] - pair[0])[1]


@pytest.mark.parametrize("name", [part.name for part in LOST])
def test_worker_given_up_for_lost_may_come_back(stops: dict[str, Stop], name: str) -> None:
    stop = stops[name]
    told, culprit = flawless(stop.told), stop.culprit
    makers = makers_of(told)
    joined = comes_back(told[culprit]["rounds"])
    assert any(culprit in makers[round_] for round_ in range(joined, joined + 20))
    assert_equal_at_the_end(told)


def test_the_others_go_on_without_one_that_was_killed(stops: dict[str, Stop]) -> None:
    stop = stops[KILLED.name]
    for before, after in pairwise(stop.seen):
        assert all(after[rank] - before[rank] >= 3 for rank in stop.others), stop.seen
    codes = stop.run.wait()
    assert codes == [0, 0, -signal.SIGKILL, 0], stop.run.told()
    told = flawless([outcome(stop.run, KILLED, rank) for rank in stop.others])
    counts = {tuple(each["counts"]) for each in told}
    assert len(counts) == 1
    assert stop.run.remains.left() == []
