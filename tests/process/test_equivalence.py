"""n workers train like one process on the union batch, and stay equal bit for bit on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import CASES, STEPS, Loop, distance, state_of, train_alone
from fork_server import ForkServer
from outcomes import Asked, Outcome, assert_equal_throughout, read_outcome

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("equivalence_worker.py")
HUGE_WORKER = Path(__file__).with_name("huge_worker.py")
LIMIT_S = 240.0
TOLERANCE = {torch.bfloat16: 5e-2}  # else 1e-5
# Small chunks: tensors are cut, and every server holds several.
CHUNKS = "chunk_bytes=8192"
PUSH_PULL = f"push_pull({CHUNKS})"
PUSH_PULL_AFTER = f"push_pull(overlap=False, {CHUNKS})"
SERVER = f"push_pull(update='server', {CHUNKS})"
SERVER_AFTER = f"push_pull(update='server', overlap=False, {CHUNKS})"
ALLREDUCE = "allreduce(bucket_bytes=16384)"
ALLREDUCE_AFTER = "allreduce(overlap=False, bucket_bytes=16384)"
ALL_TO_ALL = "all_to_all"
UPDATED_BY_WORKERS = (PUSH_PULL, PUSH_PULL_AFTER, ALLREDUCE, ALLREDUCE_AFTER, ALL_TO_ALL)


def matrix() -> list[Asked]:
    """Every strategy on 2, 3 and 5 workers, on 1 to 3 servers, with every optimizer; those without
    overlap with every optimizer on some number of workers."""
    asked = []
    kinds = ("sgd", "adam", "adamw")
    for turn, workers in enumerate((2, 3, 5)):
        for number, strategy in enumerate(UPDATED_BY_WORKERS):
            after = "overlap=False" in strategy
            for kind_number, kind in enumerate([kinds[turn]] if after else kinds):
                servers = 1 + (number + (turn if after else kind_number)) % 3
                if (workers, kind) != (3, "adam"):  # that is what `repetitions` has
                    asked.append(Asked(workers, "groups", strategy, kind, servers))
    # Servers that update take seconds to start: fewer, still each optimizer and each number.
    return [
        *asked,
        Asked(2, "groups", SERVER, "adam", servers=1),
        Asked(3, "groups", SERVER, "sgd", servers=2),
        Asked(5, "groups", SERVER, "adamw", servers=3),
    ]


def peculiarities() -> list[Asked]:
    by_itself = [name for name in CASES if name not in ("plain", "groups", "together", "busy")]
    in_its_steps = ("together", "accumulated", "two_backwards", "clipped", "norm", "sparse")
    in_its_hooks = (
        "absent", "own_buffer", "checkpointed_reentrant", "checkpointed_parts", "quasi_newton",
        "kept",
    )  # fmt: skip
    after = (PUSH_PULL_AFTER, ALLREDUCE_AFTER, ALL_TO_ALL)
    return [
        *(Asked(1, name, PUSH_PULL) for name in CASES),
        *(Asked(2, name, strategy) for name in by_itself for strategy in (PUSH_PULL, ALLREDUCE)),
        *(Asked(3, name, strategy) for name in in_its_steps for strategy in after),
        *(Asked(3, name, after[n % 3]) for n, name in enumerate(in_its_hooks)),
        Asked(2, "together", SERVER),
        Asked(2, "compiled_after", SERVER),
        Asked(2, "two_backwards", SERVER_AFTER),
        Asked(3, "busy", SERVER),
        Asked(3, "norm", SERVER),
    ]


def repetitions() -> list[tuple[Asked, Asked]]:
    """The same twice; the second time nothing but the forward pass waits for the weights."""
    first = [
        *(Asked(3, "groups", strategy, "adam", 2, attempt=1) for strategy in UPDATED_BY_WORKERS),
        Asked(3, "groups", SERVER, "adam", 1, attempt=1),
    ]
    return [(one, Asked(**(asdict(one) | {"look": False, "attempt": 2}))) for one in first]


def short_wires() -> list[Asked]:
    strategies = (
        f"push_pull(wire='bfloat16', {CHUNKS})",
        f"push_pull(wire='float16', {CHUNKS})",
        "allreduce(wire='bfloat16')",
        "allreduce(wire='float16')",
        "all_to_all(wire='bfloat16')",
        "allreduce(wire='int8')",
    )
    return [
        *(Asked(3, "plain", strategy, servers=2) for strategy in strategies),
        *(Asked(3, name, "allreduce(wire='int8')") for name in ("norm", "unused", "groups")),
    ]


ALL = [
    *matrix(),
    *peculiarities(),
    *(one for pair in repetitions() for one in pair),
    *short_wires(),
]


@pytest.fixture(scope="module")
def outcome(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Asked], Outcome]:
    """All jobs of a number of workers run one after the other in the same processes."""

    @cache
    def train(workers: int) -> Path:
        folder = tmp_path_factory.mktemp(f"{workers}-workers")
        plan = folder / "plan.json"
        jobs = [asked for asked in ALL if asked.workers == workers]
        plan.write_text(json.dumps([asdict(asked) for asked in jobs]))
        run = fork_server.run(WORKER, str(plan), str(folder), ranks=workers, limit_s=LIMIT_S)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return folder

    def of(asked: Asked) -> Outcome:
        number = [one for one in ALL if one.workers == asked.workers].index(asked)
        return read_outcome(train(asked.workers), number, asked.workers)

    return of


@cache
def reference(case: str, kind: str, workers: int) -> Loop:
    return train_alone(CASES[case], kind, workers)


def assert_trained_like(asked: Asked, outcome: Outcome, tolerance: float | None = None) -> None:
    case, alone = CASES[asked.case], reference(asked.case, asked.optimizer, asked.workers)
    begun, wanted = state_of(case.model()), state_of(alone.model)
    assert outcome.state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        allowed = tolerance or TOLERANCE.get(tensor.dtype, 1e-5)
        assert distance(outcome.state[name], tensor) <= allowed, name
    for name in case.still:
        assert torch.equal(outcome.state[name], begun[name]), name
    moved = [name for name in wanted if distance(wanted[name], begun[name]) > 1e-3]
    assert moved, "the reference learns nothing, so nothing was compared"


@pytest.mark.parametrize("asked", [*matrix(), *peculiarities()], ids=str)
def test_workers_train_like_one_process(asked: Asked, outcome: Callable[[Asked], Outcome]) -> None:
    got = outcome(asked)
    assert_equal_throughout(got, STEPS + 1)
    assert_trained_like(asked, got)


@pytest.mark.parametrize(("first", "second"), repetitions(), ids=str)
def test_two_runs_agree_bit_for_bit(
    first: Asked, second: Asked, outcome: Callable[[Asked], Outcome]
) -> None:
    one, other = outcome(first), outcome(second)
    assert one.digests[0][-1] == other.digests[0][-1]
    assert_equal_throughout(other, 1)
    assert_trained_like(first, one)


@pytest.mark.parametrize("asked", short_wires(), ids=str)
def test_short_wire_formats_keep_workers_equal(
    asked: Asked, outcome: Callable[[Asked], Outcome]
) -> None:
    got = outcome(asked)
    assert_equal_throughout(got, STEPS + 1)
    assert_trained_like(asked, got, tolerance=0.05)


@pytest.mark.parametrize("strategy", UPDATED_BY_WORKERS)
def test_gradients_between_backward_and_step_are_those_of_the_union_batch(
    strategy: str, outcome: Callable[[Asked], Outcome]
) -> None:
    workers = 2 if strategy in (PUSH_PULL, ALLREDUCE) else 3
    got = outcome(Asked(workers, "clipped", strategy))
    wanted = torch.tensor(reference("clipped", "sgd", workers).notes)
    for notes in got.notes:
        assert distance(torch.tensor(notes), wanted) <= 1e-5


@pytest.mark.parametrize("strategy", [PUSH_PULL, ALLREDUCE])
def test_gradient_is_none_exactly_where_no_worker_used_the_parameter(
    strategy: str, outcome: Callable[[Asked], Outcome]
) -> None:
    got = outcome(Asked(2, "unused", strategy))
    wanted = reference("unused", "sgd", 2).notes
    assert any("sometimes.weight" in names for names in wanted)
    assert got.notes == [wanted, wanted]


@pytest.mark.slow
def test_parameter_larger_than_2_gib(fork_server: ForkServer) -> None:
    run = fork_server.run(HUGE_WORKER, ranks=2, limit_s=280)
    assert list(run.codes.values()) == [0, 0], run.told()
    said = [json.loads(run.stdout(rank)) for rank in range(2)]
    for one in said:
        # Zero minus the mean of place % 1000 + rank, with rank 0's zero as the first weight.
        assert one["weights"] == [-(place % 1000 + 0.5) for place in one["places"]]
        assert one["nbytes"] > 2**31
    assert sum(one["peak_gib"] for one in said) < 14
    assert run.remains.left() == []
