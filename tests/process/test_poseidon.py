"""Factors and rows instead of dense gradients: the same training, and the same on every worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import CASES, STEPS, distance, state_of, train_alone
from fork_server import ForkServer
from outcomes import Asked, Outcome, assert_equal_throughout, read_outcome
from poseidon_cases import POSEIDON_CASES

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("poseidon_worker.py")
FORGER = Path(__file__).with_name("compact_forger.py")
LIMIT_S = 150.0
BYTES, SLOW, MEASURED = "poseidon(choose='bytes')", "poseidon(rate='200mbit')", "poseidon()"
EVERYTHING, TO_AND_FRO = "everything", "to-and-fro"
IN_DOUBLE = ("assigned", "always_assigned")
# What they do has nothing to do with compact gradients, or takes long.
LEFT_OUT = (
    "plain", "groups", "scheduled_before", "many", "compiled_before", "norm", "absent_norm",
    "own_buffer", "layouts", "frozen", "tied", "quasi_newton", "unoptimized", "accumulated",
    "checkpointed", "together",
)  # fmt: skip


def trained_like_one_process() -> list[Asked]:
    named = [name for name in CASES if name not in (*LEFT_OUT, "autocast")]
    apart = ("animals_checkpointed", "autocast", "norm_last")
    own = [name for name in POSEIDON_CASES if name not in (*CASES, *apart)]
    return [
        *(Asked(n, "animals", system) for n in (2, 3, 5) for system in (BYTES, SLOW, MEASURED)),
        *(Asked(3, name, EVERYTHING, servers=2) for name in own),
        *(Asked(2, name, EVERYTHING) for name in named),
        Asked(2, "two_backwards", "everything-collective"),
        Asked(2, "animals_checkpointed", EVERYTHING),
        Asked(2, "norm_last", f"{TO_AND_FRO}-collective"),
        *(Asked(3, "animals", f"{TO_AND_FRO}{road}") for road in ("", "-collective")),
        *(Asked(3, "animals_accumulated", f"{TO_AND_FRO}{road}") for road in ("", "-collective")),
        *(Asked(3, name, system) for name in IN_DOUBLE for system in (SLOW, TO_AND_FRO)),
        Asked(2, "always_assigned", "adam_factors"),
    ]


def repetitions() -> list[Asked]:
    return [
        Asked(3, "animals", EVERYTHING, servers=2, look=False, attempt=2),
        Asked(3, "animals", f"{TO_AND_FRO}-collective", look=False, attempt=2),
        Asked(5, "animals", BYTES, look=False, attempt=2),
    ]


def in_short_formats() -> list[tuple[Asked, float]]:
    return [
        (Asked(2, "animals", "everything-bfloat16"), 0.02),
        (Asked(2, "animals", "everything-int8"), 0.05),
        (Asked(3, "animals", "to-and-fro-int8"), 0.05),
        (Asked(2, "autocast", EVERYTHING), 0.02),
    ]


DENSE_AUTOCAST = Asked(2, "autocast", "push_pull")
ALL = [
    *trained_like_one_process(),
    *repetitions(),
    *(asked for asked, _ in in_short_formats()),
    DENSE_AUTOCAST,
]


@pytest.fixture(scope="module")
def outcome(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Asked], Outcome]:
    @cache
    def train(workers: int) -> Path:
        folder = tmp_path_factory.mktemp(f"poseidon-{workers}-workers")
        plan = folder / "plan.json"
        plan.write_text(json.dumps([asdict(asked) for asked in ALL if asked.workers == workers]))
        run = fork_server.run(WORKER, str(plan), str(folder), ranks=workers, limit_s=LIMIT_S)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return folder

    def of(asked: Asked) -> Outcome:
        number = [one for one in ALL if one.workers == asked.workers].index(asked)
        return read_outcome(train(asked.workers), number, asked.workers)

    return of


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of two, on cores that others use as well, each spins while it waits for the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def reference(case: str, workers: int) -> dict[str, torch.Tensor]:
    return state_of(train_alone(POSEIDON_CASES[case], "sgd", workers).model)


def assert_trained_like(asked: Asked, got: Outcome, tolerance: float | None = None) -> None:
    begun = state_of(POSEIDON_CASES[asked.case].model())
    moved = 0.0
    for name, wanted in reference(asked.case, asked.workers).items():
        allowed = tolerance or (5e-2 if wanted.dtype == torch.bfloat16 else 1e-5)
        assert distance(got.state[name], wanted) <= allowed, name
        moved = max(moved, distance(wanted, begun[name]))
    assert moved > 1e-3, "the reference learns nothing, so nothing was compared"


@pytest.mark.parametrize("asked", trained_like_one_process(), ids=str)
def test_workers_train_like_one_process(asked: Asked, outcome: Callable[[Asked], Outcome]) -> None:
    got = outcome(asked)
    assert_equal_throughout(got, STEPS + 1)
    assert_trained_like(asked, got, 1e-12 if asked.case in IN_DOUBLE else None)


@pytest.mark.parametrize(
    "asked",
    [
        asked
        for asked in trained_like_one_process()
        if asked.case == "animals"
        and asked.strategy not in (MEASURED, EVERYTHING)
        and (asked.workers, asked.strategy) != (5, SLOW)  # dense is cheaper there for full batches
    ],
    ids=str,
)
def test_gradients_travelled_in_every_form(
    asked: Asked, outcome: Callable[[Asked], Outcome]
) -> None:
    """Otherwise the tests above would say nothing; what is measured may choose as it likes."""
    forms = {scheme.partition("/")[0] for scheme, nbytes in outcome(asked).nbytes.items() if nbytes}
    assert forms >= {"factors", "rows", "dense"}


@pytest.mark.parametrize("second", repetitions(), ids=str)
def test_two_runs_agree_bit_for_bit(second: Asked, outcome: Callable[[Asked], Outcome]) -> None:
    first = replace(second, look=True, attempt=0)
    assert outcome(first).digests[0][-1] == outcome(second).digests[0][-1]


@pytest.mark.parametrize(("asked", "tolerance"), in_short_formats(), ids=str)
def test_short_formats(asked: Asked, tolerance: float, outcome: Callable[[Asked], Outcome]) -> None:
    got = outcome(asked)
    assert_equal_throughout(got, STEPS + 1)
    assert_trained_like(asked, got, tolerance)


def test_autocast_is_like_dense_training_under_it(outcome: Callable[[Asked], Outcome]) -> None:
    compact, dense = outcome(Asked(2, "autocast", EVERYTHING)), outcome(DENSE_AUTOCAST)
    for name, tensor in dense.state.items():
        assert distance(compact.state[name], tensor) <= 0.02, name


def test_gradient_is_none_exactly_where_no_worker_used_the_parameter(
    outcome: Callable[[Asked], Outcome],
) -> None:
    wanted = train_alone(CASES["unused"], "sgd", 2).notes
    assert outcome(Asked(2, "unused", EVERYTHING)).notes == [wanted, wanted]


def test_compact_gradients_that_fit_nothing_are_refused(fork_server: ForkServer) -> None:
    run = fork_server.run(FORGER, ranks=2)
    assert run.codes == {0: 0, 1: 0}, run.told()
    undisturbed, disturbed = run.stdout(0).splitlines()
    assert undisturbed.rpartition(" ")[2] == "0"
    assert disturbed.rpartition(" ")[2] == run.stdout(1).strip()
    assert undisturbed.rpartition(" ")[0] == disturbed.rpartition(" ")[0]
    assert run.remains.left() == []
