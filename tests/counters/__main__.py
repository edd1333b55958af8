"""Prints each counter with its limit, and the lines of the core."""

from __future__ import annotations

import argparse
import sys

from counters.limits import COUNTERS, FILE, MEASURED, load, lower
from counters.source import core


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m counters", description=__doc__)
    parser.add_argument(
        "--write",
        nargs="*",
        type=measured,
        metavar="NAME=COUNT",
        help="lower limits to what is counted now, and those of calls to what their test has found",
    )
    parser.add_argument("--places", metavar="COUNTER", choices=COUNTERS, help="list its places")
    return parser.parse_args()


def measured(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if name not in MEASURED:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(sorted(MEASURED))}")
    return name, int(count)


def main() -> int:
    given = arguments()
    source = core()
    if given.places:
        print(*COUNTERS[given.places](source), sep="\n")
        return 0
    counts = {name: len(count(source)) for name, count in COUNTERS.items()}
    risen = {} if given.write is None else lower(counts | dict(given.write))
    limits = load()
    for name, count in counts.items():
        print(f"{count:6}  of {limits[name]:4}  {name}")
    print(f"{source.lines:6}           lines of the core, in {len(source.modules)} files")
    if risen:
        print(f"not written, since they have risen: {', '.join(risen)} ({FILE})", file=sys.stderr)
    return int(bool(risen))


sys.exit(main())
