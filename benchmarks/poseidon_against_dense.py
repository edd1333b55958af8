"""Poseidon against the dense roads, where factors help and where they do not (root needed).

    python benchmarks/poseidon_against_dense.py --json against_dense.json

``conv`` is computed; the other nets are emulated devices that keep their times and lose all but a
small share of their bytes, over links that are slower by the same share.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from slipstream.apps.bench.comparison import Comparison, compare, machine_facts
from slipstream.apps.bench.tables import TABLES
from slipstream.apps.bench.trial import Trial
from slipstream.units import bits_per_second

DENSE = ("allreduce", "push_pull")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=["conv", *TABLES])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="10gbit", help="of emulated nets' links at full size")
    parser.add_argument("--conv-rate", default="200mbit")
    parser.add_argument("--scale", type=float, default=1 / 64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for net in args.nets:
        if net == "conv":
            trial = Trial(workload="conv", steps=args.steps, warmup=2)
            rate = bits_per_second(args.conv_rate)
        else:
            trial = Trial(workload="vgg", device=net, scale=args.scale, steps=args.steps, warmup=2)
            rate = bits_per_second(args.rate) * args.scale
        comparison = Comparison(
            trial,
            (*DENSE, "poseidon"),
            workers=args.workers,
            rate=rate,
            repetitions=args.repetitions,
        )
        outcomes, _ = compare(comparison, trial.load(), lambda line: print("   ", line))
        step_s = {outcome.system: outcome.median_s for outcome in outcomes}
        known = [seconds for name in DENSE if (seconds := step_s[name]) is not None]
        ours = step_s["poseidon"]
        ratio = ours / min(known) if ours is not None and known else None
        rows.append({"net": net, "step_s": step_s, "poseidon_to_better_dense": ratio})
        print(net, step_s, ratio, flush=True)
    if args.json:
        report = {"machine": machine_facts(), "rate": args.rate, "scale": args.scale, "nets": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
