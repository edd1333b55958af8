"""Learners of one machine on shared weights: real processes, real deaths."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fork_server import ForkServer
from launches import SLIPSTREAM, TORCHRUN, Launch, until

from slipstream.runtime.shared_memory.checkpoints import Snapshot
from slipstream.torch.checkpoints.checkpoint import Checkpoint

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's"),
]

WORKER = Path(__file__).with_name("gadei_worker.py")
AT_THE_END = Path(__file__).with_name("gadei_end_worker.py")
LEARNERS = 2
ONE = ("--workers", "1")  # for what does not depend on their number: each imports torch
DIGITS = 0.97  # what the small net reaches in TOTAL updates, and not in a tenth of them
TOTAL = 1500
SAMPLES = 2000
CHANCE = random.Random(1)
ALONE = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")  # not set


STARTED: list[Launch] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """A test that fails half-way leaves no job behind."""
    yield
    while STARTED:
        STARTED.pop().close()


def start(
    folder: Path,
    *told: object,
    strategy: str = "gadei",
    named: str = "",
    options: tuple[str, ...] = (),
) -> Launch:
    """``named`` is the strategy that the script names; the command line then names none."""
    by_option = () if named else ("--strategy", strategy)
    command = (
        SLIPSTREAM, "run", "--workers", str(LEARNERS), *by_option, *options,
        str(WORKER), *(str(word) for word in told),
    )  # fmt: skip
    env = {"TMPDIR": str(temporary(folder))} | ({"NAMED": named} if named else {})
    STARTED.append(Launch(command, folder, env))
    return STARTED[-1]


def temporary(folder: Path) -> Path:
    path = folder / "tmp"
    path.mkdir(parents=True, exist_ok=True)
    return path


def finished(folder: Path, *told: object, **more: Any) -> Launch:
    launch = start(folder, *told, **more)
    assert launch.wait() == 0, launch.stderr
    assert launch.remains.left() == []
    assert list(temporary(folder).iterdir()) == []
    return launch


def said(folder: Path, rank: int = 0, incarnation: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / f"{rank}.{incarnation}.json").read_text())
    return told


# ---- every gradient once


@pytest.mark.parametrize(
    "strategy",
    [
        "gadei",
        "gadei(consistent=True)",
        "gadei(apply='direct', consistent=True)",
    ],
)
def test_every_gradient_is_applied_once(tmp_path: Path, strategy: str) -> None:
    steps = 200
    finished(tmp_path, "counted", tmp_path, steps, strategy=strategy)
    numbers = [(1 + (r + s) % 5, s % 10) for r in range(LEARNERS) for s in range(steps)]
    for rank in range(LEARNERS):
        told = said(tmp_path, rank)
        assert told["whole"] == [-float(sum(number for number, _ in numbers))]
        by_row = [-float(sum(n for n, row in numbers if row == each)) for each in range(10)]
        assert told["rows"] == [[each] for each in by_row]
    assert said(tmp_path, 0)["shared"] == said(tmp_path, 1)["shared"]
    summary = said(tmp_path)["summary"]
    assert summary["steps"] == LEARNERS * steps
    assert summary["workers"] == LEARNERS
    assert summary["staleness"]["all tensors"]["count"] == LEARNERS * steps
    assert said(tmp_path, 1)["summary"] is None


@pytest.mark.parametrize("strategy", ["gadei", "gadei(consistent=True)"])
def test_learners_that_end_at_different_times_have_the_same_weights(
    tmp_path: Path, strategy: str
) -> None:
    """Also where the loop has replaced the parameters' memory before its first step."""
    command = (SLIPSTREAM, "run", "--workers", str(LEARNERS), "--strategy", strategy)
    STARTED.append(Launch((*command, str(AT_THE_END), str(tmp_path), "200"), tmp_path))
    assert STARTED[-1].wait() == 0, STARTED[-1].stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["digest"] == second["digest"]
    assert len(set(first["summary"]["weights_sha256"])) == 1
    assert first["moved"] == second["moved"] > 0.01
    assert first["summary"]["steps"] == 203


