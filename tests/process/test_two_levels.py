"""Workers of two hosts: each host's aggregate first; all train like one process, bit for bit alike.

Hosts are addresses of the loopback here: workers that listen at the same one share memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import CASES, STEPS, distance, state_of, train_alone
from fork_server import ForkServer
from outcomes import Asked, Outcome, assert_equal_throughout, read_outcome

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("equivalence_worker.py")
LIMIT_S = 180.0
PUSH_PULL = "push_pull(chunk_bytes=8192)"
AFTER = "push_pull(overlap=False, chunk_bytes=8192)"
ALLREDUCE = "allreduce(bucket_bytes=16384)"
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
        Asked(4, "groups", "push_pull(hosts='flat', chunk_bytes=8192)", servers=2),
    ],
    UNEVEN: [
        *(Asked(4, case, PUSH_PULL, servers=1) for case in ON_UNEVEN),
        Asked(4, "groups", AFTER, "adam", servers=2),
        Asked(4, "groups", ALLREDUCE),
        Asked(4, "sparse", ALLREDUCE),
    ],
}
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
    def train(hosts: tuple[int, ...]) -> Path:
        folder = tmp_path_factory.mktemp("hosts")
        plan = folder / "plan.json"
        plan.write_text(json.dumps([asdict(asked) for asked in ALL[hosts]]))
        run = fork_server.run(
            WORKER, str(plan), str(folder), ranks=environments(hosts), limit_s=LIMIT_S
        )
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return folder

    def of(hosts: tuple[int, ...], asked: Asked) -> Outcome:
        return read_outcome(train(hosts), ALL[hosts].index(asked), asked.workers)

    return of


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
