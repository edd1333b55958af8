"""Workers of two hosts: each host's aggregate first; all train like one process, bit for bit alike.

Hosts are addresses of the loopback here: workers that listen at the same one share memory.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, STEPS, distance, state_of, train_alone
from fork_server import ForkServer
from launches import until
from outcomes import Asked, Outcome, assert_equal_throughout, read_outcome
from poseidon_cases import POSEIDON_CASES
from test_mixes import RANKS, alone, vector

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("equivalence_worker.py")
POSEIDON_WORKER = Path(__file__).with_name("poseidon_worker.py")
RESIDUALS_WORKER = Path(__file__).with_name("residuals_worker.py")
MIX_WORKER = Path(__file__).with_name("mix_worker.py")
FAULT_WORKER = Path(__file__).with_name("fault_worker.py")
TOLD_WORKER = Path(__file__).with_name("told_worker.py")
REWIRED_WORKER = Path(__file__).with_name("rewired_worker.py")
LIMIT_S = 180.0
PUSH_PULL = "push_pull(chunk_bytes=8192)"
AFTER = "push_pull(overlap=False, chunk_bytes=8192)"
ALLREDUCE = "allreduce(bucket_bytes=16384)"
AT_SERVERS = "push_pull(update='server', chunk_bytes=8192)"
FLOW = "parameter_flow(delta=0.0, hierarchical=True, chunk_bytes=8192)"  # all of it is sent
EVEN, UNEVEN = (0, 1, 0, 1), (0, 0, 0, 1)  # by rank: its host
TOLERANCE = {torch.bfloat16: 5e-2}
# Of buffers, the mean runs over the workers on which they changed, also of uneven hosts.
ON_EVEN = ("norm", "own_buffer", "dtypes")
ON_UNEVEN = (
    "groups", "unused", "kept", "absent", "absent_norm", "norm", "empty_batch", "two_backwards",
    "accumulated",
)  # fmt: skip

ALL = {
    EVEN: [
        *(Asked(4, case, PUSH_PULL, servers=2) for case in ON_EVEN),
        Asked(4, "dtypes", ALLREDUCE),
        Asked(4, "unused", ALLREDUCE),
        Asked(4, "norm", ALLREDUCE),
        Asked(4, "groups", "push_pull(hierarchical=False, chunk_bytes=8192)", servers=2),
        Asked(4, "norm", AT_SERVERS, servers=2),
    ],
    UNEVEN: [
        *(Asked(4, case, PUSH_PULL, servers=1) for case in ON_UNEVEN),
        Asked(4, "groups", AFTER, "adam", servers=2),
        Asked(4, "groups", ALLREDUCE),
        Asked(4, "groups", FLOW),
        Asked(4, "groups", AT_SERVERS, "adam", servers=2),
        *(Asked(4, case, AT_SERVERS) for case in ("kept", "absent_norm", "accumulated")),
        Asked(4, "sparse", ALLREDUCE),
    ],
}
POSEIDON = [
    *(Asked(4, "animals", f"poseidon({how})") for how in ("choose='bytes'", "rate='200mbit'", "")),
    *(Asked(4, "animals", road, servers=2) for road in ("everything", "to-and-fro-collective")),
    Asked(4, "animals_accumulated", "to-and-fro"),
    Asked(4, "two_backwards", "everything-collective"),
    Asked(4, "unused", "everything"),
    Asked(4, "animals", "poseidon(choose='bytes', hierarchical=False)"),
]
CASES_ON_HOSTS = [(hosts, asked) for hosts, all_ in ALL.items() for asked in all_]


def environments(hosts: tuple[int, ...]) -> list[dict[str, str]]:
    """What each rank finds in its environment, so that it is on its host."""
    secret = {"SLIPSTREAM_SECRET": "not a secret in a test", "SLIPSTREAM_ENCRYPT": "0"}
    return [{**secret, "SLIPSTREAM_INTERFACE": f"127.0.0.{1 + host}"} for host in hosts]


@pytest.fixture(scope="module")
def outcome(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[int, ...], Asked], Outcome]:
    """All jobs of a set of hosts run one after the other in the same processes."""

    @cache
    def train(hosts: tuple[int, ...], *, compact: bool) -> Path:
        folder = tmp_path_factory.mktemp("hosts")
        plan = folder / "plan.json"
        jobs, worker = (POSEIDON, POSEIDON_WORKER) if compact else (ALL[hosts], WORKER)
        plan.write_text(json.dumps([asdict(asked) for asked in jobs]))
        run = fork_server.run(
            worker, str(plan), str(folder), ranks=environments(hosts), limit_s=LIMIT_S
        )
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return folder

    def of(hosts: tuple[int, ...], asked: Asked) -> Outcome:
        compact = asked in POSEIDON
        number = (POSEIDON if compact else ALL[hosts]).index(asked)
        return read_outcome(train(hosts, compact=compact), number, asked.workers)

    return of


@pytest.mark.parametrize("asked", POSEIDON, ids=str)
def test_rows_of_a_host_are_stacked_and_all_train_like_one_process(
    asked: Asked, outcome: Callable[[tuple[int, ...], Asked], Outcome]
) -> None:
    got = outcome(UNEVEN, asked)
    assert_equal_throughout(got, STEPS + 1)
    case = (POSEIDON_CASES | CASES)[asked.case]
    wanted = state_of(train_alone(case, asked.optimizer, asked.workers).model)
    for name, tensor in wanted.items():
        assert distance(got.state[name], tensor) <= 1e-5, name


def test_the_rows_of_a_host_travel_once(
    outcome: Callable[[tuple[int, ...], Asked], Outcome],
) -> None:
    """All rows go to the one other host, and not to three other workers."""
    first, flat = (outcome(UNEVEN, POSEIDON[number]).nbytes for number in (0, -1))
    assert flat["rows/mesh"] == pytest.approx(3 * first["rows/mesh"], rel=0.02)


@pytest.mark.parametrize(("hosts", "asked"), CASES_ON_HOSTS, ids=str)
def test_workers_of_hosts_train_like_one_process(
    hosts: tuple[int, ...], asked: Asked, outcome: Callable[[tuple[int, ...], Asked], Outcome]
) -> None:
    got = outcome(hosts, asked)
    assert_equal_throughout(got, STEPS + 1)
    alone = train_alone(CASES[asked.case], asked.optimizer, asked.workers)
    begun, wanted = state_of(CASES[asked.case].model()), state_of(alone.model)
    for name, tensor in wanted.items():
        assert distance(got.state[name], tensor) <= TOLERANCE.get(tensor.dtype, 1e-5), name
    assert any(distance(wanted[name], begun[name]) > 1e-3 for name in wanted)


@pytest.mark.parametrize(("hosts", "strategy"), [(EVEN, ALLREDUCE), (UNEVEN, PUSH_PULL)])
def test_a_gradient_is_none_exactly_where_no_worker_of_any_host_used_the_parameter(
    hosts: tuple[int, ...],
    strategy: str,
    outcome: Callable[[tuple[int, ...], Asked], Outcome],
) -> None:
    asked = next(one for one in ALL[hosts] if (one.case, one.strategy) == ("unused", strategy))
    wanted = train_alone(CASES["unused"], "sgd", 4).notes
    assert any("sometimes.weight" in names for names in wanted)
    assert outcome(hosts, asked).notes == [wanted] * 4


def test_one_stream_a_host_crosses_the_network(
    outcome: Callable[[tuple[int, ...], Asked], Outcome],
) -> None:
    """With one server, on the first host: the other sends all gradients once, gets all back."""
    asked = next(one for one in ALL[UNEVEN] if one.case == "groups")
    nbytes = sum(p.numel() * p.element_size() for p in CASES["groups"].model().parameters())
    assert outcome(UNEVEN, asked).nbytes == {"dense/sharded": 2 * STEPS * nbytes}


@pytest.fixture
def mix(fork_server: ForkServer, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Trains a mix of parts on two hosts of two workers and one."""

    def start(name: str, dtype: str = "float32") -> list[dict[str, Any]]:
        ranks = environments((0, 0, 1))
        run = fork_server.run(MIX_WORKER, name, str(tmp_path), dtype, ranks=ranks)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return start


