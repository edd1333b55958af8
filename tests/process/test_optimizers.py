"""What loops do with their optimizer: in every system exact, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch
from optimizers_worker import STEPS, WORKERS, alone

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("optimizers_worker.py")
LIMIT_S = 240.0
BY_SERVERS = "push_pull(update='server')"
FIRST_OF = "backup_workers(first=2)"
BOUNDED = "bounded_staleness(s=0)"
ASYNC = "async_sgd"
AHEAD = "parameter_flow(staleness=1)"
POSEIDON = "poseidon(rate='1gbit', gemm_gflops=50, server_gbytes=5)"
DILOCO = "diloco(every=2)"
EXACT = 2e-6

# Habit and systems in which a job makes of the weights what one process makes of them.
SAME = [
    ("hooks", (BY_SERVERS, FIRST_OF, "push_pull")),
    ("hooks_of_scaled", (BY_SERVERS, "ako")),
    ("replaced", ("push_pull",)),
    ("replaced_wholly", ("allreduce",)),
    ("scheduled", (BY_SERVERS,)),
    ("second_phase", ("push_pull", "allreduce", POSEIDON)),
    ("wrapped", ("push_pull",)),
    ("wrapping", ("push_pull",)),
    ("lookahead", ("push_pull",)),
    ("attributes", ("ako", AHEAD)),
    ("average", (BY_SERVERS, FIRST_OF)),
    ("vector", (BY_SERVERS,)),
    ("clamped_late", (BY_SERVERS,)),
    ("read_nan", (ASYNC,)),
    ("cleared", (BY_SERVERS,)),
    ("new_state", (BY_SERVERS,)),
]
# Habit, systems, and what the error says.
REFUSED = [
    (
        "replaced",
        (BY_SERVERS, ASYNC),
        ("ConfigError", "SGD.step was replaced", "register_step_pre_hook"),
    ),
    (
        "second_phase",
        (BY_SERVERS, BOUNDED, "ako", AHEAD, DILOCO, "push_pull(averaged=0.9)"),
        ("RuntimeFault", "SGD has made a step on '0.weight'", "before the first step"),
    ),
    ("wrapping", (BY_SERVERS,), ("RuntimeFault", "call job.wait() before")),
    ("stateless", ("ako",), ("ConfigError", "Stateless has no param_groups")),
    (
        "changing_method",
        ("ako", AHEAD),
        ("RuntimeFault", "Switched.evaluate() has changed weights", "push_pull()"),
    ),
    ("vector", (ASYNC,), ("RuntimeFault", "weights were changed")),
    ("clamped_late", (FIRST_OF,), ("RuntimeFault", "weights were changed")),
    ("cleared", (ASYNC,), ("ConfigError", "before the first step")),
    ("state_by_hand", (BY_SERVERS,), ("RuntimeFault", "state was changed by hand")),
]
# They run, and each worker's own weights differ from one process's, as the systems say.
RUNS = [
    ("hooks", (ASYNC, "ako", AHEAD, DILOCO)),
    ("wrapped", ("ako", DILOCO)),
    ("lookahead", ("ako", DILOCO)),
    ("replaced", ("ako",)),
]


def cases() -> list[tuple[str, str]]:
    table = [*SAME, *((habit, systems) for habit, systems, _ in REFUSED), *RUNS]
    return [(system, habit) for habit, systems in table for system in systems]


Seen = dict[tuple[str, str], list[Any]]  # by system and habit: what each rank saw


@pytest.fixture(scope="module")
def seen(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "plan.json").write_text(json.dumps(cases()))
    plan = str(folder / "plan.json")
    run = fork_server.run(WORKER, plan, str(folder), ranks=WORKERS, limit_s=LIMIT_S)
    assert set(run.codes.values()) == {0}, run.told()
    assert run.remains.left() == []
    return {case: read(folder, number) for number, case in enumerate(cases())}


def read(folder: Path, number: int, workers: int = WORKERS) -> list[Any]:
    return [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(workers)]


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for each, other in zip(found, wanted, strict=True):
            assert_same(each, other)
    elif isinstance(wanted, float):
        assert abs(found - wanted) <= EXACT
    else:
        assert found == wanted


def rows(table: list[Any]) -> list[Any]:
    return [
        pytest.param(*row[:1], system, *row[2:], id=f"{row[0]} {system.partition('(')[0]}{number}")
        for row in table
        for number, system in enumerate(row[1])
    ]


@pytest.mark.parametrize(("habit", "system"), rows(SAME))
def test_optimizer_habit_in_a_job_does_what_it_does_in_one_process(
    habit: str, system: str, seen: Seen
) -> None:
    for told in seen[system, habit]:
        assert "error" not in told, told["error"]
        assert_same(told["seen"], alone(habit))


@pytest.mark.parametrize(("habit", "system", "says"), rows(REFUSED))
def test_optimizer_habit_that_would_go_wrong_is_refused_by_name(
    habit: str, system: str, says: tuple[str, ...], seen: Seen
) -> None:
    kind, *fragments = says
    errors = [told.get("error", "") for told in seen[system, habit]]
    assert any(error.startswith(kind) for error in errors), errors
    assert all(fragment in error for error in errors for fragment in fragments), errors


@pytest.mark.parametrize(("habit", "system"), rows(RUNS))
def test_optimizer_habit_runs_where_workers_are_not_one_process(
    habit: str, system: str, seen: Seen
) -> None:
    told = seen[system, habit]
    assert all("error" not in each for each in told), told
    if habit == "hooks":
        counts = [[len(calls) for calls in each["seen"]] for each in told]
        assert counts == [[STEPS, STEPS]] * WORKERS


LEARNERS = {
    "hooks": (),
    "replaced": ("ConfigError", "SGD.step was replaced"),
    "second_phase": ("RuntimeFault", "SGD has made a step on '0.weight'"),
}


def test_learner_with_each_optimizer_habit_runs_it_or_refuses_it_by_name(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    """A learner alone, so that its own steps are all."""
    runs = {}
    for habit in LEARNERS:
        folder = tmp_path / habit
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps([("gadei", habit)]))
        arguments = "--workers=1", "--strategy=gadei", str(WORKER), str(folder / "plan.json")
        runs[habit] = launch(SLIPSTREAM, "run", *arguments, str(folder))
    for habit, run in runs.items():
        says, code = LEARNERS[habit], run.wait()
        assert says or code == 0, run.stderr
        (told,) = read(tmp_path / habit, 0, workers=1)
        if says:
            assert all(fragment in told["error"] for fragment in says), told
        else:
            before, after = told["seen"]
            assert len(before) == STEPS
            assert_same(before, after)
            assert len({tuple(weights) for weights in before}) == STEPS
            assert_same(before[-1], told["weights"])
