"""Tries every break of the list, and prints how many the tests see."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mutants.breaks import Break, BreakError, load
from mutants.environment import WorktreeEnvironment
from mutants.results import Results, score
from mutants.source import edit
from mutants.tree import Tree, snapshot
from mutants.trial import Result, Trials

ROOT = Path(__file__).parents[2]
ASKED = 0.95  # of the breaks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--break", dest="only", metavar="NAME", help="try only this one")
    parser.add_argument("--room", help="try only those of this folder, such as runtime/members")
    parser.add_argument("--again", action="store_true", help="try also those with a kept result")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS")
    return parser.parse_args()


def chosen(breaks: list[Break], only: str | None, room: str | None) -> list[tuple[str, Break]]:
    """Return breaks with their rooms."""
    found = [(edit(ROOT, each).room, each) for each in breaks if only in (None, each.name)]
    found = [pair for pair in found if room in (None, pair[0])]
    if not found:
        raise BreakError(f"no break fits: --break {only}, --room {room}")
    return found


def main() -> int:
    given = arguments()
    folder = ROOT / "build/mutants"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        pairs = chosen(load(ROOT / "tests/mutants.toml"), given.only, given.room)
    except BreakError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 1
    tree = Tree(ROOT, folder / "tree", snapshot(ROOT), WorktreeEnvironment(folder))
    results, trials = Results(folder / "results.json"), Trials(tree, given.limit)
    outcomes: list[tuple[str, Result]] = []
    for room, each in pairs:
        key = Results.key(each, edit(ROOT, each).path, tree.blobs)
        kept = None if given.again else results.get(key)
        result = kept or trials.run(each)
        results.put(key, result)
        outcomes.append((room, result))
        seconds = "   kept" if kept else f"{result.seconds:5.1f} s"
        print(f"{result.outcome:<9}{seconds}  {each.name}: {result.detail}", flush=True)
    lines, share = score(outcomes)
    print("", *lines, sep="\n")
    return int(share < ASKED or any(result.outcome == "invalid" for _, result in outcomes))


sys.exit(main())
