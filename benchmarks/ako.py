"""Ako against parameter servers, all-to-all and DDP, on emulated devices in the lab (root needed).

    python benchmarks/ako.py --data DIR --json ako.json --plot docs/ako.png

- bandwidth: what links carry for p = 1 … 8 against the cost model, 8 workers
- workers: what they carry with p chosen automatically, 4 … 12 workers
- learning: time to a test accuracy on 8 hosts, where sending the model once takes r steps; every
  system at the best of several learning rates, plain SGD
- partitions: the same for several p, and without accumulation

DIR holds MNIST (or Fashion-MNIST, with --workload fashion) as it is published.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.apps.bench.comparison import PORT, Bounds, Ground, Run, machine_facts, measure
from slipstream.apps.bench.curves import time_to
from slipstream.apps.bench.process_group import ForkServer
from slipstream.apps.bench.trial import Trial
from slipstream.apps.lab import Lab

HOSTS = 8
WITHOUT_ACCUMULATION = "ako-accumulation"


@dataclass(frozen=True)
class Contestant:
    """A system, and how many of the hosts are servers."""

    label: str
    system: str
    servers: int = 0


CONTESTANTS = [
    Contestant("ako", "ako()"),
    Contestant("PS 7+1", "push_pull", 1),
    Contestant("PS 6+2", "push_pull", 2),
    Contestant("PS 4+4", "push_pull", 4),
    Contestant("PS co-located", "push_pull"),
    Contestant("all-to-all", "ako(partitions=1)"),
    Contestant("DDP", "ddp"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workload", default="mnist", choices=["mnist", "fashion"])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--loads", nargs="*", type=float, default=[0.3, 1.0, 3.0], help="r")
    parser.add_argument("--device-ms", type=float, default=100)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--lrs", nargs="*", type=float, default=[0.2, 0.4])
    parser.add_argument("--partitions", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--only", nargs="*", help="labels of contestants")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine_facts()}
    for part in args.parts:
        report[part] = PARTS[part](args)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(report, args.plot)


def model_bytes(args: argparse.Namespace) -> int:
    workload = Trial(workload=args.workload, data=str(args.data)).load()
    return sum(p.numel() * p.element_size() for p in workload.model().parameters())


def trial_of(args: argparse.Namespace, system: str, **more: Any) -> Trial:
    told = {"device": str(args.device_ms), "momentum": 0.0, "warmup": 3} | more
    return Trial(workload=args.workload, data=str(args.data), system=system, **told)


@contextmanager
def field(hosts: int, bytes_s: float) -> Iterator[tuple[Lab, ForkServer]]:
    with Lab(hosts, f"{bytes_s * 8:.0f}bit") as lab, ForkServer() as fork_server:
        yield lab, fork_server


def carried(run: Run) -> float:
    """Bytes a second of an average host, as the kernel counts them."""
    elapsed_s = statistics.mean(timing.elapsed_s for timing in run.timings)
    return statistics.mean(link.sent for link in run.links) / elapsed_s


def bandwidth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A link of 200 Mbit/s, which p = 1 would fill to one and a half."""
    nbytes, bytes_s = model_bytes(args), 25e6
    device_ms = 1000 * nbytes * (HOSTS - 1) / (1.5 * bytes_s)
    rows = []
    ports = itertools.count(PORT)
    with field(HOSTS, bytes_s) as (lab, fork_server):
        for partitions in range(1, 9):
            system = f"ako(partitions={partitions}, rate='200mbit')"
            trial = trial_of(args, system, device=str(device_ms), steps=round(8000 / device_ms))
            run = measure(trial, Ground(HOSTS, 0, lab, ports), fork_server, Bounds(None, None))
            predicted = nbytes * (HOSTS - 1) / partitions / run.step_s
            rows.append(
                {
                    "partitions": partitions,
                    "predicted_bytes_s": predicted,
                    "used_bytes_s": carried(run),
                    "step_s": run.step_s,
                    "device_s": device_ms / 1000,
                }
            )
            print(f"p = {partitions}: {carried(run) / predicted:.3f} of the prediction", rows[-1])
    return rows


