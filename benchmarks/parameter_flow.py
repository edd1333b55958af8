"""Parameter Flow against push-pull at several ratios of communication to computing (root needed).

    python benchmarks/parameter_flow.py --json flow.json --plot docs/parameter_flow.png

Time to a target on sparse logistic regression, matrix factorisation and AlexNet, with emulated
steps, over links whose rate makes a vanilla push-pull step communicate so many times as long as it
computes. All systems have the workload's learning rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.apps.bench.comparison import Comparison, Outcome, compare, machine_facts
from slipstream.apps.bench.trial import Trial
from slipstream.apps.bench.workloads import Goal, Workload

VANILLA = "push_pull(overlap=False)"
OVERLAPPED = "push_pull"
PAPER = {"lr": (2.4, 4.3), "mf": (1.4, 1.7), "alexnet": (2.2, 3.2)}  # its BSP, its SSP


@dataclass(frozen=True)
class Case:
    """A workload, how long its emulated step is, and what it is worth measuring for how long."""

    name: str
    device_ms: float
    steps: int
    target: float
    filtered: str
    ahead: str  # what else workers that run ahead are told
    scale: float | None = None

    def systems(self) -> dict[str, str]:
        return {
            "push-pull": VANILLA,
            "overlapped": OVERLAPPED,
            "flow, BSP": f"parameter_flow({self.filtered})",
            "flow, SSP": f"parameter_flow({self.filtered}, staleness=1{self.ahead})",
        }


# Logistic regression and factorisation have no momentum, and bear the rate of rounds.
CASES = {
    "lr": Case("lr", 25, 300, 0.73, "delta='90%'", ", rate_factor=1.0"),
    "mf": Case("mf", 25, 420, 0.42, "delta='90%'", ", rate_factor=1.0"),
    "alexnet": Case("alexnet", 60, 320, 0.9, "delta='75%', codec='bfloat16'", "", 1 / 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ratios", nargs="*", type=float, default=[1.0, 3.0, 6.0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        for ratio in args.ratios:
            rows += measured(CASES[name], ratio, args.workers, args.repetitions)
            if args.json:
                report = {"machine": machine_facts(), "paper": PAPER, "rows": rows}
                args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(rows, args.plot)


def measured(case: Case, ratio: float, workers: int, repetitions: int) -> list[dict[str, Any]]:
    trial = Trial(
        workload=case.name,
        device=str(case.device_ms),
        scale=case.scale,
        steps=case.steps,
        warmup=3,
        evaluate_every=max(1, case.steps // 60),
    )
    workload = trial.load()
    nbytes = model_bytes(workload)
    # What a worker's link carries each way, up first and down afterwards.
    seconds = ratio * case.device_ms / 1000
    rate = 2 * 8 * nbytes * (workers - 1) / workers / seconds
    systems = case.systems()
    comparison = Comparison(
        trial, tuple(systems.values()), workers=workers, rate=rate, repetitions=repetitions
    )
    outcomes, _ = compare(comparison, workload, lambda line: print(line, flush=True))
    assert workload.goal is not None
    found = [
        row(case, label, outcome, workload.goal)
        for label, outcome in zip(systems, outcomes, strict=True)
    ]
    vanilla = found[0]
    for each in found:
        each |= {
            "case": case.name,
            "model_bytes": nbytes,
            "rate_mbit": rate / 1e6,
            "ratio_asked": ratio,
            "ratio": vanilla["step_s"] / (case.device_ms / 1000) - 1,
            "speedup": over(vanilla["seconds"], each["seconds"]),
            "traffic": over(each["link_bytes"], vanilla["link_bytes"]),
            "iterations_ratio": over(each["iterations"], vanilla["iterations"]),
        }
        print(told(each), flush=True)
    return found


def row(case: Case, label: str, outcome: Outcome, goal: Goal) -> dict[str, Any]:
    if outcome.failures:
        raise SystemExit(f"{outcome.system}: {outcome.failures}")
    good = [each for each in outcome.reached(goal.at(case.target).reached) if each is not None]
    return {
        "label": label,
        "system": outcome.system,
        "step_s": outcome.median_s,
        "seconds": statistics.median(each.seconds for each in good) if good else None,
        "iterations": statistics.median(each.step for each in good) if good else None,
        "final": outcome.metric,
        "link_bytes": outcome.link_bytes,
        "curve": [[s.seconds, s.metric] for s in outcome.runs[0].judgements[0].snapshots],
    }


def over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def model_bytes(workload: Workload) -> int:
    return sum(p.numel() * p.element_size() for p in workload.model().parameters())


def told(each: dict[str, Any]) -> str:
    def text(key: str, form: str) -> str:
        return "-" if each[key] is None else format(each[key], form)

    return (
        f"{each['case']:8} ratio {each['ratio']:.2f} {each['label']:12} "
        f"{each['step_s'] * 1000:7.1f} ms a step, target after {text('seconds', '.1f')} s and "
        f"{text('iterations', '.0f')} steps ({text('iterations_ratio', '.2f')}), "
        f"speed-up {text('speedup', '.2f')}, traffic {text('traffic', '.3f')}, "
        f"final {text('final', '.4f')}"
    )


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = plt.subplots(1, len(cases), figsize=(3.4 * len(cases), 3.2), squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        mine = [row for row in rows if row["case"] == case]
        labels = list(dict.fromkeys(row["label"] for row in mine))[1:]
        ratios = sorted({row["ratio"] for row in mine})
        width = 0.8 / len(labels)
        for place, label in enumerate(labels):
            of = [row for row in mine if row["label"] == label]
            heights = [
                next((r["speedup"] or 0 for r in of if r["ratio"] == ratio), 0) for ratio in ratios
            ]
            axis.bar([i + place * width for i in range(len(ratios))], heights, width, label=label)
        axis.axhline(1, color="#999999", linewidth=0.8)
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(ratios))])
        axis.set_xticklabels([f"{ratio:.1f}" for ratio in ratios])
        axis.set_xlabel("communication / computing", fontsize=8)
        axis.set_title(case, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("speed-up to the target over push-pull", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