def test_a_net_learns_from_direct_updates(tmp_path: Path) -> None:
    strategy = "gadei(apply='direct')"
    finished(tmp_path, "learning", tmp_path, TOTAL, "nobody", 0, strategy=strategy)
    assert said(tmp_path)["right"] > DIGITS
    assert said(tmp_path)["digest"] == said(tmp_path, 1)["digest"]
    assert TOTAL <= said(tmp_path)["steps"] <= TOTAL + 4 * LEARNERS


@pytest.mark.parametrize("learners", [1, 3])
def test_one_learner_and_more_than_cores(tmp_path: Path, learners: int) -> None:
    launch = finished(tmp_path, "counted", tmp_path, 30, options=("--workers", str(learners)))
    assert launch.own_lines == []
    total = sum(1 + (r + s) % 5 for r in range(learners) for s in range(30))
    assert said(tmp_path, learners - 1)["whole"] == [-float(total)]


# ---- named in the script


@pytest.mark.parametrize("learners", [1, 2])
def test_a_script_may_name_it(tmp_path: Path, learners: int) -> None:
    launch = finished(
        tmp_path, "counted", tmp_path, 50, named="gadei()", options=("--workers", str(learners))
    )
    assert launch.own_lines == []
    total = sum(1 + (r + s) % 5 for r in range(learners) for s in range(50))
    for rank in range(learners):
        assert said(tmp_path, rank)["whole"] == [-float(total)]
    assert said(tmp_path)["summary"]["strategy"] == "gadei"
    assert said(tmp_path)["summary"]["steps"] == 50 * learners


def test_learners_of_such_a_script_are_started_again_and_so_is_rank_0(tmp_path: Path) -> None:
    launch = start(tmp_path, "dealt", tmp_path, SAMPLES, named="gadei(every_s=0.2)")
    until(lambda: len(progress(launch)) == LEARNERS, "training")
    for whom in ("rank 1", "server", "rank 0"):
        strike(launch, whom)
    (tmp_path / "enough").touch()
    assert launch.wait() == 0, launch.stderr
    assert launch.remains.left() == []
    assert list(temporary(tmp_path).iterdir()) == []
    for rank in range(LEARNERS):
        assert f"rank {rank} was killed by SIGKILL; it is started again" in launch.stderr
    told = json.loads(max(tmp_path.glob("0.*.json")).read_text())
    assert told["whole"] == [-2.0 * SAMPLES]


def test_its_restarts_are_those_that_were_asked_for(tmp_path: Path) -> None:
    launch = start(
        tmp_path, "learning", tmp_path, 10**6, "learner", 100,
        named="gadei()", options=("--restarts", "0"),
    )  # fmt: skip
    assert launch.wait() == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in launch.stderr
    assert "started again" not in launch.stderr
    assert launch.remains.left() == []


def test_its_last_checkpoint_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    named = f"gadei(checkpoints={str(kept)!r}, every_s=1000)"
    launch = start(tmp_path, "learning", tmp_path, 10**6, "nobody", 200, named=named)
    until(lambda: (tmp_path / "struck").exists(), "training")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM
    assert launch.remains.left() == []
    newest = max(kept.glob("weights-*.safetensors"))
    assert Checkpoint.read(newest).facts["step"] >= 200


# ---- deaths


