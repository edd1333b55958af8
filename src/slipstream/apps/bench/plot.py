"""A comparison as a picture: step times with spread and bounds, and learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from slipstream.apps.bench.comparison import Bounds, Outcome
from slipstream.apps.bench.workloads import Goal

INK, BAR = "#222222", "#4878a8"
CURVES = mpl.color_sequences["tab10"]


def draw(
    file: Path,
    title: Sequence[str],
    outcomes: Sequence[Outcome],
    bounds: Bounds,
    goal: Goal | None,
    target: float | None,
) -> None:
    """Write a PNG (or the format of the file's suffix)."""
    shown = [outcome for outcome in outcomes if outcome.runs]
    learns = goal is not None and any(run.judgements[0].snapshots for o in shown for run in o.runs)
    rows = 2 if learns else 1
    figure, axes = plt.subplots(
        rows,
        1,
        figsize=(8.5, 1.9 + 0.45 * len(shown) + 4.0 * (rows - 1)),
        squeeze=False,
        layout="constrained",
        height_ratios=[1.2 + 0.45 * len(shown), 4.0][:rows],
    )
    _steps(axes[0][0], shown, bounds)
    if learns and goal is not None:
        _learning(axes[1][0], shown, goal, target)
    figure.suptitle("\n".join(title), fontsize=8.5, x=0.02, ha="left", color=INK)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _steps(axis: Any, outcomes: Sequence[Outcome], bounds: Bounds) -> None:
    names = [outcome.system for outcome in outcomes]
    medians = [outcome.median_s or 0.0 for outcome in outcomes]
    spread = [
        [m - min(o.step_s) for m, o in zip(medians, outcomes, strict=True)],
        [max(o.step_s) - m for m, o in zip(medians, outcomes, strict=True)],
    ]
    axis.barh(names, medians, xerr=spread, color=BAR, ecolor=INK, capsize=3, height=0.6)
    for name, median, over in zip(names, medians, spread[1], strict=True):
        label = f"  {median:.3f} s"
        axis.text(median + over, name, label, va="center", fontsize=8, color=INK)
    limits = [
        (bounds.dense_s, "dense over the wire", "--"),
        (bounds.exact_s, "cheapest exact route over the wire", ":"),
        (bounds.compute_s, "computing", "-."),
    ]
    for seconds, label, style in limits:
        if seconds is not None:
            axis.axvline(seconds, color=INK, linestyle=style, linewidth=1, label=f"least: {label}")
    if any(seconds is not None for seconds, _, _ in limits):
        axis.legend(
            fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False
        )
    axis.invert_yaxis()
    axis.set_xlim(right=1.18 * max(m + o for m, o in zip(medians, spread[1], strict=True)))
    axis.set_xlabel("seconds a step (median; whiskers: fastest and slowest run)", fontsize=8)
    axis.tick_params(labelsize=8)


def _learning(axis: Any, outcomes: Sequence[Outcome], goal: Goal, target: float | None) -> None:
    for color, outcome in zip(CURVES, outcomes, strict=False):
        for index, run in enumerate(outcome.runs):
            snapshots = run.judgements[0].snapshots
            axis.plot(
                [snapshot.seconds for snapshot in snapshots],
                [snapshot.metric for snapshot in snapshots],
                color=color,
                linewidth=1,
                label=outcome.system if index == 0 else None,
            )
    if target is not None:
        axis.axhline(target, color=INK, linestyle="--", linewidth=1, label=f"target {target:g}")
    axis.set_xlabel("seconds of training (a line for every run)", fontsize=8)
    axis.set_ylabel(f"test {goal.metric}", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7)
