"""``slipstream bench``: systems side by side on one workload, over links of a given rate."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream.cli.options import prepare_file, write_report, writing
from slipstream.errors import LaunchError
from slipstream.printable import printable_lines

LEARNING_STEPS = 1500
SNAPSHOTS = 50
TABLE_WIDTH = 112
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def bench(
    workload: Annotated[
        str, typer.Argument(help="fc, conv, vgg, alexnet, mnist, fashion, lr, mf or text.")
    ],
    compare: Annotated[
        str,
        typer.Option(
            help="Systems, joined by commas: slipstream's own, such as 'push_pull(overlap=False)', "
            "and ddp, ddp+fp16, ddp+powersgd, torchft, hivemind, local. Ratios are to the first."
        ),
    ] = "ddp,allreduce,push_pull",
    workers: Annotated[int, typer.Option(min=1, help="Workers, one a host.")] = 4,
    servers: Annotated[
        int, typer.Option(min=0, help="Dedicated servers on hosts of their own; 0: beside workers.")
    ] = 0,
    rate: Annotated[
        str, typer.Option(help="Of every host's link, such as 200mbit; none is plain loopback.")
    ] = "none",
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each system, in turns.")] = 3,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Timed steps a run; by default what fits 12 s.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=3, help="Steps before the clock starts.")] = 3,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples a step and worker.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Instead of the workload's own.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of a real data set.")] = None,
    scale: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of its parameters a net keeps.")
    ] = None,
    device_ms: Annotated[
        str | None,
        typer.Option(
            help="Emulate devices: a layer table (vgg19, googlenet, ... or a file), which replaces "
            "the net, or milliseconds a step for the workload's own net."
        ),
    ] = None,
    straggle: Annotated[
        str, typer.Option(help="lognormal:SIGMA, pareto:ALPHA or worker:K:xF, joined by commas.")
    ] = "",
    target: Annotated[
        float | None, typer.Option(help="Measure the time to this accuracy or error.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data and delays.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw them here (PNG).")] = None,
) -> None:
    """Compare systems on one workload, in turns within one run."""
    for option, file in (("--json", json), ("--plot", plot)):
        if file is not None:
            prepare_file(option, file)
    if plot is not None and plot.suffix.lower() not in PLOT_SUFFIXES:
        raise LaunchError(f"--plot {plot}: a name ends in {' or '.join(PLOT_SUFFIXES)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib; pip install 'slipstream[bench]'")
    # Here, because they import torch, and --help does not need it.
    from slipstream.bench.comparison import Comparison, machine_facts
    from slipstream.bench.comparison import compare as run
    from slipstream.bench.report import as_json, heading, table
    from slipstream.bench.trial import Trial

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
        device=device_ms,
        straggle=straggle,
        lr=lr,
        evaluate_every=0 if target is None else max(1, (steps or 0) // SNAPSHOTS),
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
    loaded = trial.load()
    comparison.check(loaded)
    machine = machine_facts()
    console = Console(highlight=False, soft_wrap=True)
    outcomes, bounds = run(
        comparison,
        loaded,
        lambda line: console.print(printable_lines(line), style="dim", markup=False),
    )
    title = heading(comparison, loaded, bounds)
    console.print(printable_lines("\n".join(title)), markup=False)
    # A figure that is cut off is of no use: on a narrow terminal lines wrap instead.
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table(outcomes, bounds, loaded.goal, target))
    if json is not None:
        command = shlex.join(["slipstream", *sys.argv[1:]])
        report = as_json(comparison, loaded, outcomes, bounds, machine, command)
        write_report(json, report)
    if plot is not None and any(outcome.runs for outcome in outcomes):
        from slipstream.bench.plot import draw

        with writing("--plot", plot):
            draw(plot, title, outcomes, bounds, loaded.goal, target)
    raise typer.Exit(1 if any(outcome.failures for outcome in outcomes) else 0)


def split_systems(text: str) -> list[str]:
    """At commas, but not at those between parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