def test_double_precision_is_exact(mix: Callable[..., list[dict[str, Any]]]) -> None:
    told = mix("averaged at workers", "float64")
    wanted, average = alone(torch.float64, decay=0.8)
    assert len({each["digest"] for each in told}) == 1
    for each in told:
        assert (vector(each["weights"]) - wanted).abs().max() <= 1e-12
        assert (vector(each["averaged"]) - average).abs().max() <= 1e-12


def test_factors_where_servers_update_are_exact(mix: Callable[..., list[dict[str, Any]]]) -> None:
    told = mix("factors, first hosts", "float64")
    wanted, _ = alone(torch.float64)
    assert len({each["digest"] for each in told}) == 1
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert "factors/sharded" in told[2]["stats"]["bytes"]["by_scheme"]


@pytest.mark.parametrize(
    ("name", "away"),
    [
        ("8 bits, hosts first", 0.01),
        ("factors of 8 bits, hosts first", 0.02),
        ("poseidon in 8 bits, hosts first", 0.02),
        ("shares of hosts, 8 bits", 0.01),
        ("low rank, hosts first", 0.4),
    ],
)
def test_lossy_sums_of_hosts_learn_like_exact_ones(
    name: str, away: float, mix: Callable[..., list[dict[str, Any]]]
) -> None:
    told = mix(name)
    wanted, _ = alone(torch.float32)
    moved = (wanted - vector(told[0]["begun"])).norm()
    assert len({each["digest"] for each in told}) == 1
    assert (vector(told[0]["weights"]) - wanted).norm() < away * moved
    assert not told[1]["owed"], "the residual is the host's"
    assert not told[1]["stats"]["bytes"]["sent"], "one stream a host"


