"""What a change costs: two commits in turns, each in a work tree and an environment of its own.

python benchmarks/between_commits.py --before main~20 --after main --json between.json \
    --case cpu:gpt:push_pull --case "bench:fc --batch 16 --compare poseidon --rate 200mbit"

A case is ``cpu:WORKLOAD:STRATEGY`` (CPU seconds a step of rank 0, of two workers on loopback),
``memory:WORKLOAD:STRATEGY`` (the resident memory of the largest of these processes), or ``bench:``
and the arguments of ``slipstream bench`` for one system (seconds a step). The result is the ratio
after / before: the geometric mean over the pairs of runs, with its 95% interval. Each commit runs
its own ``step_cpu.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

from slipstream.apps.bench.comparison import machine_facts

HERE = Path(__file__).resolve().parent


def checked_out(revision: str, folder: Path) -> Path:
    """A work tree of this revision with an installed slipstream."""
    tree = folder / revision.replace("/", "_")
    subprocess.run(
        ["git", "-C", HERE.parent, "worktree", "add", "--detach", "--quiet", tree, revision],
        check=True,
    )
    subprocess.run(["make", "--quiet", "-C", tree, "setup"], check=True)
    return tree


def measured(tree: Path, case: str, file: Path) -> float:
    """One run of a case: the seconds of a step, or bytes."""
    program = str(tree / ".venv" / "bin" / "slipstream")
    kind, _, rest = case.partition(":")
    if kind == "bench":
        command = [program, "bench", *shlex.split(rest), "--repetitions", "1"]
        command += ["--json", str(file)]
    else:
        load, _, strategy = rest.partition(":")
        command = [program, "run", "--workers", "2", "--strategy", strategy]
        command += [str(tree / "benchmarks" / "step_cpu.py"), load, "--json", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tree)
    _, status, used = os.wait4(process.pid, 0)  # with the largest of its children
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    told: dict[str, Any] = json.loads(file.read_text())
    if kind == "memory":
        return 1024.0 * used.ru_maxrss
    if kind == "cpu":
        return float(told["cpu_s"])
    (result,) = told["results"]
    return float(result["median_s"])


def interval(ratios: Sequence[float]) -> Mapping[str, float]:
    """The geometric mean and its 95% interval, by Student's t of the logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, half = statistics.fmean(logs), 0.0
    if len(logs) > 1:
        half = t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--case", action="append", required=True)
    parser.add_argument("--alternations", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine_facts(), "before": args.before}
    report |= {"after": args.after, "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before, after = (checked_out(each, folder) for each in (args.before, args.after))
        try:
            for case in args.case:
                report["cases"][case] = alternated(case, before, after, args.alternations, folder)
                found = report["cases"][case]
                print(f"{case}: {found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f})")
        finally:
            for tree in (before, after):
                remove = ["git", "-C", HERE.parent, "worktree", "remove", "--force", tree]
                subprocess.run(remove, check=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def alternated(case: str, before: Path, after: Path, times: int, folder: Path) -> dict[str, Any]:
    """Both commits in turns; which one comes first alternates."""
    found: dict[Path, list[float]] = {before: [], after: []}
    for number in range(times):
        for tree in (before, after) if number % 2 else (after, before):
            found[tree].append(measured(tree, case, folder / "result.json"))
    ratios = [new / old for old, new in zip(found[before], found[after], strict=True)]
    return {**interval(ratios), "before": found[before], "after": found[after]}


if __name__ == "__main__":
    main()
