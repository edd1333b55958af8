"""One NaN in one worker's gradient: who says so, and what it does to the weights of all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

from slipstream.torch.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("nonfinite_worker.py")
WHERE = "rank 1: the gradient of"
Told = dict[str, Any]

# Small chunks: tensors are cut, and travel together with others.
BY_WORKERS = {
    "push_pull": "push_pull(chunk_bytes=4096)",
    "after": "push_pull(overlap=False)",
    "allreduce": "allreduce(bucket_bytes=4096)",
    "all_to_all": "all_to_all",
    "poseidon": "poseidon(choose='bytes', dense=['last'])",
    "adam_factors": "adam_factors",
    "one_bit": "one_bit(chunk_bytes=4096)",
    "low_rank": "low_rank(rank=2, chunk_bytes=4096)",
    "flow": "parameter_flow(chunk_bytes=4096)",
    "stale flow": "parameter_flow(staleness=1)",
    "own steps": "parameter_flow(payload='update')",
    "ako": "ako(partitions=2)",
}
BY_SERVERS = {
    "server": "push_pull(update='server')",
    "backup": "backup_workers(first=1)",
    "bounded": "bounded_staleness(s=1)",
    "async": "async_sgd(clip_norm=1.0)",
}


def cases(nonfinite: str) -> list[Told]:
    """All systems, with one NaN in a fully connected layer or in an embedding; and inputs that make
    all gradients and statistics NaN."""
    systems = BY_WORKERS | (BY_SERVERS if nonfinite == "refuse" else {})
    if nonfinite == "stop":
        systems["async"] = BY_SERVERS["async"]
    told = [{"name": n, "strategy": s, "bad": "numbers"} for n, s in systems.items()]
    told += [
        {"name": f"{name} of words", "strategy": systems[name], "bad": "words"}
        for name in ("push_pull", "allreduce", "poseidon")
    ]
    if nonfinite == "refuse":
        told += [
            {"name": f"{name} of inputs", "strategy": systems[name], "bad": "inputs"}
            for name in ("push_pull", "allreduce")
        ]
    return [{**one, "nonfinite": nonfinite} for one in told]


def tell(folder: Path, asked: list[Told]) -> str:
    file = folder / "cases.json"
    file.write_text(json.dumps(asked))
    return str(file)


def told(folder: Path, name: str) -> list[Told]:
    said = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
    for each in said:
        assert "error" not in each, each["trace"]
    return said


@pytest.fixture(scope="module")
def trained(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[Told]]:
    """What the ranks tell of a system under a policy; all systems are trained in one go."""

    @cache
    def folder(nonfinite: str) -> Path:
        folder = tmp_path_factory.mktemp(nonfinite)
        run = fork_server.run(WORKER, tell(folder, cases(nonfinite)), ranks=2, limit_s=200)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return folder

    return lambda nonfinite, name: told(folder(nonfinite), name)


def names(nonfinite: str) -> list[str]:
    return [case["name"] for case in cases(nonfinite)]


def assert_said_once(said: list[Told], name: str) -> None:
    (warning,) = [text for each in said for text in each["warned"]]
    layer = "words" if name.endswith("words") else "numbers"
    if not name.endswith("inputs"):  # which make all gradients NaN
        assert f"{WHERE} '{layer}." in warning
    assert warning.startswith(WHERE)
    assert " at step 2" in warning


@pytest.mark.parametrize("name", names("pass"))
def test_one_that_goes_on_is_reported_once(
    name: str, trained: Callable[[str, str], list[Told]]
) -> None:
    said = trained("pass", name)
    assert_said_once(said, name)
    assert [each["finite"] for each in said] == [False, False]


@pytest.mark.parametrize("name", names("refuse"))
def test_one_that_is_refused_leaves_all_workers_finite_and_equal(
    name: str, trained: Callable[[str, str], list[Told]]
) -> None:
    said = trained("refuse", name)
    assert_said_once(said, name)
    assert [each["finite"] for each in said] == [True, True]
    assert said[0]["digest"] == said[1]["digest"]


@pytest.mark.parametrize("name", names("stop"))
def test_one_ends_the_job_on_all_ranks(
    name: str, trained: Callable[[str, str], list[Told]]
) -> None:
    hearer, culprit = trained("stop", name)
    layer = "words" if name.endswith("words") else "numbers"
    rank, tensor, step = culprit["fields"]
    assert (rank, step) == (1, 2)
    assert tensor.startswith(f"{layer}.")
    told, where = hearer["fault"].splitlines()
    assert told == f"rank 1 failed: {culprit['fault']}"
    assert where.startswith("  on rank 1, at ")
    assert f"{WHERE} {tensor!r} is not finite at step 2" in culprit["fault"]
    assert "nonfinite='refuse'" in culprit["fault"]


def test_a_job_that_stops_says_why_in_one_line(fork_server: ForkServer, tmp_path: Path) -> None:
    asked = {"strategy": "push_pull", "bad": "numbers", "nonfinite": "stop"}
    run = fork_server.run(WORKER, tell(tmp_path, [asked]), "uncaught", ranks=2)
    assert 0 not in run.wait()
    (line,) = run.own_lines()
    assert f"{WHERE} 'numbers." in line


# ---- shared memory

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="shared memory without a name is Linux's"
)


def learners(folder: Path, strategy: str, nonfinite: str, *how: str, **asked: Any) -> Launch:
    """Under the launcher, which is what tells them of the policy."""
    case = {"name": "gadei", "strategy": strategy, "bad": "words", **asked}
    command = (
        SLIPSTREAM, "run", "--workers", "2", "--strategy", "gadei",
        str(WORKER), tell(folder, [case]), *how,
    )  # fmt: skip
    return Launch(command, folder, {"SLIPSTREAM_NONFINITE": nonfinite})


@linux
@pytest.mark.parametrize(
    "strategy", ["gadei", "gadei(consistent=True)", "gadei(apply='direct', consistent=True)"]
)
def test_refused_by_learners(tmp_path: Path, strategy: str) -> None:
    launch = learners(tmp_path, strategy, "refuse")
    assert launch.wait() == 0, launch.stderr
    said = told(tmp_path, "gadei")
    assert_said_once(said, "of words")
    assert [each["finite"] for each in said] == [True, True]


@linux
def test_a_learner_ends_the_job_and_says_why(tmp_path: Path) -> None:
    launch = learners(tmp_path, "gadei", "stop", "uncaught")
    assert launch.wait() != 0
    (line,) = [line for line in launch.stderr.splitlines() if "gradient of" in line]
    assert f"slipstream: {WHERE} 'words.weight' is not finite at step 2" in line
    assert launch.remains.left() == []


# ---- checkpoints


def assert_finite_one_is_kept(folder: Path, refusals: list[str]) -> None:
    (refusal,) = refusals
    assert "is not finite" in refusal
    assert f"no checkpoint is written to {folder / 'kept'}: model/" in refusal
    assert "save it under another name" in refusal
    assert is_finite(folder / "kept")
    assert not is_finite(folder / "other")


def is_finite(file: Path) -> bool:
    tensors = Checkpoint.read(file).tensors
    return bool(tensors["model/words.weight"].isfinite().all())


def test_a_finite_checkpoint_is_not_replaced(fork_server: ForkServer, tmp_path: Path) -> None:
    asked = {"strategy": "push_pull", "bad": "words", "save": str(tmp_path)}
    run = fork_server.run(WORKER, tell(tmp_path, [{"name": "saved", **asked}]), ranks=2)
    assert run.wait() == [0, 0], run.told()
    for each in told(tmp_path, "saved"):
        assert_finite_one_is_kept(tmp_path, each["refusals"])


@linux
def test_a_server_keeps_finite_checkpoints_and_says_so_once(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    strategy = f"gadei(checkpoints={str(directory)!r}, every_s=0.01)"
    launch = learners(tmp_path, strategy, "pass", save=str(tmp_path))
    assert launch.wait() == 1, "its last checkpoint is missing"
    said = told(tmp_path, "gadei")
    assert_said_once(said, "of words")
    assert_finite_one_is_kept(tmp_path, said[0]["refusals"])
    kept = list(directory.glob("weights-*"))
    assert kept
    assert all(is_finite(file) for file in kept)
    lines = [line for line in launch.own_lines if f"written to {directory}" in line]
    assert 1 <= len(lines) <= 2, "once while it trains, and once of the last one"
    for line in lines:
        assert "words.weight is not finite" in line
        assert f"the last checkpoint in {directory} has " in line


# ---- mixed precision


def test_a_grad_scaler_sees_infinities_and_skips_the_step(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    asked = {"strategy": "push_pull", "bad": "numbers", "scaled": True, "nonfinite": "pass"}
    run = fork_server.run(WORKER, tell(tmp_path, [{"name": "scaled", **asked}]), ranks=2)
    assert run.wait() == [0, 0], run.told()
    said = told(tmp_path, "scaled")
    assert_said_once(said, "scaled")
    for each in said:
        assert each["finite"]
        assert each["scale"] == 512.0  # once halved
        assert each["digest"] == said[0]["digest"]