def test_what_is_held_back_is_the_hosts(mix: Callable[..., list[dict[str, Any]]]) -> None:
    told = mix("filter, hosts first")
    assert len({each["digest"] for each in told}) == 1
    assert not told[1]["owed"]
    assert all(vector(told[leader]["owed"]).abs().max() > 0 for leader in (0, 2))


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_worker_that_is_killed_is_named_by_all_and_nothing_is_left(
    victim: int, fork_server: ForkServer
) -> None:
    """Rank 2 speaks for its host, ranks 1 and 3 do not."""
    ranks = environments((0, 0, 1, 1))
    run = fork_server.start(FAULT_WORKER, "push_pull", "none", "-1", ranks=ranks)
    until(lambda: run.marked("training"), "all to train")
    run.remains.note_ports(*run.pids)
    os.kill(run.pids[victim], signal.SIGKILL)
    codes = run.wait()
    assert codes[victim] == -signal.SIGKILL
    assert all(code == 69 for rank, code in enumerate(codes) if rank != victim), run.told()
    assert any(f"rank {victim}" in line for line in run.own_lines()), run.told()
    assert run.remains.left() == []


def test_a_hosts_memory_is_given_back_when_its_pair_is_wired_anew(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    run = fork_server.run(REWIRED_WORKER, str(tmp_path), ranks=environments((0, 0, 1)))
    assert set(run.codes.values()) == {0}, run.told()
    told = {(tmp_path / f"{rank}.txt").read_text() for rank in range(3)}
    assert len(told) == 1
    assert told.pop().startswith("[False, False]"), "a handler keeps what is closed"


def test_what_hosts_owe_survives_a_checkpoint(fork_server: ForkServer, tmp_path: Path) -> None:
    strategy = {"SLIPSTREAM_STRATEGY": "push_pull(wire='int8', chunk_bytes=4096)"}
    told = {}
    for doing in ("save", "resume"):
        run = fork_server.run(
            RESIDUALS_WORKER,
            str(tmp_path / "checkpoint"),
            doing,
            ranks=environments((0, 0, 1)),
            env=strategy,
        )
        assert set(run.codes.values()) == {0}, run.told()
        files = [tmp_path / f"{doing}.{rank}.json" for rank in range(3)]
        told[doing] = [json.loads(file.read_text()) for file in files]
    through, resumed = told["save"], told["resume"]
    assert [bool(worker["owed"]) for worker in through] == [True, False, True]
    assert [worker["owed"] for worker in resumed] == [worker["owed"] for worker in through]
    assert {worker["digest"] for worker in resumed} == {through[0]["digest"]}


def test_what_a_user_is_told_of_hosts_and_of_rules_that_match_nothing(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    run = fork_server.run(TOLD_WORKER, str(tmp_path), ranks=environments((0, 0, 1)))
    assert set(run.codes.values()) == {0}, run.told()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    link = "over a host's link (2 hosts; the workers of each aggregate first) each way"
    assert all(link in each["table"] for each in told)
    [warning] = told[0]["warned"]
    assert "no tensor takes the route int8/" in warning
    assert "this model's are bfloat16" in warning
    assert not told[1]["warned"] + told[2]["warned"]
    assert all(each["same"] for each in told), "all workers have the same weights in any case"
