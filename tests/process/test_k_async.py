"""Updates of the first K gradients of any age, by real processes."""

from __future__ import annotations

import os
import signal
import struct
from collections import Counter
from pathlib import Path

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
from launches import until

from slipstream.torch.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.process

BEHIND, EPOCHS = 5, 2
# Within a step of rank 2, the others begin so many updates: if they waited for it, no step of it
# would end.
SLOW = Part(
    "one slow", "k_async(k=2, chunk_bytes=2048)", optimizer="plain", servers=2,
    total=80, pause_s=(0.002,) * 3, behind=(0, 0, BEHIND), within=20,
)  # fmt: skip
COUNTED = Part(
    "counted", "k_async(k=2, chunk_bytes=1024)", "by_own_count", "counter", "count",
    servers=2, own=(60, 25, 40), pause_s=(0.001, 0.004, 0.002),
)  # fmt: skip
LEASES = Part(
    "leased", "k_async(k=2)", "by_leases", total=EPOCHS,
    pause_s=(0.003, 0.003, 0.02), within=10,
)  # fmt: skip
SAVES = Part(
    "saves", "k_async(k=2, chunk_bytes=1024)", "by_own_count", "counter", "count",
    servers=2, own=(40, 40, 40), jitter_s=0.004, save_every=20,
)  # fmt: skip
ALL = Part("all", "k_async(k=3, chunk_bytes=2048)", servers=2, look=True)
REFERENCE = Part("reference", "push_pull(update='server', chunk_bytes=2048)", servers=2, look=True)
TOO_MANY = Part("too many", "k_async(k=4)", total=3)
OF_THREE = (SLOW, COUNTED, LEASES, SAVES, ALL, REFERENCE, TOO_MANY)
KILLED = Part(
    "killed", "k_async(k=3, chunk_bytes=1024)", "until_told", "counter", "count",
    servers=2, pause_s=(0.01,) * 3, silence_s=0.8,
)  # fmt: skip
LOST = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k_async")


@pytest.fixture(scope="module")
def told(fork_server: ForkServer, folder: Path) -> dict[str, list[Told]]:
    SAVES.save = str(folder / "saved")
    return see_out(start(fork_server, folder, 3, *OF_THREE), *OF_THREE)


def test_slow_worker_is_not_waited_for_and_its_gradients_count(told: dict[str, list[Told]]) -> None:
    ranks = flawless(told[SLOW.name])
    makers = makers_of(ranks)
    made, dropped = made_and_dropped(ranks)
    steps = [len(each["rounds"]) for each in ranks]
    assert not dropped
    assert made == dict(enumerate(steps))
    assert made == Counter(rank for update in makers.values() for rank in update)
    assert 0 < steps[2] < SLOW.total / 3 < min(steps[:2])
    # One or two gradients may be left when the total is reached; then fewer workers are left.
    assert SLOW.total <= len(makers) <= SLOW.total + 2
    assert {len(makers[update]) for update in range(SLOW.total)} == {2}
    assert ranks[0]["summary"]["rounds"]["made"] == {str(r): n for r, n in made.items()}
    assert_equal_at_the_end(ranks)


def test_ages_are_reported(told: dict[str, list[Told]]) -> None:
    ranks = flawless(told[SLOW.name])
    for figures in ranks[0]["summary"]["staleness"].values():
        assert figures["min"] == 0
        assert figures["max"] >= BEHIND


def test_every_gradient_is_in_one_update(told: dict[str, list[Told]]) -> None:
    """Weights count the updates: each is the mean of gradients that are one, in every chunk."""
    ranks = flawless(told[COUNTED.name])
    makers = makers_of(ranks)
    made, dropped = made_and_dropped(ranks)
    assert not dropped
    assert made == dict(enumerate(COUNTED.own))
    assert {len(update) for update in makers.values()} <= {1, 2}
    assert [each["counts"] for each in ranks] == [[len(makers), len(makers)]] * 3
    assert_equal_at_the_end(ranks)


def test_every_leased_sample_counts_once_an_epoch(told: dict[str, list[Told]]) -> None:
    ranks = flawless(told[LEASES.name])
    given = Counter(tuple(batch) for each in ranks for batch in each["batches"])
    assert set(given.values()) == {1}
    assert dealt() <= given.keys()
    made, dropped = made_and_dropped(ranks)
    assert not dropped
    assert sum(made.values()) == given.total()
    assert_equal_at_the_end(ranks)


def dealt() -> set[tuple[int, ...]]:
    """All batches of the epochs."""
    found = set()
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        found |= {tuple(order[at : at + LEASED]) for at in range(0, SAMPLES, LEASED)}
    return found


def test_checkpoint_is_of_one_update(told: dict[str, list[Told]], folder: Path) -> None:
    flawless(told[SAVES.name])
    for steps in (20, 40):
        checkpoint = Checkpoint.read(folder / f"saved.{steps}")
        step = checkpoint.facts["step"]
        assert step > 0
        for name, _ in counter().named_parameters():
            moved = -checkpoint.tensors[f"model/{name}"] * 1024
            assert torch.equal(moved, torch.full_like(moved, step)), name


def test_with_k_of_all_workers_it_is_push_pull_bit_for_bit(told: dict[str, list[Told]]) -> None:
    reference, ranks = flawless(told[REFERENCE.name]), flawless(told[ALL.name])
    assert len(reference[0]["digests"]) == ALL.total
    for rank, each in enumerate(ranks):
        assert each["digests"] == reference[rank]["digests"]


def test_k_of_more_than_there_are_is_refused(told: dict[str, list[Told]]) -> None:
    for each in told[TOO_MANY.name]:
        assert "k=4 with 3 workers: choose from 1 to 3" in each["error"]


def test_the_others_continue_without_a_lost_worker(fork_server: ForkServer, folder: Path) -> None:
    run: Run = start(fork_server, folder, 3, KILLED)

    def begun() -> list[int]:
        file = run.folder / "board"
        content = file.read_bytes() if file.exists() else b""
        return list(struct.unpack("3q", content.ljust(24, b"\0")))

    until(lambda: min(begun()) > 10, "training")
    os.kill(run.pids[LOST], signal.SIGKILL)
    stood = begun()[LOST]
    until(lambda: min(begun()[:LOST]) > stood + 20, "the others to continue")
    (run.folder / "enough").touch()
    assert run.wait() == [0, 0, -signal.SIGKILL], run.told()
    ranks = flawless([outcome(run, KILLED, rank) for rank in range(LOST)])
    makers = makers_of(ranks)
    assert {len(makers[update]) for update in range(10)} == {3}
    assert any(update == (0, 1) for update in makers.values())
    assert {tuple(each["counts"]) for each in ranks} == {(len(makers), len(makers))}
    assert run.remains.left() == []
