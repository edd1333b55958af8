"""Time to a held-out loss of a small GPT at several ratios of communication to computing (root).

    python benchmarks/gpt.py --data DIR --json gpt.json --table gpt.md --plot docs/gpt.png
    python benchmarks/gpt.py ddp 'push_pull(wire="int8")' --ratios 4 --json gpt.json --keep

Computing is measured first, by workers that exchange nothing. The links' rate then is such that a
ring all-reduce of the model, 2(n−1)/n · bytes / rate, takes so many times as long; that is the
ratio. Systems run in turns on the same links, with the same data, optimizer and learning rate, and
are judged by the same held-out text. DIR holds tinyshakespeare's input.txt; without it the text is
generated. The first system is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from slipstream.apps.bench.bounds import dense_bytes, seconds
from slipstream.apps.bench.comparison import (
    Comparison,
    Outcome,
    compare,
    machine_facts,
    model_shapes,
)
from slipstream.apps.bench.report import to_target
from slipstream.apps.bench.trial import Trial
from slipstream.apps.bench.workloads import Workload

# Of local steps, the settings that took the fewest samples here; torchft has the same outer
# optimizer. With mix=0 results come back in 4 bits, too; a larger mix needs exact ones.
SYSTEMS = [
    "ddp",
    "ddp+powersgd(rank=4)",
    "torchft_diloco(every=16, lr=0.7, momentum=0.3)",
    "allreduce",
    'allreduce(wire="int8")',
    'allreduce(wire="int4")',
    "low_rank(rank=8)",
    'local_sgd(every=2, wire="int4")',
    'local_sgd(every=4, wire="int4")',
    'diloco(every=16, lr=0.7, momentum=0.3, fragments=4, overlap_steps=1, mix=0.0, wire="int4")',
]
COMPUTE_STEPS = 40
MARKERS = "os^vDPX<>*"

Row = dict[str, Any]


def main() -> None:
    args = arguments()
    trial = trial_of(args)
    workload = trial.load()
    report: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine_facts(),
        "workload": workload.what,
        "emulated_device_ms": args.device_ms,
        "target": args.target,
        "batch": args.batch,
        "workers": args.workers,
        "rows": kept_rows(args),
    }
    for ratio in args.ratios:
        compute_s = args.compute_ms / 1000 if args.compute_ms else computing_s(args, workload)
        report["rows"] += measured(args, workload, ratio, compute_s)
        report["rows"].sort(key=lambda row: row["ratio"])
        write(args, report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("systems", nargs="*", default=SYSTEMS, help="as in slipstream bench")
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0, 4.0, 16.0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", default="layers=4,width=128,heads=4,context=32")
    parser.add_argument("--batch", type=int, default=4, help="rows of each worker")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--target", type=float, default=2.55, help="held-out loss")
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compute-ms", type=float, help="a step's, instead of measuring it")
    parser.add_argument(
        "--device-ms", type=float, help="emulated: a step computes at least so long"
    )
    parser.add_argument("--keep", action="store_true", help="other ratios that the JSON file has")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="markdown")
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def trial_of(args: argparse.Namespace) -> Trial:
    return Trial(
        workload="gpt",
        data=None if args.data is None else str(args.data.absolute()),
        sizes=args.sizes,
        batch=args.batch,
        lr=args.lr,
        device=None if args.device_ms is None else str(args.device_ms),
        steps=args.steps,
        seed=args.seed,
        evaluate_every=args.evaluate_every,
    )


def kept_rows(args: argparse.Namespace) -> list[Row]:
    """Those of earlier runs, at ratios that this one does not measure again."""
    if not (args.keep and args.json and args.json.exists()):
        return []
    rows: list[Row] = json.loads(args.json.read_text())["rows"]
    return [row for row in rows if row["ratio"] not in args.ratios]


def computing_s(args: argparse.Namespace, workload: Workload) -> float:
    """A step of workers that exchange nothing, all of them at once."""
    trial = msgspec.structs.replace(trial_of(args), steps=COMPUTE_STEPS, evaluate_every=0)
    comparison = Comparison(trial, ("local",), workers=args.workers, repetitions=1)
    (outcome,), _ = compare(comparison, workload, tell)
    if outcome.median_s is None:
        raise SystemExit(f"computing alone failed: {outcome.failures}")
    return outcome.median_s


def measured(
    args: argparse.Namespace, workload: Workload, ratio: float, compute_s: float
) -> list[Row]:
    """Every system at links of the ratio's rate."""
    nbytes = dense_bytes(model_shapes(workload, args.batch), args.workers)
    rate = round(seconds(nbytes, 1.0) / (ratio * compute_s))
    tell(f"ratio {ratio:g}: {compute_s * 1000:.1f} ms of computing, {rate / 1e6:.1f} Mbit/s")
    comparison = Comparison(
        trial_of(args),
        tuple(args.systems),
        workers=args.workers,
        rate=rate,
        repetitions=args.repetitions,
        target=args.target,
    )
    comparison.check(workload)
    outcomes, bounds = compare(comparison, workload, tell)
    rows: list[Row] = []
    for outcome in outcomes:
        row = {
            "ratio": ratio,
            "rate_mbit": rate / 1e6,
            "compute_s": compute_s,
            "compute_in_run_s": bounds.compute_s,
            "ratio_in_run": over(ratio * compute_s, bounds.compute_s),
            **figures(comparison, workload, outcome),
        }
        rows.append(row | against(row, rows[0] if rows else row))
        tell(told(rows[-1]))
    return rows


