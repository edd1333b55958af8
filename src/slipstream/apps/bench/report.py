"""A comparison's results: a table, and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from slipstream.apps.bench.comparison import Bounds, Comparison, Outcome
from slipstream.apps.bench.trial import Snapshot
from slipstream.apps.bench.workloads import Goal, Workload
from slipstream.printable import printable


def heading(comparison: Comparison, workload: Workload, bounds: Bounds) -> list[str]:
    """Return the lines on what was measured, on which machine, and the lower bounds."""
    links = "unshaped loopback" if comparison.rate is None else f"links of {comparison.rate}"
    batch = comparison.trial.batch or workload.batch
    lines = [
        f"{workload.name}: {workload.what}",
        f"{comparison.workers} worker{'s' * (comparison.workers > 1)}, batch {batch} each, {links}"
        + (f", {comparison.servers} dedicated servers" if comparison.servers else ""),
    ]
    if comparison.trial.device is not None:
        lines.append(
            "EMULATED DEVICE: computing is replaced by waiting; the bytes and the links are real"
        )
    if comparison.trial.straggle:
        lines.append(f"stragglers: {comparison.trial.straggle}")
    if bounds.dense_s is not None and bounds.exact_s is not None:
        lines.append(
            f"a step's least on the wire: {number(bounds.dense_s)} s dense, "
            f"{number(bounds.exact_s)} s by the cheapest exact route of every layer"
        )
    if bounds.compute_s is not None:
        lines.append(f"a step's least computing: {number(bounds.compute_s)} s")
    return lines


def table(
    outcomes: Sequence[Outcome], bounds: Bounds, goal: Goal | None, target: float | None
) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    shown.add_column("system")
    columns = ["s/step", "spread", "ratio", "to bound", "waited", "MB/link"]
    if goal is not None:
        columns.append(goal.metric)
    if target is not None:
        columns += [f"s to {target:g}", "steps"]
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    first = outcomes[0].median_s if outcomes else None
    for outcome in outcomes:
        median, link = outcome.median_s, outcome.link_bytes
        cells = [
            number(median),
            _spread(outcome),
            number(ratio(median, first), digits=2),
            number(ratio(median, bounds.step_s), digits=2),
            number(beyond_computing(outcome, bounds)),
            number(None if link is None else link / 1e6, digits=2),
        ]
        if goal is not None:
            cells.append(number(outcome.metric, digits=4))
        if goal is not None and target is not None:
            cells += [
                _time_to(outcome, goal, target),
                number(median_steps(outcome, goal, target), digits=0),
            ]
        shown.add_row(Text(printable(_name(outcome))), *cells)
    return shown


def _spread(outcome: Outcome) -> str:
    return f"{min(outcome.step_s):.3f}-{max(outcome.step_s):.3f}" if outcome.runs else "-"


def _name(outcome: Outcome) -> str:
    failed = len(outcome.failures)
    return outcome.system + (
        f" ({failed} of {failed + len(outcome.runs)} failed)" if failed else ""
    )


def _time_to(outcome: Outcome, goal: Goal, target: float) -> str:
    seconds = median_time(outcome, goal, target)
    return number(seconds, digits=1) if seconds is not None else "not reached"


def median_time(outcome: Outcome, goal: Goal, target: float) -> float | None:
    """Return the median time to the target over runs; None if a run did not reach it."""
    return _median_of(outcome, goal, target, lambda snapshot: snapshot.seconds)


def median_steps(outcome: Outcome, goal: Goal, target: float) -> float | None:
    """Return the same in steps since the clock started."""
    return _median_of(outcome, goal, target, lambda snapshot: snapshot.step)


def _median_of(
    outcome: Outcome, goal: Goal, target: float, figure: Callable[[Snapshot], float]
) -> float | None:
    reached = outcome.reached(goal.at(target).reached)
    known = [figure(snapshot) for snapshot in reached if snapshot is not None]
    return statistics.median(known) if known and len(known) == len(reached) else None


def to_target(
    comparison: Comparison, workload: Workload, outcome: Outcome
) -> dict[str, float | None]:
    """Return the time, steps, bytes and so on to the target; None where it was not reached.

    Samples are those of all workers, with those of the steps before the clock started.
    """
    goal, target = workload.goal, comparison.target
    seconds = steps = None
    if goal is not None and target is not None:
        seconds = median_time(outcome, goal, target)
        steps = median_steps(outcome, goal, target)
    batch = (comparison.trial.batch or workload.batch) * comparison.workers
    samples = None if steps is None else (comparison.trial.warmup + steps) * batch
    return {
        "seconds_to_target": seconds,
        "steps_to_target": steps,
        "samples_to_target": samples,
    }


def beyond_computing(outcome: Outcome, bounds: Bounds) -> float | None:
    """Return the step time minus that without an exchange: waiting, and the exchange's own work."""
    if outcome.median_s is None or bounds.compute_s is None:
        return None
    return max(0.0, outcome.median_s - bounds.compute_s)


def ratio(value: float | None, to: float | None) -> float | None:
    return value / to if value is not None and to else None


def number(value: float | None, *, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_json(
    comparison: Comparison,
    workload: Workload,
    outcomes: Sequence[Outcome],
    bounds: Bounds,
    machine: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    first = outcomes[0].median_s if outcomes else None
    goal = workload.goal
    return {
        "command": command,
        "machine": machine,
        "workload": {"name": workload.name, "what": workload.what},
        "metric": None
        if goal is None
        else {"name": goal.metric, "higher_is_better": goal.higher_is_better},
        "emulated_device": comparison.trial.device,
        "comparison": msgspec.to_builtins(comparison),
        "bounds": msgspec.to_builtins(bounds),
        "results": [
            {
                "system": outcome.system,
                "steps": outcome.steps,
                "median_s": outcome.median_s,
                "ratio_to_first": ratio(outcome.median_s, first),
                "ratio_to_bound": ratio(outcome.median_s, bounds.step_s),
                "waited_s": beyond_computing(outcome, bounds),
                "busiest_link_bytes_per_step": outcome.link_bytes,
                "metric": outcome.metric,
                **to_target(comparison, workload, outcome),
                "runs": msgspec.to_builtins(outcome.runs),
                "failures": outcome.failures,
            }
            for outcome in outcomes
        ],
    }
