"""Workers' reports on replicas that should be equal, and the cause of a difference. Pure.

Every worker reports one sum a tensor, in a few steps; rank 0 compares each report with its own of
the same step. Reports also record what the loop did, so that a difference comes with its cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

KEPT = 4  # reports of each rank; workers in step are at most one report apart


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """A report on one worker's replica, between two steps.

    Attributes:
        step: The number of steps that have ended.
        sums: Sums of the weights, by parameter; equal for equal bits.
        gradients: Sums of what the optimizer uses in the next step; empty if it is unknown.
        writes: By parameter, how often autograd has seen it written since the job began.
        outside: Parameters that were written between the last ``step()`` and this report.
        replaced: Names of the model's parameters that took no part in ``job.distribute``.
        settings: The optimizer's settings, by parameter group.
        handed: By parameter: a number for what the loop has written into it, if servers update and
            their weights replace that; else 0.
    """

    step: int
    sums: list[int]
    gradients: list[int]
    writes: list[int]
    outside: list[int]
    replaced: list[str]
    settings: list[dict[str, str]]
    handed: list[int]


class Difference(NamedTuple):
    """The first parameter that differs between a rank and rank 0, since when, and why."""

    rank: int
    parameter: str
    since: str
    cause: str
    is_reported: bool = False  # during training
    is_over: bool = False  # since servers' weights have replaced it

    @property
    def text(self) -> str:
        """The end of a sentence about the difference."""
        return f"{self.parameter!r} is the first that differs, {self.since}; {self.cause}"


class ReplicaComparison:
    """Rank 0's comparison of one model's replicas; keeps few reports, whoever is lost.

    Args:
        names: The names of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._own: deque[ReplicaReport] = deque(maxlen=KEPT)
        self._others: dict[int, deque[ReplicaReport]] = {}
        self._equal: dict[int, tuple[ReplicaReport, ReplicaReport]] = {}  # rank 0's and the rank's

    def add_own(self, report: ReplicaReport) -> None:
        """Add rank 0's report."""
        self._own.append(report)

    def add(self, rank: int, report: ReplicaReport) -> None:
        """Add another rank's report."""
        self._others.setdefault(rank, deque(maxlen=KEPT)).append(report)

    def find(self) -> Difference | None:
        """Compare the reports of equal steps; return the first difference."""
        own = {report.step: report for report in self._own}
        for rank, reports in sorted(self._others.items()):
            waiting = [report for report in reports if report.step not in own]
            for report in [report for report in reports if report.step in own]:
                difference = self._compare(rank, own[report.step], report)
                if difference is not None:
                    return difference
                self._equal[rank] = own[report.step], report
            reports.clear()
            reports.extend(waiting)
        return None

    def _compare(self, rank: int, one: ReplicaReport, two: ReplicaReport) -> Difference | None:
        differ = [i for i, (a, b) in enumerate(zip(one.sums, two.sums, strict=False)) if a != b]
        before = self._equal.get(rank)
        since = window(None if before is None else before[0].step, one.step)
        if differ:
            cause = cause_of(differ[0], one, two, before)
            return Difference(rank, self._names[differ[0]], since, cause)
        handed = [i for i, (a, b) in enumerate(zip(one.handed, two.handed, strict=False)) if a != b]
        if handed:
            return Difference(rank, self._names[handed[0]], since, HANDED, is_over=True)
        return None


def difference_of_replaced(
    one: ReplicaReport, others: Sequence[tuple[int, ReplicaReport]]
) -> Difference | None:
    """Return a difference at the end of a run whose distributed parameters are all equal."""
    for rank, two in others:
        if replaced := [*one.replaced, *two.replaced]:
            return Difference(rank, replaced[0], "since it was replaced", REPLACED)
    return None


def window(equal: int | None, step: int) -> str:
    """Return when replicas began to differ: after one step they were equal, after another not."""
    if not step:
        return "since the first step or before"
    if equal is None:
        return f"since step {step} or before"
    return f"since one of the steps {equal + 1} to {step}"


def cause_of(
    tensor: int,
    one: ReplicaReport,
    two: ReplicaReport,
    before: tuple[ReplicaReport, ReplicaReport] | None,
) -> str:
    """Return why a parameter differs between rank 0's report and another rank's.

    Args:
        before: The last reports of both ranks in which the parameter was equal.
    """
    if setting := differing_setting(one.settings, two.settings):
        return setting
    if tensor in one.outside or tensor in two.outside:
        return WRITTEN
    if before is not None:
        on_first, on_other = (
            now.writes[tensor] - then.writes[tensor]
            for now, then in zip((one, two), before, strict=True)
        )
        if on_first != on_other:
            writes = f"{on_other} times there and {on_first} on rank 0"
            return f"since then it was written {writes}: {WRITTEN}"
    if one.gradients and two.gradients and one.gradients[tensor] != two.gradients[tensor]:
        return CHANGED_GRADIENT
    return UNKNOWN


def differing_setting(first: Sequence[dict[str, str]], other: Sequence[dict[str, str]]) -> str:
    """Return which setting of the optimizers differs from rank 0's; empty if none does."""
    for group, (one, two) in enumerate(zip(first, other, strict=False)):
        for key in sorted(one.keys() & two.keys()):
            if one[key] != two[key]:
                return (
                    f"{key} of the optimizer's group {group} is {two[key]} there and {one[key]} on "
                    "rank 0. A learning rate must follow the same loss on all ranks: "
                    "scheduler.step(job.mean(loss))"
                )
    return ""


WRITTEN = (
    "it was changed outside of the optimizer that was distributed (by another optimizer, one that "
    "steps in backward hooks, a forward pass with max_norm, a checkpoint loaded on one rank, or by "
    "hand). Make the same change on all ranks, or load with job.load"
)
HANDED = (
    "the loop has changed it outside of the optimizer, and differently on both ranks: the servers "
    "took rank 0's values, and lost the others. Make the same change on all ranks, or load with "
    "job.load"
)
CHANGED_GRADIENT = (
    "step() used other gradients there: they were changed after backward(), which had exchanged "
    "them, and differently on the ranks. Change them before they are sent, within the loss, or in "
    "the same way from numbers that all ranks share"
)
UNKNOWN = (
    "gradients and settings were the same, and nothing else wrote to it at the time of the check: "
    "the optimizer's settings or its state differed for a while (a state loaded on one rank), or "
    "weights were changed outside of the optimizer"
)
REPLACED = (
    "it is not the parameter that job.distribute was given: a part of the model was replaced since "
    "then. Replace it, and make its optimizer, before job.distribute"
)
