"""What training scripts do besides training: in every system, an unchanged script runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch
from loops_worker import TOUCHES, reference

from slipstream.systems import SYSTEMS

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("loops_worker.py")
WORKERS = 2
LIMIT_S = 240.0
BY_SERVERS = "push_pull(update='server')"
AHEAD = "parameter_flow(staleness=1)"
GADEI = "gadei"
# Arguments without which a system does not train two workers, or its part is not the one meant.
NAMED = {
    "backup_workers": "backup_workers(first=2)",
    "diloco": "diloco(every=2)",
    "local_sgd": "local_sgd(every=2)",
    "poseidon": "poseidon(rate='1gbit', gemm_gflops=50, server_gbytes=5)",
}
ALL = [NAMED.get(name, name) for name in SYSTEMS if name != GADEI] + [BY_SERVERS, AHEAD]
# Workers do not wait for each other, so that two runs need not end with the same weights.
FREE = ("ako", "async_sgd", "bounded_staleness", AHEAD)
Told = list[dict[str, Any]]  # by rank


def read(folder: Path, number: int, workers: int) -> Told:
    told = [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(workers)]
    errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if "error" in each]
    assert not errors, "\n".join(errors)
    return told


def write_plan(folder: Path, plan: Sequence[dict[str, Any]]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def copies_plan() -> list[dict[str, Any]]:
    return [
        {"kind": "copies", "strategy": strategy, "copies": copies, "exact": strategy != "ako"}
        for strategy in ALL
        for copies in (True, False)
    ]


@pytest.fixture(scope="module")
def copies(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    plan = write_plan(folder, copies_plan())
    run = fork_server.run(WORKER, str(plan), str(folder), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return folder


@pytest.mark.parametrize("strategy", ALL)
def test_copies_of_a_model_in_training_are_plain_ones(strategy: str, copies: Path) -> None:
    at = 2 * ALL.index(strategy)
    copying, undisturbed = read(copies, at, WORKERS), read(copies, at + 1, WORKERS)
    assert [told["trouble"] for told in copying] == [[]] * WORKERS
    if strategy not in FREE:
        assert copying[0]["digest"] == undisturbed[0]["digest"]


# ---- the script's own checkpoints: torch.save of both state_dicts

HALF, END = 4, 8
UPDATED_BY_SERVERS = (
    (BY_SERVERS, "adam"),
    (BY_SERVERS, "adagrad"),
    (BY_SERVERS, "sgd"),
    ("backup_workers(first=2)", "adam"),
    ("bounded_staleness(s=0)", "sgd"),
    ("async_sgd", "adagrad"),
)
RESUMED = ("before", "after")  # job.distribute


def own_checkpoints_plan(folder: Path) -> list[dict[str, Any]]:
    plan = []
    for number, (strategy, optimizer) in enumerate(UPDATED_BY_SERVERS):
        common = {
            "kind": "checkpointed",
            "strategy": strategy,
            "optimizer": optimizer,
            "file": str(folder / f"{number}.pt"),
        }
        plan.append({**common, "begin": 0, "end": HALF, "when": "never"})
        plan += [{**common, "begin": HALF, "end": END, "when": when} for when in RESUMED]
        whole = {**common, "file": str(folder / "whole.pt")}
        plan.append({**whole, "begin": 0, "end": END, "when": "never"})
    return plan


@pytest.fixture(scope="module")
def own_checkpoints(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_checkpoints")
    plan = write_plan(folder, own_checkpoints_plan(folder))
    run = fork_server.run(WORKER, str(plan), str(folder), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return folder


@pytest.mark.parametrize("case", UPDATED_BY_SERVERS, ids=" ".join)
def test_a_run_resumed_from_the_scripts_own_checkpoint_ends_as_an_uninterrupted_one(
    case: tuple[str, str], own_checkpoints: Path
) -> None:
    first = (1 + len(RESUMED) + 1) * UPDATED_BY_SERVERS.index(case)
    half, *resumed, whole = (read(own_checkpoints, first + n, WORKERS) for n in range(4))
    assert whole[0]["state"]
    assert all(told["fits"] for told in (*half, *whole))
    for again in resumed:
        assert all(told["state"].keys() == whole[0]["state"].keys() for told in again)
        if case[0] != "async_sgd":  # whose workers' order differs
            assert [told["digest"] for told in again] == [told["digest"] for told in whole]
            assert [told["state"] for told in again] == [told["state"] for told in whole]


AVERAGED = [
    ("push_pull(averaged=0.9)", 2),
    ("push_pull(averaged=0.9)", 0),
    ("push_pull(averaged=0.9, update='server')", 2),
    ("backup_workers(averaged=0.9, first=2)", 2),
]


def test_averages_begin_with_weights_that_the_script_loads(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = [
        {"kind": "averaged", "strategy": strategy, "steps": steps, "when": when}
        for strategy, steps in AVERAGED
        for when in ("before", "after")
    ]
    path = write_plan(tmp_path, plan)
    run = fork_server.run(WORKER, str(path), str(tmp_path), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    for number, case in enumerate(AVERAGED):
        before, after = (read(tmp_path, 2 * number + n, WORKERS) for n in range(2))
        assert after == before, case


# ---- what loops do around their steps, where gradients may leave before

TOUCHED = [
    *((BY_SERVERS, touch) for touch in TOUCHES if touch != "OneOfTwoPassesThen"),
    *(
        ("backup_workers(first=2)", touch)
        for touch in ("Clipped", "Scaled", "TwoPasses", "TwoPassesLater")
    ),
    *(
        (AHEAD, touch)
        for touch in ("Clipped", "ClippedLater", "ScaledAndClipped", "TwoPasses", "TwoPassesLater")
    ),
    ("bounded_staleness", "Clipped"),
    ("async_sgd", "Scaled"),
    ("ako", "Scaled"),
]


@pytest.fixture(scope="module")
def touched(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("touched")
    plan = [
        {"kind": "touching", "strategy": s, "touch": t, "file": str(folder / f"{number}.pt")}
        for number, (s, t) in enumerate(TOUCHED)
    ]
    written = write_plan(folder, plan)
    run = fork_server.run(WORKER, str(written), str(folder), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return folder


@pytest.mark.parametrize("case", TOUCHED, ids=" ".join)
def test_an_unchanged_loop_runs_where_gradients_may_leave_before_the_step(
    case: tuple[str, str], touched: Path
) -> None:
    strategy, touch = case
    number = TOUCHED.index(case)
    told = read(touched, number, WORKERS)
    warned = [message for each in told for message in each["warned"]]
    if touch.endswith("Later"):  # the gradients of one step had left, and those of later ones not
        (message,) = warned
        assert "in step 5" in message
    else:
        assert warned == []
    if strategy.startswith(("push_pull", "backup_workers")) and touch != "ClippedLater":
        counted = "OneOfTwoPassesThen" if touch == "TwoPassesLater" else touch
        state, wanted = torch.load(touched / f"{number}.pt"), reference(counted, WORKERS)
        for name, weights in wanted.items():
            torch.testing.assert_close(state[name], weights)


def test_a_critics_weights_may_be_clamped_after_its_steps(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    plan = [{"kind": "constrained critic", "strategy": s} for s in (BY_SERVERS, "push_pull")]
    written = write_plan(tmp_path, plan)
    run = fork_server.run(WORKER, str(written), str(tmp_path), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    by_servers, by_workers = (read(tmp_path, number, WORKERS) for number in range(2))
    for told in (*by_servers, *by_workers):
        assert told["largest"] == by_workers[0]["largest"] == pytest.approx(0.05)
    assert by_servers[0]["digest"] == by_servers[1]["digest"]


# ---- learners on shared memory, each job in a command of its own

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="shared memory without a name is Linux's"
)
Learn = Callable[..., Callable[[], dict[str, Any]]]


@pytest.fixture
def learn(launch: Callable[..., Launch], tmp_path: Path) -> Learn:
    """Starts one learner; the result waits for what it has written."""

    def start(strategy: str = GADEI, **asked: Any) -> Callable[[], dict[str, Any]]:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        plan = write_plan(folder, [{"strategy": strategy, **asked}])
        command = (SLIPSTREAM, "run", "--workers", "1", "--strategy", strategy)
        run = launch(*command, str(WORKER), str(plan), str(folder))

        def finish() -> dict[str, Any]:
            assert run.wait() == 0, run.stderr
            return read(folder, 0, 1)[0]

        return finish

    return start


@on_linux
def test_copies_of_a_model_in_shared_memory_are_plain_ones(learn: Learn) -> None:
    assert learn(kind="copies", copies=True, exact=False)()["trouble"] == []


@on_linux
@pytest.mark.parametrize(
    ("strategy", "resumed"),
    [(GADEI, RESUMED), ("gadei(apply='direct', consistent=True)", ["after"])],
)
def test_a_learner_resumed_from_the_scripts_own_checkpoint_ends_as_an_uninterrupted_one(
    strategy: str, resumed: Sequence[str], learn: Learn, tmp_path: Path
) -> None:
    common = {"kind": "checkpointed", "strategy": strategy, "optimizer": "adam"}
    files = [str(tmp_path / name) for name in ("half.pt", "whole.pt")]
    first = [
        learn(**common, file=file, begin=0, end=end, when="never")
        for file, end in zip(files, (HALF, END), strict=True)
    ]
    half, whole = (finish() for finish in first)
    assert len(whole["state"]) == len(half["state"]) > 0
    second = [learn(**common, file=files[0], begin=HALF, end=END, when=when) for when in resumed]
    for again in (finish() for finish in second):
        assert again == whole


@on_linux
def test_a_learners_loop_may_scale_and_clip_its_gradients(learn: Learn, tmp_path: Path) -> None:
    asked = {"kind": "touching", "file": str(tmp_path / "learned.pt")}
    finishes = [learn(**asked, touch=touch) for touch in ("Scaled", "ScaledAndClipped")]
    assert [finish()["warned"] for finish in finishes] == [[], []]
