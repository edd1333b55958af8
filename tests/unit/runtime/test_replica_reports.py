"""The comparison of workers' reports on their replicas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slipstream.runtime.figures.replica_reports import (
    KEPT,
    Difference,
    ReplicaComparison,
    ReplicaReport,
)

NAMES = ("first", "second")


def report(step: int, sums: tuple[int, int] = (1, 2), **facts: Any) -> ReplicaReport:
    same = ReplicaReport(step, list(sums), [5, 6], [step, step], [], [], [{"lr": "0.1"}], [0, 0])
    return msgspec.structs.replace(same, **facts)


def compared(*pairs: tuple[ReplicaReport, ReplicaReport]) -> Difference | None:
    comparison = ReplicaComparison(NAMES)
    found = None
    for own, other in pairs:
        comparison.add_own(own)
        comparison.add(1, other)
        found = comparison.find()
    return found


def test_comparison_of_equal_replicas_finds_nothing() -> None:
    assert compared((report(0), report(0)), (report(8, (3, 3)), report(8, (3, 3)))) is None


def test_comparison_names_the_first_parameter_and_the_window() -> None:
    found = compared(
        (report(0), report(0)), (report(8), report(8)), (report(64), report(64, (1, 9)))
    )
    assert found is not None
    assert (found.rank, found.parameter) == (1, "second")
    assert found.since == "since one of the steps 9 to 64"


def test_comparison_before_the_first_step_says_so() -> None:
    found = compared((report(0), report(0, (9, 2))))
    assert found is not None
    assert found.since == "since the first step or before"


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        pytest.param({"settings": [{"lr": "0.2"}]}, "lr of the optimizer's group 0", id="settings"),
        pytest.param({"outside": [0]}, "it was changed outside", id="outside"),
        pytest.param({"outside": [1]}, "gradients and settings were the same", id="other outside"),
        pytest.param({"writes": [9, 8]}, "written 9 times there and 8 on rank 0", id="writes"),
        pytest.param({"gradients": [7, 6]}, "step() used other gradients there", id="gradients"),
        pytest.param({"gradients": []}, "gradients and settings were the same", id="unknown"),
    ],
)
def test_comparison_gives_the_cause(facts: dict[str, Any], cause: str) -> None:
    found = compared((report(0), report(0)), (report(8), report(8, (9, 2), **facts)))
    assert found is not None
    assert cause in found.cause
    assert ("job.mean" in found.cause) == ("settings" in facts), "only then a scheduler is named"


def test_comparison_waits_for_rank_0s_report_of_the_same_step() -> None:
    comparison = ReplicaComparison(NAMES)
    comparison.add(1, report(8, (9, 2)))
    assert comparison.find() is None
    comparison.add_own(report(8))
    assert comparison.find() is not None


def test_comparison_keeps_few_reports_of_a_rank_that_is_ahead_or_lost() -> None:
    comparison = ReplicaComparison(NAMES)
    for step in range(100):
        comparison.add(1, report(step, (9, 9)))
        comparison.add_own(report(1000 + step))
    assert comparison.find() is None
    assert len(comparison._others[1]) == len(comparison._own) == KEPT


def test_comparison_names_what_ranks_have_handed_to_servers_differently() -> None:
    found = compared((report(0), report(0)), (report(8), report(8, handed=[0, 3])))
    assert found is not None
    assert (found.rank, found.parameter, found.is_over) == (1, "second", True)
    assert "the servers took rank 0's values" in found.text
