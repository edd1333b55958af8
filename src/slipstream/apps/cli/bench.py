"""``slipstream bench``: compares systems on one workload, over links of a given rate."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slipstream.apps.cli.options import prepare_reports, write_report, writing
from slipstream.printable import printable_lines

if TYPE_CHECKING:
    from slipstream.apps.bench.comparison import Comparison

LEARNING_STEPS = 1500
SNAPSHOTS = 50
TABLE_WIDTH = 112

WorkloadName = Annotated[
    str,
    typer.Argument(
        help="fc, conv, vgg, alexnet, mnist, fashion, lr, mf, text, gpt or recommender."
    ),
]
Compare = Annotated[
    str,
    typer.Option(
        help="Systems, joined by commas: slipstream's own, such as 'push_pull(overlap=False)', "
        "and ddp, ddp+fp16, 'ddp+powersgd(rank=4)', torchft, 'torchft_local_sgd(every=32)', "
        "'torchft_diloco(every=32)', hivemind, local. Ratios are to the first."
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Workers, one per host.")]
Servers = Annotated[
    int, typer.Option(min=0, help="Dedicated servers on separate hosts; 0: colocated with workers.")
]
Rate = Annotated[
    str, typer.Option(help="Rate of every host's link, such as 200mbit; none is plain loopback.")
]
Repetitions = Annotated[int, typer.Option(min=1, help="Runs of each system, in turns.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Timed steps per run; by default as many as fit 12 s.")
]
Warmup = Annotated[int, typer.Option(min=3, help="Steps before the clock starts.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples per step and worker.")]
LearningRate = Annotated[
    float | None, typer.Option(min=0, help="The learning rate, if not the workload's own.")
]
Data = Annotated[Path | None, typer.Option(help="Folder of a real data set.")]
Scale = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of its parameters a net keeps.")
]
Sizes = Annotated[
    str,
    typer.Option(
        help="Sizes of the net, such as layers=2,width=64 (gpt: layers, width, heads, context, "
        "tied; recommender: width, hidden)."
    ),
]
DeviceMs = Annotated[
    str | None,
    typer.Option(
        help="Emulate devices: a layer table (vgg19, googlenet, ... or a file), which replaces "
        "the net, or milliseconds a step for the workload's own net."
    ),
]
Straggle = Annotated[
    str, typer.Option(help="lognormal:SIGMA, pareto:ALPHA or worker:K:xF, joined by commas.")
]
Target = Annotated[
    float | None, typer.Option(help="Measure the time to this accuracy, error or held-out loss.")
]
EvaluateEvery = Annotated[
    int | None, typer.Option(min=1, help="Steps between evaluations; by default a fiftieth of all.")
]
Seed = Annotated[int, typer.Option(help="Seed of data and delays.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all results here.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw them here (PNG).")]


def bench(
    workload: WorkloadName,
    compare: Compare = "ddp,allreduce,push_pull",
    workers: Workers = 4,
    servers: Servers = 0,
    rate: Rate = "none",
    repetitions: Repetitions = 3,
    steps: Steps = None,
    warmup: Warmup = 3,
    batch: Batch = None,
    lr: LearningRate = None,
    data: Data = None,
    scale: Scale = None,
    sizes: Sizes = "",
    device_ms: DeviceMs = None,
    straggle: Straggle = "",
    target: Target = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = 0,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare systems on one workload, in turns within one run."""
    prepare_reports(json, plot)
    # Imported here, because they import torch, and --help does not need it.
    from slipstream.apps.bench.comparison import Comparison
    from slipstream.apps.bench.trial import Trial

    if steps is None and target is not None:
        steps = LEARNING_STEPS
    trial = Trial(
        workload=workload,
        batch=batch,
        steps=steps or 0,
        warmup=warmup,
        seed=seed,
        data=None if data is None else str(data.absolute()),
        scale=scale,
        sizes=sizes,
        device=device_ms,
        straggle=straggle,
        lr=lr,
        evaluate_every=evaluate_every or (0 if target is None else default_interval(steps)),
    )
    comparison = Comparison(
        trial=trial,
        systems=tuple(split_systems(compare)),
        workers=workers,
        servers=servers,
        rate=None if rate == "none" else rate,
        repetitions=repetitions,
        target=target,
    )
    failed = measure_and_report(comparison, json, plot)
    raise typer.Exit(1 if failed else 0)


def default_interval(steps: int | None) -> int:
    """Return the steps between evaluations."""
    return max(1, (steps or 0) // SNAPSHOTS)


def measure_and_report(comparison: Comparison, json: Path | None, plot: Path | None) -> bool:
    """Run the comparison, print the table, write the files; return whether any trial failed."""
    from slipstream.apps.bench import report
    from slipstream.apps.bench.comparison import compare, machine_facts

    loaded = comparison.trial.load()
    comparison.check(loaded)
    machine = machine_facts()
    console = Console(highlight=False, soft_wrap=True)
    outcomes, bounds = compare(
        comparison,
        loaded,
        lambda line: console.print(printable_lines(line), style="dim", markup=False),
    )
    title = report.heading(comparison, loaded, bounds)
    console.print(printable_lines("\n".join(title)), markup=False)
    # A truncated number is useless, so lines wrap on a narrow terminal.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(report.table(outcomes, bounds, loaded.goal, comparison.target))
    if json is not None:
        command = shlex.join(["slipstream", *sys.argv[1:]])
        write_report(json, report.as_json(comparison, loaded, outcomes, bounds, machine, command))
    if plot is not None and any(outcome.runs for outcome in outcomes):
        from slipstream.apps.bench.plot import draw

        with writing("--plot", plot):
            draw(plot, title, outcomes, bounds, loaded.goal, comparison.target)
    return any(outcome.failures for outcome in outcomes)


def split_systems(text: str) -> list[str]:
    """Split at commas, but not within parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
