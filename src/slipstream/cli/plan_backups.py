"""``slipstream plan-backups``: how many backup workers would have been best, from a run's log."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slipstream.cli.options import prepare_file
from slipstream.errors import ConfigError
from slipstream.planning.backups import LEAST_STEPS, Split, best_split, compare_splits


def plan_backups(
    runlog: Annotated[
        Path,
        typer.Argument(metavar="RUNLOG", help="What --log wrote in a run with backup_workers."),
    ],
    iterations: Annotated[
        str | None,
        typer.Option(
            metavar="N:ITERATIONS,...",
            help="Rounds it took to converge when N workers made a round, such as "
            "4:1200,8:700; by default a shape like the paper's is assumed.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to replay for every split.")] = 4000,
    seed: Annotated[int, typer.Option(min=0, help="Of the resampling.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the splits here.")] = None,
) -> None:
    """Replay a run's arrival times: how many workers should make a round, how many back them up."""
    if json is not None:
        prepare_file("--json", json)
    points = None if iterations is None else read_points(iterations)
    splits = compare_splits(read_durations(runlog), points, rounds=rounds, seed=seed)
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
        json.write_text(jsonlib.dumps(report, indent=2) + "\n")


def read_durations(runlog: Path) -> dict[int, list[float]]:
    """Every worker's step durations, as the log's last line about rounds has them."""
    found = None
    for line in _lines(runlog):
        if line.get("event") == "rounds":
            found = line.get("durations_s")
    if found is None:
        raise ConfigError(
            f"{runlog} has no arrival times: was it a run with backup_workers? only those record "
            "arrival times"
        )
    try:
        durations = {
            int(worker): [float(seconds) for seconds in steps] for worker, steps in found.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{runlog}: durations_s of its last line about rounds cannot be read ({error}); it "
            'should be {"0": [seconds, ...], "1": ...}'
        ) from error
    if len(durations) < 2:
        raise ConfigError(
            f"{runlog} has arrival times of {len(durations)} "
            f"worker{'s' * (len(durations) != 1)}: there is nothing to split below two"
        )
    for worker, steps in sorted(durations.items()):
        if len(steps) < LEAST_STEPS:
            raise ConfigError(
                f"{runlog} has {len(steps)} step{'s' * (len(steps) != 1)} of worker {worker}: "
                f"too few to tell, {LEAST_STEPS} of every worker are needed; log a longer run"
            )
    return durations


def read_points(text: str) -> list[tuple[int, float]]:
    """``4:1200,8:700`` as points (N, iterations)."""
    points = []
    for part in text.split(","):
        first, _, needed = part.partition(":")
        try:
            points.append((int(first), float(needed)))
        except ValueError:
            raise ConfigError(
                f"--iterations: cannot read {part.strip()!r}; write N:ITERATIONS, joined by "
                "commas, such as 4:1200,8:700"
            ) from None
    return points


def _lines(runlog: Path) -> Iterator[dict[str, Any]]:
    try:
        text = runlog.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no run log {runlog}: name the file that --log wrote") from None
    except OSError as error:
        raise ConfigError(f"cannot read the run log {runlog}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{runlog} is not text: name the file that --log wrote") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = jsonlib.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ConfigError(
                f"{runlog}, line {number}: not a JSON object; a run log has one a line. Name the "
                "file that --log wrote"
            )
        yield content


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
