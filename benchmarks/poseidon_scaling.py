"""Poseidon's figures 5 and 8 in small: speed-up against workers, on emulated devices (root needed).

    python benchmarks/poseidon_scaling.py --json scaling.json --plot docs/poseidon_scaling.png

Nets keep their times and lose all but a small share of their bytes; links are slower by the same
share, so computing and communication stand to each other as they would at full size.
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

NETS = ("vgg19", "vgg19-22k", "googlenet", "inception-v3")
SYSTEMS = {
    "push_pull(overlap=False)": "PS",
    "push_pull": "PS, wait-free",
    "poseidon(choose='bytes')": "Poseidon",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=NETS)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--rate", default="10gbit", help="of a link at full size")
    parser.add_argument("--scale", type=float, default=1 / 64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rate = bits_per_second(args.rate) * args.scale
    points: list[dict[str, Any]] = []
    for net in args.nets:
        trial = Trial(workload="vgg", device=net, scale=args.scale, steps=args.steps, warmup=2)
        workload, table = trial.load(), trial.table
        assert table is not None
        alone_s = table.step_ms / 1000
        for workers in args.workers:
            comparison = Comparison(
                trial, tuple(SYSTEMS), workers=workers, rate=rate, repetitions=args.repetitions
            )
            outcomes, bounds = compare(comparison, workload, lambda line: print("   ", line))
            for outcome in outcomes:
                step_s = outcome.median_s
                points.append(
                    {
                        "net": net,
                        "system": outcome.system,
                        "workers": workers,
                        "step_s": step_s,
                        "alone_s": alone_s,
                        "speedup": None if step_s is None else workers * alone_s / step_s,
                        "link_bytes": outcome.link_bytes,
                        "bound_s": bounds.exact_s,
                        "failures": outcome.failures,
                    }
                )
                print(net, workers, outcome.system, points[-1]["speedup"], flush=True)
    if args.json:
        report = {
            "machine": machine_facts(),
            "emulated_devices": True,
            "rate": args.rate,
            "scale": args.scale,
            "points": points,
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot:
        draw(points, args.plot, args.rate)


def draw(points: Sequence[dict[str, Any]], file: Path, rate: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    nets = list(dict.fromkeys(point["net"] for point in points))
    figure, axes = plt.subplots(1, len(nets), figsize=(3.1 * len(nets), 3.4), squeeze=False)
    for axis, net in zip(axes[0], nets, strict=True):
        mine = [point for point in points if point["net"] == net and point["speedup"]]
        most = max(point["workers"] for point in mine)
        axis.plot([1, most], [1, most], color="#999999", linestyle=":", label="linear")
        for marker, (system, label) in zip("sx^", SYSTEMS.items(), strict=True):
            curve = [(1, 1.0)]
            curve += [(p["workers"], p["speedup"]) for p in mine if p["system"] == system]
            axis.plot(*zip(*curve, strict=True), marker=marker, markersize=5, label=label)
        axis.set_title(net, fontsize=9)
        axis.set_xlabel("workers", fontsize=8)
        axis.set_xticks(sorted({1, *(point["workers"] for point in mine)}))
        axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("speed-up over one worker", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.suptitle(
        f"emulated devices, links of {rate} at full size (bytes and rates scaled alike)", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
