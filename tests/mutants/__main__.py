"""Tries every break of the list, and prints how many the tests see."""

from __future__ import annotations

import argparse
import fcntl
import signal
import sys
from pathlib import Path

from mutants.breaks import Break, BreakError, load
from mutants.environment import WorktreeEnvironment
from mutants.results import Results, enough, score
from mutants.source import edit
from mutants.tree import Tree, snapshot
from mutants.trial import Result, Trials

ROOT = Path(__file__).parents[2]


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # tests under way are ended then
    folder = ROOT / "build/mutants"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pairs = chosen(load(ROOT / "tests/mutants.toml"), given.only, given.room)
        except BlockingIOError:
            print(f"mutants: another run uses {folder}; wait for its end", file=sys.stderr)
            return 1
        except BreakError as error:
            print(f"mutants: {error}", file=sys.stderr)
            return 1
        outcomes = try_all(pairs, folder, given)
    print("", *score(outcomes), sep="\n")
    return int(not enough(outcomes))


def try_all(
    pairs: list[tuple[str, Break]], folder: Path, given: argparse.Namespace
) -> list[tuple[str, Result]]:
    """Print and return what becomes of each break, with its room."""
    tree = Tree(ROOT, folder / "tree", snapshot(ROOT), WorktreeEnvironment(folder))
    results, trials = Results(folder / "results.json"), Trials(tree, given.limit)
    outcomes = []
    for room, each in pairs:
        key = Results.key(each, edit(ROOT, each).path, tree.blobs)
        kept = None if given.again else results.get(key)
        result = kept or trials.run(each)
        results.put(key, result)
        outcomes.append((room, result))
        seconds = "   kept" if kept else f"{result.seconds:5.1f} s"
        print(f"{result.outcome:<9}{seconds}  {each.name}: {result.detail}", flush=True)
    return outcomes


sys.exit(main())
