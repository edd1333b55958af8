"""A bound that follows the network against the two fixed ones (root needed).

    python benchmarks/network_aware.py --json aware.json

Time to a target with emulated steps, over links whose rate goes down and up again every few
seconds, as it does where others share them. By default matrix factorisation in a setting where
either fixed bound costs something: the low one time on congested links, the high one iterations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.apps.bench.comparison import Bounds, Ground, machine_facts, measure
from slipstream.apps.bench.process_group import ForkServer
from slipstream.apps.bench.trial import Trial
from slipstream.apps.lab import Lab, Traffic


@dataclass(frozen=True)
class Case:
    """A workload, how long its emulated step is, and when it has learnt enough."""

    name: str
    device_ms: float
    steps: int
    target: float
    lower_is_better: bool = False
    batch: int | None = None  # of one worker
    scale: float | None = None

    def reached(self, metric: float) -> bool:
        return metric <= self.target if self.lower_is_better else metric >= self.target


CASES = {
    "lr": Case("lr", 25, 600, 0.73),
    # With large batches most of the gradient is not zero, and bounds decide what travels.
    "mf": Case("mf", 50, 530, 0.42, lower_is_better=True, batch=2048),
    "alexnet": Case("alexnet", 60, 600, 0.9, scale=1 / 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(CASES), default="mf")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rates", nargs=2, default=["400mbit", "4mbit"])
    parser.add_argument("--seconds", nargs=2, type=float, default=[8.0, 12.0], help="of each rate")
    parser.add_argument("--deltas", nargs=2, default=["50%", "99.5%"])
    parser.add_argument("--congested-below", default="50mbit", help="of one connection")
    parser.add_argument("--also", nargs="*", default=[], help="other shares, always")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    low, up = args.deltas
    systems = {
        f"always {low}": f"parameter_flow(delta='{low}')",
        f"always {up}": f"parameter_flow(delta='{up}')",
        **{f"always {share}": f"parameter_flow(delta='{share}')" for share in args.also},
        "by the network": f"parameter_flow(delta='{low}', congested_delta='{up}', "
        f"congested_below='{args.congested_below}')",
    }
    rows: list[dict[str, Any]] = []
    with Lab(args.workers, args.rates[0]) as lab, ForkServer() as fork_server:
        where = Timed(args.workers, lab)
        for repetition, (label, system) in itertools.product(
            range(args.repetitions), systems.items()
        ):
            rows.append({"label": label, **run(args, lab, where, fork_server, system, repetition)})
            print(rows[-1], flush=True)
    for label in systems:
        times = [row["seconds"] for row in rows if row["label"] == label]
        known = [time for time in times if time is not None]
        print(label, statistics.median(known) if known else None, times, flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine_facts(), "rows": rows}, indent=2) + "\n"
        )


def run(
    args: argparse.Namespace,
    lab: Lab,
    where: Timed,
    fork_server: ForkServer,
    system: str,
    seed: int,
) -> dict[str, Any]:
    case = CASES[args.workload]
    trial = Trial(
        workload=case.name,
        scale=case.scale,
        batch=case.batch,
        device=str(case.device_ms),
        steps=args.steps or case.steps,
        warmup=3,
        evaluate_every=10,
        seed=seed,
    )
    with changing(lab, where, args.rates, args.seconds):
        found = measure(
            msgspec.structs.replace(trial, system=system), where, fork_server, Bounds(1.0, 1.0)
        )
    snapshots = found.judgements[0].snapshots
    reached = next((s for s in snapshots if case.reached(s.metric)), None)
    return {
        "step_s": found.step_s,
        "seconds": None if reached is None else reached.seconds,
        "iterations": None if reached is None else reached.step,
        "link_mb": max(link.sent for link in found.links) / 1e6,
    }


class Timed(Ground):
    """Tells when a trial's clock begins: links are read then for the first time."""

    def __init__(self, workers: int, lab: Lab) -> None:
        super().__init__(workers, 0, lab)
        self.began = threading.Event()

    def bytes(self) -> tuple[Traffic, ...]:
        self.began.set()
        return super().bytes()


@contextmanager
def changing(lab: Lab, where: Timed, rates: list[str], seconds: list[float]) -> Iterator[None]:
    """Within, all links have one rate after the other, from when the trial's clock begins."""
    over = threading.Event()

    def turn() -> None:
        where.began.wait()
        for rate, lasts_s in itertools.cycle(zip(rates, seconds, strict=True)):
            set_rates(lab, rate)
            if over.wait(lasts_s):
                return

    where.began.clear()
    set_rates(lab, rates[0])
    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        where.began.set()
        thread.join()


def set_rates(lab: Lab, rate: str) -> None:
    for host in range(len(lab.hosts)):
        lab.set_rate(host, rate)


if __name__ == "__main__":
    main()
