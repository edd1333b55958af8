"""Several models and optimizers: n workers train like one process on the union batch."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import distance
from fork_server import ForkServer
from pair_cases import CASES, ROUNDS, train_alone
from safetensors.torch import load_file

import slipstream

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("pairs_worker.py")
RANKS = 3
EQUAL = 1e-12
PUSH_PULL = "push_pull(chunk_bytes=512)"
BY_SERVERS = "push_pull(update='server', chunk_bytes=512)"
FIRST = "backup_workers(first=3, chunk_bytes=512)"
STALE = "parameter_flow(staleness=2, rate_factor=1.0)"
Told = dict[str, Any]


def asked(name: str, case: str, strategy: str, **more: Any) -> Told:
    return {"name": name, "case": case, "strategy": strategy, **more}


EXACT = [
    asked("by workers", "gan", PUSH_PULL, servers=3),
    asked("by servers", "gan", BY_SERVERS, servers=2),
    asked("collectives", "gan", "allreduce"),
    asked("all to all", "gan", "all_to_all"),
    asked("poseidon", "gan", "poseidon"),
    asked("first of all", "gan", FIRST, servers=2),
    asked("streamed", "gan", "parameter_flow(rate_factor=1.0)"),
    asked("stale", "gan", STALE, wait=True),
    asked("not overlapped", "gan", "push_pull(overlap=False)"),
    asked("live by workers", "gan", PUSH_PULL, live=True),
    asked("live by servers", "gan", BY_SERVERS, live=True),
    asked("live collectives", "gan", "allreduce", live=True),
    asked("live stale", "gan", STALE, live=True, wait=True),
    asked("two calls", "gan", PUSH_PULL, calls=True),
    asked("two calls of servers", "gan", BY_SERVERS, calls=True),
    asked("two calls of poseidon", "gan", "poseidon", calls=True),
    asked("shared by workers", "shared", PUSH_PULL, servers=2),
    asked("shared by servers", "shared", BY_SERVERS, servers=2),
    asked("shared collectives", "shared", "allreduce"),
    asked("shared in two calls", "shared", PUSH_PULL, calls=True),
    asked("shared streamed in two calls", "shared", STALE, calls=True, wait=True),
    asked("closures", "closures", PUSH_PULL),
    asked("given closures", "given closures", PUSH_PULL),
]
ALIKE = [
    asked("running ahead", "gan", "parameter_flow(staleness=2)"),
    asked("own steps", "gan", "parameter_flow(payload='update')"),
    asked("asynchronous", "gan", "async_sgd", momentum=False),
    asked("closed by time", "gan", "backup_workers(first=2, close_after_s=0.2)"),
    asked("averaged", "gan", "backup_workers(first=3, averaged=0.9)", averaged=True),
]
STATISTICS = asked("statistics", "norms", PUSH_PULL)


def run(fork_server: ForkServer, folder: Path, *jobs: Told, ranks: int = RANKS) -> None:
    plan = folder / "plan.json"
    plan.write_text(json.dumps(jobs))
    run = fork_server.run(WORKER, str(plan), ranks=ranks, limit_s=200)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []


def told(folder: Path, job: Told, ranks: int = RANKS) -> list[Told]:
    files = [folder / f"{job['name']}.{rank}.json" for rank in range(ranks)]
    said = [json.loads(file.read_text()) for file in files]
    for each in said:
        assert "error" not in each, each["trace"]
    return said


def end_of(folder: Path, job: Told) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"{job['name']}.pt")
    return state


@cache
def alone(case: str, workers: int = RANKS) -> dict[str, torch.Tensor]:
    return train_alone(case, workers)


def assert_near(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        assert distance(tensor, wanted[name]) < EQUAL, name


@pytest.fixture(scope="module")
def folder(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    run(fork_server, folder, *EXACT, *ALIKE, STATISTICS)
    return folder


@pytest.mark.parametrize("job", EXACT, ids=[job["name"] for job in EXACT])
def test_pairs_train_like_one_process(folder: Path, job: Told) -> None:
    assert len({each["digest"] for each in told(folder, job)}) == 1
    assert_near(end_of(folder, job), alone(job["case"]))


@pytest.mark.parametrize("job", ALIKE, ids=[job["name"] for job in ALIKE])
def test_all_workers_end_with_the_same_bits(folder: Path, job: Told) -> None:
    said = told(folder, job)
    assert len({each["digest"] for each in said}) == 1
    assert len({each.get("averaged") for each in said}) == 1


def test_buffers_travel_with_the_steps_of_their_pair(folder: Path) -> None:
    """The critic's statistics change once more in the generator's pass, after its last step."""
    first, *others = (each["parts"] for each in told(folder, STATISTICS))
    apart = {name for other in others for name in first if other[name] != first[name]}
    assert apart == {"1/1.running_var"}, "the mean of what the generator makes is its last bias"


def test_the_first_pairs_steps_are_the_jobs(folder: Path) -> None:
    assert {each["step"] for each in told(folder, EXACT[0])} == {ROUNDS}
    shared = next(job for job in EXACT if job["case"] == "shared")
    assert {each["step"] for each in told(folder, shared)} == {ROUNDS // 3}


def test_figures_and_the_plan_cover_all_pairs(folder: Path) -> None:
    (first, *_) = told(folder, EXACT[0])
    assert "pair 0\n" in first["table"]
    assert "pair 1\n" in first["table"]
    assert first["stats"]["servers"] == 3
    (own,) = first["stats"]["weights_sha256"]
    assert first["summary"]["weights_sha256"] == [own] * RANKS
    by_servers = told(folder, EXACT[1])[0]
    names = by_servers["summary"]["staleness"].keys()
    assert {name.partition(":")[0] for name in names} == {"pair 0", "pair 1"}


def test_averaged_weights_are_others_in_both_models(folder: Path) -> None:
    averaged = next(job for job in ALIKE if job.get("averaged"))
    for each in told(folder, averaged):
        assert each["averaged"] != each["digest"]


# ---- losses

LOSABLE = {
    "first of all": "backup_workers(first=3)",
    "without the lost": "parameter_flow(staleness=1)",
    "in rounds without the lost": "parameter_flow(chunk_bytes=512)",
}


@pytest.mark.parametrize("name", LOSABLE)
def test_the_rest_go_on_with_all_pairs(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    job = asked(name, "gan", LOSABLE[name], die=4)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([job]))
    run = fork_server.run(WORKER, str(plan), ranks=RANKS, limit_s=100)
    assert [run.codes[rank] for rank in range(RANKS)] == [0, 0, -signal.SIGKILL], run.told()
    assert run.remains.left() == []
    said = told(tmp_path, job, RANKS - 1)
    assert len({each["digest"] for each in said}) == 1
    assert {each["step"] for each in said} == {ROUNDS}


# ---- checkpoints

HALF = ROUNDS // 2
DRAWN = {"gan": 5, "shared": 1}  # by round
KEPT = {
    "workers": ("gan", PUSH_PULL),
    "servers": ("gan", BY_SERVERS),
    "collectives": ("gan", "allreduce"),
    "first": ("gan", FIRST),
    "stale": ("gan", STALE),
    "shared": ("shared", PUSH_PULL),
    "shared at servers": ("shared", BY_SERVERS),
}


@pytest.fixture(scope="module")
def kept(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every way, to the half and from there to the end; from one file also alone."""
    folder = tmp_path_factory.mktemp("kept")
    files = {name: str(folder / f"{name}.safetensors") for name in KEPT}
    halves, rests = [], []
    for name, (case, strategy) in KEPT.items():
        more = {"wait": strategy == STALE}
        halves.append(asked(f"{name} half", case, strategy, until=HALF, save=files[name], **more))
        rests.append(asked(name, case, strategy, **resumed(case, files[name]), **more))
    rests[0]["misfits"] = [files["shared"], one_pair(folder)]
    run(fork_server, folder, *halves, *rests)
    alone = asked("alone", "gan", PUSH_PULL, ranks=list(range(RANKS)))
    alone |= resumed("gan", files["servers"]) | {"misfits": rests[0]["misfits"]}
    run(fork_server, folder, alone, ranks=1)
    return folder


