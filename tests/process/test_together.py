"""What every rank has to call: who does not is named, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from fork_server import ForkServer

WORKER = Path(__file__).with_name("together_worker.py")
SOON_S = 60.0  # half of what a worker would wait for others

pytestmark = pytest.mark.process


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("what", "doing"), [("save midway", "trains on"), ("save at the end", "has finished")]
)
def test_a_rank_that_saves_alone_is_told_who_went_on(
    fork_server: ForkServer, what: str, doing: str, culprit: int
) -> None:
    run = fork_server.start(WORKER, what, str(culprit), ranks=2)
    codes = run.wait(SOON_S)
    assert 0 not in codes
    (line,) = run.own_lines()
    other = f"rank {1 - culprit}"
    assert f"rank {culprit} is in job.save, but {other} {doing}" in line
    assert "every rank must call job.save" in line


def test_rank_0s_word_is_shared(fork_server: ForkServer) -> None:
    run = fork_server.run(WORKER, "share", "0", ranks=3)
    assert run.wait() == [0, 0, 0], run.told()
    assert [(run.folder / f"steps.{rank}").read_text() for rank in range(3)] == ["4"] * 3


def test_one_job_after_the_other_in_the_same_processes(fork_server: ForkServer) -> None:
    run = fork_server.run(WORKER, "again", "0", ranks=2)
    assert run.wait() == [0, 0], run.told()
    assert run.own_lines() == []
    assert run.remains.left() == []


def test_forgetting_to_distribute_is_noticed(fork_server: ForkServer) -> None:
    run = fork_server.run(WORKER, "no distribute", "0", ranks=2)
    assert run.wait() == [0, 0], run.told()
    assert "job.distribute was never called" in run.stderr(0)
    assert "job.distribute" not in run.stderr(1)


def test_a_rank_that_cannot_join_says_why_wherever_it_is(fork_server: ForkServer) -> None:
    only = {"RANK": "1", "WORLD_SIZE": "2", "SLIPSTREAM_SECRET_FILE": "/no/such/file"}
    run = fork_server.run(WORKER, "share", "0", ranks=[only], limit_s=SOON_S)
    assert run.codes == {0: 1}
    assert "slipstream: cannot read the secret file /no/such/file" in run.stderr(0)
