"""Poseidon's figure 10: every node's bytes a step, from the kernel's counters (root needed).

python benchmarks/poseidon_traffic.py --json traffic.json --plot docs/poseidon_traffic.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.apps.bench.comparison import Comparison, compare, machine_facts
from slipstream.apps.bench.trial import Trial
from slipstream.units import bits_per_second

SYSTEMS = ("push_pull", "adam_factors", "poseidon(choose='bytes')")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", default="vgg19")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", default="40gbit", help="of a link at full size")
    parser.add_argument("--scale", type=float, default=1 / 64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rate = bits_per_second(args.rate) * args.scale
    trial = Trial(workload="vgg", device=args.net, scale=args.scale, steps=args.steps, warmup=2)
    comparison = Comparison(trial, SYSTEMS, workers=args.workers, rate=rate, repetitions=1)
    outcomes, _ = compare(comparison, trial.load(), print)
    nodes = []
    for outcome in outcomes:
        for run in outcome.runs:
            moved = [(link.sent + link.received) / 2 / args.steps / 1e6 for link in run.links]
            uneven = max(moved) / min(moved) - 1
            nodes.append({"system": outcome.system, "mb_by_node": moved, "uneven": uneven})
            told = ", ".join(f"{mb:.2f}" for mb in moved)
            print(f"{outcome.system:28} MB a node each way: {told}; uneven by {uneven:.1%}")
    if args.json:
        report = {"machine": machine_facts(), "net": args.net, "scale": args.scale, "nodes": nodes}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(nodes, args.plot, args.net)


def draw(nodes: Sequence[dict[str, Any]], file: Path, net: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.2))
    width = 0.8 / len(nodes)
    for place, entry in enumerate(nodes):
        at = [node + place * width for node in range(len(entry["mb_by_node"]))]
        axis.bar(at, entry["mb_by_node"], width, label=entry["system"])
    axis.set_xticks([node + 0.4 - width / 2 for node in range(len(nodes[0]["mb_by_node"]))])
    axis.set_xticklabels([str(node) for node in range(len(nodes[0]["mb_by_node"]))])
    axis.set_xlabel("node (worker and server)", fontsize=8)
    axis.set_ylabel("MB a step, mean of sent and received", fontsize=8)
    axis.set_title(f"{net}, bytes scaled down", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
