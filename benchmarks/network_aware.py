"""A bound that follows the network against the two fixed ones (root needed).

    python benchmarks/network_aware.py --json aware.json

AlexNet with emulated steps, over links whose rate goes down and up again every few seconds, as it
does where others share them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from slipstream.bench.comparison import Bounds, Ground, machine_facts, measure
from slipstream.bench.crew import Nursery
from slipstream.bench.trial import Trial
from slipstream.lab import Lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rates", nargs=2, default=["400mbit", "30mbit"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each rate in turn")
    parser.add_argument("--deltas", nargs=2, default=["70%", "98%"])
    parser.add_argument("--narrow-below", default="25mbit", help="a connection")
    parser.add_argument("--device-ms", type=float, default=60)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    low, up = args.deltas
    systems = {
        f"always {low}": f"parameter_flow(delta='{low}')",
        f"always {up}": f"parameter_flow(delta='{up}')",
        "by the network": f"parameter_flow(delta='{low}', narrow_delta='{up}', "
        f"narrow_below='{args.narrow_below}')",
    }
    rows: list[dict[str, Any]] = []
    with Lab(args.workers, args.rates[0]) as lab, Nursery() as nursery:
        where = Ground(args.workers, 0, lab)
        for repetition, (label, system) in itertools.product(
            range(args.repetitions), systems.items()
        ):
            rows.append({"label": label, **run(args, lab, where, nursery, system, repetition)})
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
    args: argparse.Namespace, lab: Lab, where: Ground, nursery: Nursery, system: str, seed: int
) -> dict[str, Any]:
    trial = Trial(
        workload="alexnet",
        scale=1 / 64,
        device=str(args.device_ms),
        steps=args.steps,
        warmup=3,
        evaluate_every=10,
        seed=seed,
    )
    with changing(lab, args.rates, args.seconds):
        found = measure(
            msgspec.structs.replace(trial, system=system), where, nursery, Bounds(1.0, 1.0)
        )
    snapshots = found.judgements[0].snapshots
    reached = next((s for s in snapshots if s.metric >= args.target), None)
    return {
        "step_s": found.step_s,
        "seconds": None if reached is None else reached.seconds,
        "iterations": None if reached is None else reached.step,
        "link_mb": max(link.sent for link in found.links) / 1e6,
    }


@contextmanager
def changing(lab: Lab, rates: list[str], seconds: float) -> Iterator[None]:
    """Within, all links have one rate after the other."""
    over = threading.Event()

    def turn() -> None:
        for rate in itertools.cycle(rates):
            for host in range(len(lab.hosts)):
                lab.set_rate(host, rate)
            if over.wait(seconds):
                return

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
