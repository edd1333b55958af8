"""What a comparison says about its runs, those that failed too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from slipstream.apps.bench.comparison import Bounds, Comparison, Outcome, Run
from slipstream.apps.bench.report import as_json, heading, median_time, table
from slipstream.apps.bench.trial import Judgement, Snapshot, Timing, Trial
from slipstream.apps.bench.workloads import Goal, Workload, workload
from slipstream.apps.lab import Traffic

BOUNDS = Bounds(dense_s=0.4, exact_s=0.1, compute_s=0.2)


def run(step_s: float, *curve: float, links: tuple[Traffic, ...] = ()) -> Run:
    """One worker; ``curve`` is the metric after each second."""
    snapshots = [Snapshot(step, float(step), value) for step, value in enumerate(curve, start=1)]
    metric = curve[-1] if curve else None
    return Run(
        step_s=step_s,
        timings=(Timing(2 * step_s, step_s, [step_s] * 2, step_s / 2),),
        judgements=(Judgement(metric, snapshots, {}),),
        links=links,
    )


def outcome(system: str, *runs: Run, failures: int = 0, steps: int = 2) -> Outcome:
    return Outcome(system, steps, list(runs), ["rank 0 ended: ValueError"] * failures)


def shown(outcomes: list[Outcome], goal: Goal | None = None, target: float | None = None) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table(outcomes, BOUNDS, goal, target))
    return capture.get()


def row(text: str, system: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.strip().startswith(system)]
    return line.split()


@pytest.fixture(scope="module")
def learning() -> Workload:
    return workload("text")


@pytest.fixture(scope="module")
def goal(learning: Workload) -> Goal:
    assert learning.goal is not None
    return learning.goal


def test_medians_ratios_and_waits() -> None:
    links = (Traffic(1_000_000, 3_000_000), Traffic(2_000_000, 500_000))
    first = outcome("ddp", run(0.5, links=links), run(0.3, links=links), run(0.4, links=links))
    text = shown([first, outcome("push_pull", run(0.6))])
    assert row(text, "ddp") == ["ddp", "0.400", "0.300-0.500", "1.00", "2.00", "0.200", "1.50"]
    assert row(text, "push_pull") == [
        *("push_pull", "0.600", "0.600-0.600", "1.50", "3.00", "0.400", "-")
    ]


def test_failed_runs_are_counted_and_the_rest_goes_on() -> None:
    text = shown(
        [
            outcome("ddp", failures=3),
            outcome("allreduce", run(0.4), failures=2),
            outcome("local", run(0.3)),
        ]
    )
    assert row(text, "ddp") == ["ddp", "(3", "of", "3", "failed)", *["-"] * 6]
    # Nothing to compare with: the first has no time.
    assert row(text, "allreduce")[:7] == [
        *("allreduce", "(2", "of", "3", "failed)", "0.400", "0.400-0.400")
    ]
    assert row(text, "allreduce")[7] == "-"
    assert row(text, "local")[:2] == ["local", "0.300"]


def test_time_to_a_target(goal: Goal) -> None:
    there = outcome("ddp", run(0.1, 0.2, 0.8, 0.9), run(0.1, 0.1, 0.2, 0.9), run(0.1, 0.8))
    assert median_time(there, goal, 0.8) == 2.0
    reached = there.reached(lambda metric: metric >= 0.8)
    assert [snapshot and snapshot.seconds for snapshot in reached] == [2.0, 3.0, 1.0]
    not_there = outcome("local", run(0.1, 0.9), run(0.1, 0.7))
    assert median_time(not_there, goal, 0.8) is None
    text = shown([there, not_there], goal, 0.8)
    assert "s to 0.8" in text
    assert row(text, "ddp")[-2:] == ["2.0", "2"]
    assert row(text, "local")[-3:] == ["not", "reached", "-"]


def test_an_error_is_reached_from_above() -> None:
    goal = workload("mf").goal
    assert goal is not None
    assert median_time(outcome("ddp", run(0.1, 0.9, 0.5, 0.3)), goal, 0.5) == 2.0


def test_json_has_all_of_it(learning: Workload) -> None:
    comparison = Comparison(
        trial=Trial(workload="text", device="50", straggle="worker:1:x2"),
        systems=("ddp", "local"),
        rate="1gbit",
        target=0.5,
    )
    outcomes = [
        outcome("ddp", run(0.4, 0.4, 0.6), failures=1),
        outcome("local", failures=2),
    ]
    report = json.loads(
        json.dumps(as_json(comparison, learning, outcomes, BOUNDS, {"cores": 2}, "slipstream x"))
    )
    assert report["command"] == "slipstream x"
    assert report["machine"] == {"cores": 2}
    assert report["emulated_device"] == "50"
    assert report["comparison"]["systems"] == ["ddp", "local"]
    assert report["bounds"] == {"dense_s": 0.4, "exact_s": 0.1, "compute_s": 0.2}
    ddp, local = report["results"]
    figures = {key: ddp[key] for key in ("median_s", "ratio_to_first", "ratio_to_bound")}
    assert figures == {"median_s": 0.4, "ratio_to_first": 1.0, "ratio_to_bound": 2.0}
    assert ddp["waited_s"] == pytest.approx(0.2)
    assert (ddp["seconds_to_target"], ddp["steps_to_target"]) == (2.0, 2)
    # Of 4 workers with 4 rows each, 3 steps before the clock started and 2 after.
    assert ddp["samples_to_target"] == (3 + 2) * 4 * 4
    assert report["metric"] == {"name": "accuracy", "higher_is_better": True}
    assert ddp["runs"][0]["timings"][0]["steps_s"] == [0.4, 0.4]
    assert ddp["failures"] == ["rank 0 ended: ValueError"]
    assert local["runs"] == []
    assert local["median_s"] is local["ratio_to_first"] is local["seconds_to_target"] is None
    assert local["steps_to_target"] is local["samples_to_target"] is None
    assert len(local["failures"]) == 2


def test_the_heading_says_what_is_not_real(learning: Workload) -> None:
    plain = Comparison(trial=Trial(workload="text"), systems=("local",), workers=1)
    text = "\n".join(heading(plain, learning, Bounds(None, None)))
    assert "1 worker, batch 4 each, unshaped loopback" in text
    assert "EMULATED" not in text
    emulated = Comparison(
        trial=Trial(workload="text", device="50", straggle="pareto:2", batch=8),
        systems=("local",),
        workers=3,
        servers=2,
        rate="1gbit",
    )
    text = "\n".join(heading(emulated, learning, BOUNDS))
    assert "3 workers, batch 8 each, links of 1gbit, 2 dedicated servers" in text
    assert "EMULATED DEVICE" in text
    assert "stragglers: pareto:2" in text
    assert "0.400 s dense, 0.100 s by the cheapest" in text


def test_a_picture_that_can_be_opened(tmp_path: Path, goal: Goal) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs slipstream[bench]")
    from slipstream.apps.bench.plot import draw

    steps_only = tmp_path / "steps.png"
    draw(steps_only, ["a title"], [outcome("ddp", run(0.4), run(0.5))], BOUNDS, None, None)
    both = tmp_path / "both.png"
    outcomes = [
        outcome("ddp", run(0.4, 0.2, 0.9), run(0.5, 0.3, 0.8), failures=1),
        outcome("broken", failures=2),
        outcome("local", run(0.2, 0.1)),
    ]
    draw(both, ["a title", "two lines"], outcomes, Bounds(None, None), goal, 0.7)
    small, large = (torch.from_numpy(image.imread(file)) for file in (steps_only, both))
    assert large.shape[0] > small.shape[0]
    assert small[..., :3].std() > 0.01  # not a blank page
