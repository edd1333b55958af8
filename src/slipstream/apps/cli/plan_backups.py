"""``slipstream plan-backups``: finds the best number of backup workers from a run's log."""

from __future__ import annotations

import errno
import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.apps.cli.options import prepare_file, write_report
from slipstream.errors import ConfigError
from slipstream.input_files import lines_limited
from slipstream.planning.backups import (
    LEAST_STEPS,
    ROUNDS,
    Split,
    affordable_rounds,
    best_split,
    compare_splits,
)
from slipstream.printable import printable, shown

MOST_BYTES, MOST_LINE_BYTES = 256 << 20, 32 << 20
MOST_WORKERS = 1024
LEAST_STEP_S, MOST_STEP_S = 1e-9, 1e9
ABOUT_ROUNDS = b'"rounds"'


def plan_backups(
    runlog: Annotated[
        Path,
        typer.Argument(metavar="RUNLOG", help="The --log file of a run with backup_workers."),
    ],
    iterations: Annotated[
        str | None,
        typer.Option(
            metavar="N:ITERATIONS,...",
            help="Rounds it took to converge when N workers made a round, such as "
            "4:1200,8:700; by default a shape like the paper's is assumed.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=f"{ROUNDS}, fewer for very many workers",
            help="Rounds to replay for every split.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the splits here.")] = None,
) -> None:
    """Replay a run's arrival times: how many workers should make a round, how many back them up."""
    if json is not None:
        prepare_file("--json", json)
    points = None if iterations is None else read_points(iterations)
    durations = read_durations(runlog)
    rounds = replayed_rounds(rounds, len(durations))
    splits = compare_splits(durations, points, rounds=rounds, seed=seed)
    best = best_split(splits)
    Console().print(_table(splits, best))
    print(_in_words(best))
    if json is not None:
        report = {
            "runlog": str(runlog),
            "rounds": rounds,
            "seed": seed,
            "iterations": points,
            "splits": [asdict(split) for split in splits],
            "best": asdict(best),
        }
        write_report(json, report)


def replayed_rounds(requested: int | None, workers: int) -> int:
    most = affordable_rounds(workers)
    if requested is not None and requested > most:
        raise ConfigError(
            f"--rounds {shown(requested)}: for {workers} workers {most} can be replayed at most; "
            "give fewer, or leave it out"
        )
    return min(ROUNDS, most) if requested is None else requested


def read_durations(runlog: Path) -> dict[int, list[float]]:
    """Return every worker's step durations, from the log's last line about rounds."""
    found = None
    for line in _lines(runlog):
        if line.get("event") == "rounds":
            found = line.get("durations_s")
    if found is None:
        raise _refused(
            runlog,
            " has no arrival times: was it a run with backup_workers? only those record "
            "arrival times",
        )
    try:
        durations = {
            int(worker): [float(seconds) for seconds in steps] for worker, steps in found.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _refused(
            runlog,
            f": durations_s of its last line about rounds cannot be read ({shown(str(error))}); it "
            'should be {"0": [seconds, ...], "1": ...}',
        ) from error
    _check(runlog, durations)
    return durations


def _check(runlog: Path, durations: dict[int, list[float]]) -> None:
    workers = f"{len(durations)} worker{'s' * (len(durations) != 1)}"
    if len(durations) < 2:
        problem = f" has arrival times of {workers}: there is nothing to split below two"
        raise _refused(runlog, problem)
    if len(durations) > MOST_WORKERS:
        problem = f" has arrival times of {workers}: splits of {MOST_WORKERS} at most are compared"
        raise _refused(runlog, f"{problem}; remove some from durations_s")
    for worker, steps in sorted(durations.items()):
        if len(steps) < LEAST_STEPS:
            raise _refused(
                runlog,
                f" has {len(steps)} step{'s' * (len(steps) != 1)} of worker {worker}: too few to "
                f"tell, {LEAST_STEPS} of every worker are needed; log a longer run",
            )
        for step, seconds in enumerate(steps):
            if not LEAST_STEP_S <= seconds <= MOST_STEP_S:
                raise _refused(
                    runlog,
                    f": worker {worker}, step {step}: a duration of {seconds} s cannot be; "
                    f"durations are from {LEAST_STEP_S:g} to {MOST_STEP_S:g} s",
                )


def _refused(runlog: Path, problem: str) -> ConfigError:
    return ConfigError(printable(f"{runlog}{problem}"))


def read_points(text: str) -> list[tuple[int, float]]:
    """Parse ``4:1200,8:700`` as points (N, iterations)."""
    points = []
    for part in text.split(","):
        first, _, needed = part.partition(":")
        try:
            points.append((int(first), float(needed)))
        except ValueError:
            raise ConfigError(
                f"--iterations: cannot read {shown(part.strip())}; write N:ITERATIONS, joined by "
                "commas, such as 4:1200,8:700"
            ) from None
    return points


def _lines(runlog: Path) -> Iterator[dict[str, Any]]:
    try:
        for number, line in enumerate(lines_limited(runlog, MOST_BYTES, MOST_LINE_BYTES), start=1):
            if line.strip():
                yield _object(runlog, number, line.strip())
    except FileNotFoundError:
        way_out = "name the file that --log wrote"
        raise ConfigError(printable(f"there is no run log {runlog}: {way_out}")) from None
    except OSError as error:
        problem = f"cannot read the run log {runlog}: {error.strerror}"
        if error.errno == errno.EFBIG:
            problem += '; copy its lines with "rounds" to a file of their own, no others are needed'
        raise ConfigError(printable(problem)) from error


def _object(runlog: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the content of a line; one that is not about rounds is only checked."""
    content = None
    try:
        if ABOUT_ROUNDS in line:
            content = jsonlib.loads(line)
        elif line[:1] + line[-1:] == b"{}":  # most lines of a long log: skip them fast
            content = {}
        else:
            line.decode()
    except UnicodeDecodeError:
        raise _refused(runlog, " is not text: name the file that --log wrote") from None
    except (ValueError, RecursionError):
        pass
    if not isinstance(content, dict):
        problem = f", line {number}: not a JSON object; a run log has one a line"
        raise _refused(runlog, f"{problem}. Name the file that --log wrote")
    return content


def _table(splits: Sequence[Split], best: Split) -> Table:
    everyone = splits[-1]
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    headings = ("first", "backups", "round ms", "dropped", "iterations", "time", "")
    for heading in headings:
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for split in splits:
        shown.add_row(
            str(split.first),
            str(split.backup),
            f"{1000 * split.round_s:.4g}",
            f"{split.dropped_share:.0%}",
            f"{split.iterations / everyone.iterations:.2f}",
            f"{split.relative_time:.2f}",
            "best" if split is best else "",
        )
    return shown


def _in_words(best: Split) -> str:
    workers = best.first + best.backup
    if not best.backup:
        return f"best: first={workers} (no backups): nothing beats waiting for all {workers}"
    backups = f"{best.backup} backup{'s' * (best.backup > 1)}"
    gain = 1 / best.relative_time
    return (
        f"best: first={best.first} ({backups}): {gain:.2f} x faster than waiting for all {workers}"
    )
