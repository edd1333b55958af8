"""Backup workers against plain rounds and asynchronous training, on emulated devices.

    python benchmarks/backup_workers.py --data DIR --json backup.json --plot docs/backup_workers.png

First, one of five workers is five times slow. Then, every step of eight workers takes a log-normal
time: how long until the test accuracy is reached, and what it is in the end (the mean of the last
five evaluations), when as many samples have been applied. DIR holds MNIST as it is published.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.apps.bench.comparison import Comparison, Run, compare, machine_facts
from slipstream.apps.bench.curves import time_to
from slipstream.apps.bench.trial import Trial

PLAIN = "push_pull(update='server')"
FINAL_EVALUATIONS = 5


@dataclass(frozen=True)
class Contestant:
    """``share`` of the workers make a round; more rounds apply as many samples."""

    label: str
    system: str
    share: float = 1.0
    rate: float = 1.0  # what the learning rate is multiplied by


def eight(workers: int) -> list[Contestant]:
    firsts = [workers - 2, workers - 3]
    return [
        Contestant("rounds of all", PLAIN),
        *(Contestant(f"first {n}", f"backup_workers(first={n})", n / workers) for n in firsts),
        Contestant("asynchronous", "async_sgd()", 1.0, 1 / workers),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=["slow", "learning"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--straggle", default="lognormal:0.8")
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--device-ms", type=float, default=60)
    parser.add_argument("--steps", type=int, default=320, help="rounds of all workers")
    parser.add_argument("--lr", type=float, default=0.05, help="of rounds of all workers")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine_facts()}
    if "slow" in args.parts:
        report["one_slow_worker"] = one_slow_worker(args)
    if "learning" in args.parts:
        report["learning"] = time_to_target(args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(report["learning"], args)


def one_slow_worker(args: argparse.Namespace) -> dict[str, float]:
    """Seconds a round: four good workers, and these with a fifth that is five times slow."""
    trial = Trial(
        workload="mnist", data=str(args.data), device=str(args.device_ms), steps=120, warmup=5
    )
    slowed = replace_trial(trial, straggle="worker:4:x5")
    asked = {
        "4 workers, none slow": (trial, PLAIN, 4),
        "5 workers, one slow: rounds of all": (slowed, PLAIN, 5),
        "5 workers, one slow: first 4": (slowed, "backup_workers(first=4)", 5),
    }
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(args.repetitions):
        for name, (chosen, system, workers) in asked.items():
            seconds[name].append(run_once(chosen, system, workers).step_s)
            print(name, seconds[name][-1], flush=True)
    return {name: statistics.median(found) for name, found in seconds.items()}


def time_to_target(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for repetition in range(args.repetitions):
        for one in eight(args.workers):
            steps = math.ceil(args.steps / one.share)
            trial = Trial(
                workload="mnist",
                data=str(args.data),
                device=str(args.device_ms),
                straggle=args.straggle,
                steps=steps,
                warmup=5,
                lr=args.lr * one.rate,
                evaluate_every=max(1, round(16 / one.share)),
                seed=repetition,
            )
            run = run_once(trial, one.system, args.workers)
            curve = [[s.seconds, s.metric] for s in run.judgements[0].snapshots]
            reached = time_to(curve, args.target)
            # At a constant rate single evaluations jump by half a point.
            final = statistics.mean(metric for _, metric in curve[-FINAL_EVALUATIONS:])
            rows.append(
                {
                    "label": one.label,
                    "system": one.system,
                    "repetition": repetition,
                    "round_s": run.step_s,
                    "seconds_to_target": reached,
                    "final": final,
                    "curve": curve,
                }
            )
            print(
                one.label, f"{run.step_s:.3f} s a round, target after", reached, final, flush=True
            )
    return rows


def replace_trial(trial: Trial, **changes: Any) -> Trial:
    return Trial(**{name: getattr(trial, name) for name in trial.__struct_fields__} | changes)


def run_once(trial: Trial, system: str, workers: int) -> Run:
    comparison = Comparison(trial, (system,), workers=workers, repetitions=1)
    (outcome,), _ = compare(comparison, trial.load(), lambda line: None)
    if not outcome.runs:
        raise SystemExit(f"{system}: {outcome.failures}")
    return outcome.runs[0]


def draw(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.8))
    colours = {}
    for row in rows:
        label = None if row["label"] in colours else row["label"]
        colours.setdefault(row["label"], f"C{len(colours)}")
        times, accuracy = zip(*row["curve"], strict=True)
        axis.plot(times, accuracy, color=colours[row["label"]], label=label, linewidth=1.2)
    axis.axhline(args.target, color="#999999", linestyle=":")
    axis.set_ylim(0.9, 0.99)
    axis.set_xlabel("seconds")
    axis.set_ylabel("test accuracy")
    axis.set_title(
        f"MNIST, {args.workers} workers, emulated steps of {args.device_ms:g} ms, {args.straggle}",
        fontsize=9,
    )
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.plot, dpi=150)


if __name__ == "__main__":
    main()
