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


@pytest.mark.parametrize("strategy", [gadei(), gadei(apply="direct")], ids=str)
def test_learners_may_end_while_others_still_train(strategy: Strategy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended(strategy)