def resumed(case: str, path: str) -> Told:
    return {"load": path, "from": HALF, "drawn": HALF * DRAWN[case]}


def one_pair(folder: Path) -> str:
    """A checkpoint of the generator alone."""
    path = folder / "one.safetensors"
    with slipstream.init() as job:
        job.distribute(*CASES["gan"].pairs()[0])
        job.save(path)
    return str(path)


@pytest.mark.parametrize("name", [*KEPT, "alone"])
def test_a_run_goes_on_where_a_checkpoint_ended(kept: Path, name: str) -> None:
    case, strategy = KEPT.get(name, KEPT["workers"])
    job = asked(name, case, strategy)
    said = told(kept, job, 1 if name == "alone" else RANKS)
    assert len({each["digest"] for each in said}) == 1
    assert {each["step"] for each in said} == {ROUNDS // 3 if case == "shared" else ROUNDS}
    assert_near(end_of(kept, job), alone(case))


@pytest.mark.parametrize("name", ["workers", "alone"])
def test_a_file_of_other_pairs_is_refused(kept: Path, name: str) -> None:
    for each in told(kept, asked(name, "gan", PUSH_PULL), 1 if name == "alone" else RANKS):
        other, single = each["refused"]
        assert "does not fit this job: pair 0: only the" in other
        assert "it holds one model and optimizer, and this job trains 2 pairs" in single


def test_several_pairs_do_not_fit_a_job_of_one(kept: Path) -> None:
    with slipstream.init() as job:
        generator, _ = job.distribute(*CASES["gan"].pairs()[0])
        before = {name: tensor.clone() for name, tensor in generator.state_dict().items()}
        with pytest.raises(slipstream.ConfigError, match="it holds 2 pairs of model and optimizer"):
            job.load(kept / "workers.safetensors")
        assert all(torch.equal(before[name], t) for name, t in generator.state_dict().items())


def test_one_file_holds_every_pair_and_a_shared_model_once(kept: Path) -> None:
    tensors = load_file(kept / "shared at servers.safetensors")
    heads = {name.split("/")[0] + "/" + name.split("/")[1] for name in tensors}
    assert heads == {"pair0/model", "pair1/optimizer"}  # plain SGD has no state
