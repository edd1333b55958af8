"""Warnings at the end of a job."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from slipstream.job_figures import warn_of
from slipstream.strategy import Strategy
from slipstream.systems import gadei, push_pull
from slipstream.types import Cluster, Spec

SPECS = [Spec("w", (4,), "float32", 0)]


def ended(strategy: Strategy) -> None:
    """Two workers have ended with different weights."""
    per_worker: list[dict[str, Any]] = [
        {"rank": rank, "parameters_sha256": str(rank), "settings": [{"lr": "0.1"}]}
        for rank in range(2)
    ]
    plan = strategy.plan(SPECS, Cluster(2, servers=1))
    warn_of({"per_worker": per_worker, "dropped": {}}, plan, dealt=True)


def test_replicas_that_differ_are_told_where_they_should_not() -> None:
    with pytest.warns(UserWarning, match="rank 1 has ended with other weights than rank 0"):
        ended(push_pull())


def test_changes_that_servers_have_replaced_are_told_once() -> None:
    plan = push_pull(update="server").plan(SPECS, Cluster(2, servers=1))
    found = {"rank": 1, "parameter": "w", "since": "since step 3", "cause": "why", "is_over": True}
    same = [{"rank": rank, "parameters_sha256": "0", "settings": []} for rank in range(2)]
    summary = {"per_worker": same, "dropped": {}, "difference": found}
    with pytest.warns(UserWarning, match="rank 1 has trained with other weights than rank 0"):
        warn_of(summary, plan, dealt=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of(summary | {"difference": found | {"is_reported": True}}, plan, dealt=True)


@pytest.mark.parametrize("strategy", [gadei(), gadei(apply="direct")], ids=str)
def test_learners_may_end_while_others_still_train(strategy: Strategy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended(strategy)
