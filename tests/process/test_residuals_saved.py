"""What codecs still owe survives a checkpoint: nothing is lost, for any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("residuals_worker.py")
BITS = "one_bit(chunk_bytes=4096)"
SHARES = "allreduce(wire='int4', bucket_bytes=4096)"  # workers hold, and keep what rounding loses
RANK = "low_rank(rank=2, chunk_bytes=4096)"


def run(
    fork_server: ForkServer,
    folder: Path,
    doing: str,
    *,
    ranks: int,
    servers: int,
    strategy: str = BITS,
) -> list[dict[str, Any]]:
    settings = {"SLIPSTREAM_STRATEGY": strategy, "SLIPSTREAM_SERVERS": str(servers)}
    checkpoint = str(folder / "checkpoint")
    run = fork_server.run(WORKER, checkpoint, doing, ranks=ranks, env=settings)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return [json.loads((folder / f"{doing}.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("strategy", [BITS, SHARES])
def test_training_goes_on_to_the_same_bits(
    fork_server: ForkServer, tmp_path: Path, strategy: str
) -> None:
    through = run(fork_server, tmp_path, "save", ranks=2, servers=2, strategy=strategy)
    resumed = run(fork_server, tmp_path, "resume", ranks=2, servers=1, strategy=strategy)
    assert any(through[0]["owed"].values()), "nothing was owed, so nothing is shown"
    assert [worker["owed"] for worker in resumed] == [worker["owed"] for worker in through]
    assert {worker["digest"] for worker in resumed} == {through[0]["digest"]}


def test_low_rank_goes_on_with_what_it_owed_and_one_basis(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    through = run(fork_server, tmp_path, "save", ranks=2, servers=2, strategy=RANK)
    resumed = run(fork_server, tmp_path, "resume", ranks=2, servers=1, strategy=RANK)
    assert any(through[0]["owed"].values()), "nothing was owed, so nothing is shown"
    assert [worker["owed"] for worker in resumed] == [worker["owed"] for worker in through]
    assert len({worker["digest"] for worker in resumed}) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_other_numbers_of_workers_owe_the_same(
    fork_server: ForkServer, tmp_path: Path, ranks: int
) -> None:
    before = run(fork_server, tmp_path, "save", ranks=3, servers=1)
    after = run(fork_server, tmp_path, "resume", ranks=ranks, servers=1)
    assert any(abs(owes) > 1e-2 for owes in before[0]["owed"].values()), "nothing is shown"
    for name in before[0]["owed"]:
        shares = [
            sum(w["owed"][name] for w in workers) / len(workers) for workers in (before, after)
        ]
        assert shares[1] == pytest.approx(shares[0], rel=1e-4, abs=1e-5), name
    assert {worker["step"] for worker in after} == {24}


def test_a_strategy_that_keeps_none_says_so(fork_server: ForkServer, tmp_path: Path) -> None:
    run(fork_server, tmp_path, "save", ranks=2, servers=1)
    settings = {"SLIPSTREAM_STRATEGY": "push_pull", "SLIPSTREAM_SERVERS": "1"}
    resumed = fork_server.run(WORKER, str(tmp_path / "checkpoint"), "resume", ranks=2, env=settings)
    assert set(resumed.codes.values()) == {0}, resumed.told()
    assert "this one keeps none, so they are left out" in resumed.stderr(0)
    assert "keeps none" not in resumed.stderr(1)
    assert json.loads((tmp_path / "resume.0.json").read_text())["owed"] == {}