def figures(comparison: Comparison, workload: Workload, outcome: Outcome) -> Row:
    snapshots = outcome.runs[0].judgements[0].snapshots if outcome.runs else []
    return {
        "system": outcome.system,
        "step_s": outcome.median_s,
        **to_target(comparison, workload, outcome),
        "final_loss": outcome.metric,
        "link_bytes_per_step": outcome.link_bytes,
        "curve": [[s.step, s.seconds, s.metric] for s in snapshots],
        "failures": outcome.failures,
    }


def against(row: Row, first: Row) -> Row:
    """What counts: how much sooner than the first system, by how many more samples."""
    return {
        "speedup": over(first["seconds_to_target"], row["seconds_to_target"]),
        "step_speedup": over(first["step_s"], row["step_s"]),
        "samples_ratio": over(row["samples_to_target"], first["samples_to_target"]),
        "fewer_bytes": over(first["link_bytes_per_step"], row["link_bytes_per_step"]),
    }


def over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def tell(line: str) -> None:
    print(line, flush=True)


def text(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def told(row: Row) -> str:
    return (
        f"ratio {row['ratio']:g} {row['system']:36} {text(row['step_s'], '.3f')} s a step; loss "
        f"reached after {text(row['seconds_to_target'], '.1f')} s (speed-up "
        f"{text(row['speedup'])}) and {text(row['steps_to_target'], '.0f')} steps (samples "
        f"{text(row['samples_ratio'])}); {text(row['fewer_bytes'], '.1f')} times fewer bytes; "
        f"final {text(row['final_loss'], '.3f')}"
    )


def write(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.table:
        args.table.write_text(table(report["rows"]))
    if args.plot:
        draw(report, args.plot)


def table(rows: list[Row]) -> str:
    """Seconds to the loss (speed-up, samples over the first system's) by ratio, in markdown."""
    ratios = sorted({row["ratio"] for row in rows})
    systems = list(dict.fromkeys(row["system"] for row in rows))
    head = [f"s to the loss at ratio {ratio:g}" for ratio in ratios]
    lines = [
        "| system | " + " | ".join([*head, "kB a link and step"]) + " |",
        "| --- |" + " --- |" * (len(ratios) + 1),
    ]
    for system in systems:
        mine = {row["ratio"]: row for row in rows if row["system"] == system}
        cells = [cell(mine.get(ratio)) for ratio in ratios]
        moved = [r["link_bytes_per_step"] for r in mine.values() if r["link_bytes_per_step"]]
        cells.append(text(moved[0] / 1000 if moved else None, ".1f"))
        lines.append(f"| `{system}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row["failures"]:
        return "failed"
    if row["seconds_to_target"] is None:
        return f"not reached ({text(row['final_loss'])})"
    return (
        f"{row['seconds_to_target']:.1f} ({text(row['speedup'])} times; samples "
        f"{text(row['samples_ratio'])})"
    )


def draw(report: dict[str, Any], file: Path) -> None:
    """Left: which system is soonest at which ratio. Right: what fewer bytes cost in samples."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, costs) = plt.subplots(1, 2, figsize=(9.6, 5.2), layout="constrained")
    for place, system in enumerate(dict.fromkeys(row["system"] for row in report["rows"])):
        mine = [row for row in report["rows"] if row["system"] == system]
        style = {"color": f"C{place % 10}", "marker": MARKERS[place % len(MARKERS)]}
        reached = sorted((row for row in mine if row["seconds_to_target"]), key=by_ratio)
        label = system if reached else f"{system}: not reached"
        x, y = [by_ratio(row) for row in reached], [row["seconds_to_target"] for row in reached]
        times.plot(x, y, label=label, linewidth=1.2, markersize=5, **style)
        cost = [(r["fewer_bytes"], r["samples_ratio"]) for r in reached if r["fewer_bytes"]]
        if cost:
            costs.plot(*cost[0], linestyle="", markersize=8, **style)
    ratios = sorted({row["ratio"] for row in report["rows"]})
    times.set_xscale("log")
    times.set_yscale("log")
    times.set_xticks(ratios)
    times.xaxis.minorticks_off()
    named(times, "DDP's communication / computing", f"seconds to a loss of {report['target']:g}")
    costs.set_xscale("log")
    named(costs, "times fewer bytes per link and step", "samples to the loss, relative to DDP")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def by_ratio(row: Row) -> float:
    return float(row["ratio"])


def named(axis: Any, x: str, y: str) -> None:
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(which="both", labelsize=8)
    axis.grid(which="both", alpha=0.3)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter("{x:g}")
    if axis.get_yscale() == "log":
        axis.yaxis.set_minor_formatter("{x:g}")


if __name__ == "__main__":
    main()