def test_a_killed_learner_comes_back_and_the_others_do_not_wait(tmp_path: Path) -> None:
    launch = finished(tmp_path, "learning", tmp_path, TOTAL, "learner", TOTAL // 3)
    assert "rank 1 was killed by SIGKILL; it is started again" in launch.stderr
    assert said(tmp_path)["right"] > DIGITS
    # It came back after rank 0 had taken a hundred steps more, and would have been waited for for
    # ever; a busy machine may hold up one of them.
    assert said(tmp_path)["longest"] < 30.0
    assert said(tmp_path)["summary"]["restarts"] == 1
    assert said(tmp_path)["digest"] == said(tmp_path, 1, incarnation=1)["digest"]


def test_without_restarts_a_learner_may_be_left_out(tmp_path: Path) -> None:
    launch = finished(
        tmp_path, "learning", tmp_path, TOTAL, "learner", 300,
        options=("--restarts", "0", "--may-lose", "1"),
    )  # fmt: skip
    assert "rank 1 was killed by SIGKILL; the other workers continue" in launch.stderr
    assert said(tmp_path)["right"] > DIGITS
    assert not (tmp_path / "1.1.json").exists()


def test_a_lost_learner_ends_the_job_if_it_must_not(tmp_path: Path) -> None:
    launch = start(
        tmp_path, "learning", tmp_path, 10**6, "learner", 100, options=("--restarts", "0")
    )
    assert launch.wait() == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in launch.stderr
    assert launch.remains.left() == []


def test_a_learner_that_exits_with_0_in_the_middle_fails_the_job(tmp_path: Path) -> None:
    launch = start(tmp_path, "learning", tmp_path, 10**6, "exit 0", 100)
    assert launch.wait() == 1
    assert launch.own_lines[-1].startswith(
        "slipstream: rank 1 exited with code 0 before it had left the job"
    )
    assert launch.remains.left() == []


@pytest.mark.parametrize("absent", ["at once", "after training"])
def test_a_learner_that_never_joins_fails_the_job(tmp_path: Path, absent: str) -> None:
    launch = start(tmp_path, "absent", tmp_path, absent)
    assert launch.wait() == 1, launch.stderr
    assert "rank 1 exited with code 0 without joining the job" in launch.stderr
    assert launch.remains.left() == []


def test_a_hung_server_is_replaced(tmp_path: Path) -> None:
    strategy = "gadei(every_s=0.2)"
    told = ("learning", tmp_path, TOTAL, "server hangs", TOTAL // 2)
    launch = finished(tmp_path, *told, strategy=strategy)
    assert "another takes its place" in launch.stderr
    assert said(tmp_path)["right"] > DIGITS
    assert said(tmp_path)["summary"]["restarts"] == 1
    # Five seconds of silence are what tells a hung one; the other starts on a busy machine.
    assert said(tmp_path)["longest"] < 60.0


def strike(launch: Launch, whom: str) -> None:
    """Kill one, at a moment that nobody has chosen, and wait until training goes on."""
    time.sleep(CHANCE.uniform(0.3, 0.6))
    process_of(launch, whom).kill()
    moment = time.time()
    goes_on = lambda: max(f.stat().st_mtime for f in progress(launch)) > moment + 0.2  # noqa: E731
    until(goes_on, "progress")


def process_of(launch: Launch, whom: str) -> psutil.Process:
    """Once it is there: one that was killed may still be on its way back."""
    until(lambda: find_process(launch, whom) is not None or launch.ended, whom)
    found = find_process(launch, whom)
    assert found is not None, f"the job ended without {whom}: {launch.stderr}"
    return found


def find_process(launch: Launch, whom: str) -> psutil.Process | None:
    if launch.ended:
        return None
    for process in psutil.Process(launch.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            command, environment = process.cmdline(), process.environ()
            if whom == "server" and "slipstream.runtime.shared_memory.update_server" in command:
                return process
            if str(WORKER) in command and whom == f"rank {environment.get('RANK')}":
                return process
    return None


def progress(launch: Launch) -> list[Path]:
    return list(launch.folder.glob("progress.*"))


@pytest.mark.parametrize(
    ("strategy", "victims"),
    [
        ("gadei(every_s=0.2)", ("server", "rank 0", "server", "rank 1", "server")),
        ("gadei(consistent=True, every_s=0.2)", ("server", "rank 0", "server")),
        ("gadei(apply='direct', consistent=True)", ("rank 0", "rank 1", "server")),
    ],
)
def test_every_batch_counts_once_whoever_is_killed(
    tmp_path: Path, strategy: str, victims: tuple[str, ...]
) -> None:
    launch = start(tmp_path, "dealt", tmp_path, SAMPLES, strategy=strategy)
    until(lambda: len(progress(launch)) == LEARNERS, "training")
    for whom in victims:
        strike(launch, whom)
    (tmp_path / "enough").touch()
    assert launch.wait() == 0, launch.stderr
    assert launch.remains.left() == []
    assert "rank 0 was killed by SIGKILL; it is started again" in launch.stderr
    last = max(tmp_path.glob("0.*.json"))
    told = json.loads(last.read_text())
    # One that dies between its own update and its word of it leaves the batch to another.
    more = len(victims) if "direct" in strategy else 0
    assert all(2 * SAMPLES <= -count <= 2 * SAMPLES + more for count in told["whole"])
    each = SAMPLES // 5
    assert all(each <= -count <= each + more for row in told["rows"] for count in row)


def test_what_a_job_did_before_its_first_checkpoint_is_done_again(tmp_path: Path) -> None:
    """Its server goes back to the checkpoint of the job before, whose batches are not its own."""
    kept, first, second = (tmp_path / name for name in ("kept", "first", "second"))
    finished(first, "counted", first, 30, strategy=f"gadei(checkpoints={str(kept)!r})")
    before = said(first)["whole"][0]
    strategy = f"gadei(checkpoints={str(kept)!r}, every_s=1000)"
    launch = start(second, "dealt", second, SAMPLES, strategy=strategy)
    until(lambda: len(progress(launch)) == LEARNERS, "training")
    strike(launch, "server")
    (second / "enough").touch()
    assert launch.wait() == 0, launch.stderr
    assert said(second)["whole"] == [before - 2.0 * SAMPLES]


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    launch = start(tmp_path, "learning", tmp_path, 10**6, "launcher", 100)
    launch.wait()
    assert launch.remains.left() == []
    until(lambda: not list(temporary(tmp_path).iterdir()), "its directory to go", limit_s=30)


# ---- checkpoints


def test_a_job_goes_on_from_its_directory(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    strategy = f"gadei(checkpoints={str(kept)!r}, every_s=0.2)"
    first, second = tmp_path / "first", tmp_path / "second"
    # Until there is one of its midst.
    finished(first, "learning", first, 300, "nobody", 0, "Adam", str(kept), strategy=strategy)
    assert min(said(first, rank)["begun"] for rank in range(LEARNERS)) == 0
    # The newest is torn: the one before is taken.
    newest = max(kept.iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    before = sorted(kept.iterdir())[-2]
    launch = finished(second, "learning", second, 900, "nobody", 0, "Adam", strategy=strategy)
    assert "a tensor lies outside of it; the one before is taken" in launch.stderr
    assert "goes on from a checkpoint of " in launch.stderr
    assert said(second)["begun"] >= int(before.stem.removeprefix("weights-")) > 0
    assert said(second)["steps"] >= 900
    assert len(list(kept.glob("weights-*.safetensors"))) == 2


@pytest.mark.parametrize(("whom", "code"), [("nobody", 128 + signal.SIGTERM), ("itself", 1)])
def test_a_checkpoint_is_kept_however_it_ends(tmp_path: Path, whom: str, code: int) -> None:
    kept = tmp_path / "kept"
    strategy = f"gadei(checkpoints={str(kept)!r}, every_s=1000)"
    launch = start(tmp_path, "learning", tmp_path, 10**6, whom, 200, strategy=strategy)
    until(lambda: (tmp_path / "struck").exists(), "training")
    if whom == "nobody":
        launch.send(signal.SIGTERM)
    assert launch.wait() == code
    assert launch.remains.left() == []
    newest = max(kept.glob("weights-*.safetensors"))
    checkpoint = Checkpoint.read(newest)
    assert checkpoint.facts["step"] >= 200
    assert "model/0.weight" in checkpoint.tensors


def test_only_one_job_at_a_time_has_a_directory(tmp_path: Path) -> None:
    kept, first, second, third = (tmp_path / name for name in ("kept", "1st", "2nd", "3rd"))
    strategy = f"gadei(checkpoints={str(kept)!r}, every_s=0.2)"
    running = start(first, "learning", first, 10**6, "nobody", 100, strategy=strategy)
    until(lambda: (first / "struck").exists(), "training")
    refused = start(second, "counted", second, 5, strategy=strategy, options=ONE)
    assert refused.wait() != 0
    assert f"another job keeps its checkpoints in {kept}" in refused.stderr
    assert f"process {running.process.pid} on " in refused.stderr
    assert "goes on from a checkpoint" not in refused.stderr
    # A server that is started again, and a job after this one, are not refused.
    process_of(running, "server").kill()
    until(lambda: "training goes on from update" in running.stderr, "another server")
    running.send(signal.SIGKILL)
    running.wait()
    assert running.remains.left() == []
    last = finished(third, "learning", third, 0, "nobody", 0, strategy=strategy, options=ONE)
    assert "goes on from a checkpoint" in last.stderr


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small one; ``request.param`` says how many KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "small", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize(
    ("disk", "there_is"),
    [
        (4, "there is no checkpoint in {disk}"),
        (8, "the last checkpoint in {disk} has 0 updates"),
    ],
    indirect=["disk"],
)
def test_a_job_without_its_last_checkpoint_has_failed(
    tmp_path: Path, disk: Path, there_is: str
) -> None:
    strategy = f"gadei(checkpoints={str(disk)!r}, every_s=1000)"
    launch = start(tmp_path, "counted", tmp_path, 20, strategy=strategy, options=ONE)
    assert launch.wait() == 1
    file = disk / f"weights-{20:015d}.safetensors"
    trouble = f"cannot write {file}: No space left on device; {there_is.format(disk=disk)}"
    assert launch.own_lines[-2:] == [
        f"slipstream: {trouble}",
        "slipstream: the job ended without its last checkpoint",
    ]
    assert said(tmp_path)["summary"]["steps"] == 20  # learners have all they need
    assert launch.remains.left() == []


@pytest.mark.parametrize("disk", [4], indirect=True)
def test_a_job_that_is_stopped_says_that_nothing_is_kept(tmp_path: Path, disk: Path) -> None:
    strategy = f"gadei(checkpoints={str(disk)!r}, every_s=1000)"
    launch = start(tmp_path, "learning", tmp_path, 10**6, "nobody", 50, strategy=strategy)
    until(lambda: (tmp_path / "struck").exists(), "training")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 128 + signal.SIGTERM
    assert f"No space left on device; there is no checkpoint in {disk}" in launch.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job has saved a checkpoint."""
    folder = tmp_path_factory.mktemp("first")
    finished(folder, "saved", folder)
    return folder


def test_a_server_that_cannot_read_is_not_started_again(first: Path, tmp_path: Path) -> None:
    """What the file says of a tensor and what it holds differ; the checksum is right."""
    second = tmp_path / "second"
    whole = Snapshot.read(first / "saved")
    for name, piece in whole.pieces.items():
        whole.pieces[name] = replace(piece, data=bytes(piece.data)[:-4])
    whole.write(tmp_path / "damaged")
    launch = start(second, "saved", second, tmp_path / "damaged", options=ONE)
    assert launch.wait() == 1
    assert "takes its place" not in launch.stderr
    assert launch.remains.left() == []


def test_what_is_saved_is_loaded_elsewhere(
    first: Path, tmp_path: Path, fork_server: ForkServer
) -> None:
    second = tmp_path / "second"
    assert said(first)["staleness"]["all tensors"]["count"] > 0
    checkpoint = Checkpoint.read(first / "saved")
    assert 50 <= checkpoint.facts["step"] <= 100
    assert checkpoint.tensors["optimizer/state/0.weight/exp_avg"].shape == (50, 20)
    finished(second, "saved", second, first / "saved")
    assert said(second)["begun"] >= checkpoint.facts["step"]
    alone = temporary(tmp_path / "alone")
    run = fork_server.run(WORKER, "saved", str(alone), str(first / "saved"), ranks=[ALONE])
    assert run.codes == {0: 0}, run.told()
    assert said(alone)["begun"] == checkpoint.facts["step"]


def test_a_pipe_in_a_checkpoints_place_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    launch = start(tmp_path, "saved", tmp_path, tmp_path / "pipe", options=ONE)
    assert launch.wait() != 0
    assert f"cannot read {tmp_path / 'pipe'}: it is a pipe, not a regular file" in launch.stderr
    assert launch.remains.left() == []


# ---- batches


def test_every_sample_is_learnt_from_once_an_epoch(tmp_path: Path) -> None:
    finished(tmp_path, "sampled", tmp_path)
    seen = [*said(tmp_path, 0)["seen"], *said(tmp_path, 1)["seen"]]
    assert torch.bincount(torch.tensor(seen), minlength=101).tolist() == [2] * 101
    assert said(tmp_path)["updates"] == 42


# ---- what cannot work


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "models",
            r"rank (0 differs from rank 1|1 differs from rank 0): it has parameter 'weight': \(",
        ),
        (
            "optimizer",
            "gadei updates shared weights with SGD, Adam, AdamW, RMSprop, Adagrad, not Adadelta",
        ),
        ("exception", "ZeroDivisionError: on purpose"),
    ],
)
def test_mistakes_end_in_a_message(tmp_path: Path, what: str, message: str) -> None:
    options = ONE if what == "optimizer" else ()
    launch = start(tmp_path, "mistaken", tmp_path, what, options=options)
    assert launch.wait() != 0
    assert re.search(message, launch.stderr), launch.stderr
    assert launch.remains.left() == []
    assert list(temporary(tmp_path).iterdir()) == []


def test_other_launchers_say_how_it_is_done(tmp_path: Path) -> None:
    command = (TORCHRUN, "--nproc-per-node=2", str(WORKER), "mistaken", str(tmp_path), "none")
    secret = {"SLIPSTREAM_SECRET": "torchrun's store is open to all"}
    launch = Launch(command, tmp_path, {"SLIPSTREAM_STRATEGY": "gadei", **secret})
    assert launch.wait() != 0
    assert "slipstream run --workers N --strategy gadei SCRIPT" in launch.stderr


def test_with_torchrun_a_script_that_names_it_is_told_how_it_is_done(tmp_path: Path) -> None:
    command = (TORCHRUN, "--nproc-per-node=2", str(WORKER), "mistaken", str(tmp_path), "none")
    secret = {"SLIPSTREAM_SECRET": "torchrun's store is open to all"}
    launch = Launch(command, tmp_path, {"NAMED": "gadei()", **secret})
    assert launch.wait() != 0
    assert "slipstream run --workers N --strategy gadei SCRIPT" in launch.stderr


def once(launch: Launch, text: str) -> bool:
    return sum(text in line for line in launch.stderr.splitlines()) == 1


def test_servers_are_refused_to_a_script_that_names_it(tmp_path: Path) -> None:
    launch = start(
        tmp_path, "mistaken", tmp_path, "none", named="gadei()", options=("--servers", "1")
    )
    assert launch.wait() != 0
    assert once(launch, "leave out --lab and --servers"), launch.stderr
    assert launch.remains.left() == []


def test_ranks_that_name_different_strategies_are_told_so(tmp_path: Path) -> None:
    launch = start(tmp_path, "mistaken", tmp_path, "one strategy", named="gadei()")
    assert launch.wait() == 1
    assert "slipstream: rank 1 asks for push_pull, but " in launch.stderr
    assert "every rank must name the same strategy in job.distribute" in launch.stderr
    assert launch.remains.left() == []
    assert list(temporary(tmp_path).iterdir()) == []


def test_a_script_that_shares_first_is_told_the_way_out(tmp_path: Path) -> None:
    launch = start(tmp_path, "mistaken", tmp_path, "share first", named="gadei()")
    assert launch.wait() == 1
    assert once(launch, "job.init_process_group came before job.distribute"), launch.stderr
    assert "or start with --strategy gadei" in launch.stderr
    finished(tmp_path / "way out", "mistaken", tmp_path, "share first")


def test_a_script_that_asks_for_another_than_the_command_line_is_refused(tmp_path: Path) -> None:
    launch = start(tmp_path, "mistaken", tmp_path, "strategy")
    assert launch.wait() != 0
    assert once(launch, "started for learners that share memory, and the script asks for push_pull")


def test_a_second_job_in_the_same_processes_is_refused(tmp_path: Path) -> None:
    launch = start(tmp_path, "again", tmp_path, 5, named="gadei()")
    assert launch.wait() != 0
    assert "start another job with another `slipstream run`" in launch.stderr
    assert launch.remains.left() == []


@pytest.mark.parametrize("options", [("--servers", "1")])
def test_options_of_a_network_are_refused(tmp_path: Path, options: tuple[str, ...]) -> None:
    launch = start(tmp_path, "mistaken", tmp_path, "none", options=options)
    assert launch.wait() != 0
    assert "leave out --lab and --servers" in launch.stderr


def test_alone_it_is_plain_training(tmp_path: Path, fork_server: ForkServer) -> None:
    env = {"SLIPSTREAM_STRATEGY": "gadei"}
    run = fork_server.run(WORKER, "counted", str(tmp_path), "20", ranks=[ALONE], env=env)
    assert run.codes == {0: 0}, run.told()
    assert said(tmp_path)["whole"] == [-float(sum(1 + s % 5 for s in range(20)))]