def workers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """r = 3, so that p is large enough for whole numbers not to matter."""
    nbytes, rows = model_bytes(args), []
    bytes_s = nbytes / (3 * args.device_ms / 1000)
    for count in (4, 6, 8, 10, 12):
        with field(count, bytes_s) as (lab, fork_server):
            trial = trial_of(args, "ako()", steps=120, warmup=30)
            run = measure(trial, Ground(count, 0, lab), fork_server, Bounds(None, None))
        slices = run.judgements[0].stats["slices"]
        rows.append({"workers": count, "used_bytes_s": carried(run), "of_link": bytes_s, **slices})
        print(f"{count} workers: {carried(run) / bytes_s:.2f} of the link", slices, flush=True)
    return rows


def learning(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        row
        for load in args.loads
        for row in compared(args, load, [c for c in CONTESTANTS if wanted(args, c)])
    ]


def wanted(args: argparse.Namespace, contestant: Contestant) -> bool:
    return not args.only or contestant.label in args.only


def partitions(args: argparse.Namespace) -> list[dict[str, Any]]:
    fixed = [Contestant(f"p = {p}", f"ako(partitions={p})") for p in args.partitions]
    more = [Contestant("auto", "ako()"), Contestant("no accumulation", WITHOUT_ACCUMULATION)]
    return [row for load in args.loads for row in compared(args, load, [*fixed, *more])]


def compared(
    args: argparse.Namespace, load: float, contestants: list[Contestant]
) -> list[dict[str, Any]]:
    bytes_s = model_bytes(args) / (load * args.device_ms / 1000)
    rows: list[dict[str, Any]] = []
    ports = itertools.count(PORT)
    with field(HOSTS, bytes_s) as (lab, fork_server):
        for contestant in contestants:
            where = Ground(HOSTS - contestant.servers, contestant.servers, lab, ports)
            for lr in args.lrs:
                trial = trial_of(
                    args,
                    contestant.system,
                    steps=args.steps,
                    lr=lr,
                    evaluate_every=max(1, args.steps // 26),
                )
                run = measure(trial, where, fork_server, Bounds(None, None))
                rows.append(told(args, load, contestant, trial, run))
    return rows


def told(
    args: argparse.Namespace, load: float, contestant: Contestant, trial: Trial, run: Run
) -> dict[str, Any]:
    curve = [[s.seconds, s.metric] for s in run.judgements[0].snapshots]
    finals = [judgement.metric or 0.0 for judgement in run.judgements]
    elapsed_s = statistics.mean(timing.elapsed_s for timing in run.timings)
    stats = run.judgements[0].stats
    row = {
        "load": load,
        "label": contestant.label,
        "lr": trial.lr,
        "seconds_to_target": time_to(curve, args.target),
        "step_s": run.step_s,
        "busy": min(1.0, trial.steps * args.device_ms / 1000 / elapsed_s),
        "final": statistics.mean(finals),
        "workers_apart": max(finals) - min(finals),
        "slices": stats.get("slices"),
        "curve": curve,
    }
    print({key: value for key, value in row.items() if key != "curve"}, flush=True)
    return row


PARTS = {
    "bandwidth": bandwidth,
    "workers": workers,
    "learning": learning,
    "partitions": partitions,
}


def draw(report: dict[str, Any], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["learning"]
    loads = sorted({row["load"] for row in rows})
    figure, axes = plt.subplots(1, len(loads), figsize=(3.6 * len(loads), 3.4), squeeze=False)
    for axis, load in zip(axes[0], loads, strict=True):
        labels = list(dict.fromkeys(row["label"] for row in rows))
        for place, label in enumerate(labels):
            best = best_of([r for r in rows if r["load"] == load and r["label"] == label])
            if best is not None:
                times, accuracy = zip(*best["curve"], strict=True)
                axis.plot(times, accuracy, color=f"C{place}", label=label, linewidth=1.1)
        axis.set_ylim(0.9, 1.0)
        axis.set_title(f"r = {load:g}", fontsize=9)
        axis.set_xlabel("seconds", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("test accuracy", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def best_of(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """At its best learning rate: the soonest at the target, else the best in the end."""
    there = [row for row in rows if row["seconds_to_target"] is not None]
    if there:
        return min(there, key=lambda row: row["seconds_to_target"])
    return max(rows, key=lambda row: row["final"], default=None)


if __name__ == "__main__":
    main()
