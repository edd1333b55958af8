"""Results that are kept between runs, and the score."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mutants.breaks import Break
from mutants.trial import Result

ASKED = 0.95  # of the breaks
KEPT = ("killed", "survived")  # others may have another outcome when tried again


class Results:
    """A file of results, written after each one, so that an interrupted run can continue.

    A result holds for a break, the content of the file it is in, and of its tests' files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_key = json.loads(path.read_text()) if path.exists() else {}

    @staticmethod
    def key(each: Break, source: Path, blobs: Mapping[str, str]) -> str:
        files = {name: blobs.get(name) for name in [str(source), *each.test_files]}
        return hashlib.sha256(json.dumps([each.fields(), files]).encode()).hexdigest()

    def get(self, key: str) -> Result | None:
        return Result(**self._by_key[key]) if key in self._by_key else None

    def put(self, key: str, result: Result) -> None:
        if result.outcome not in KEPT:
            return
        self._by_key[key] = asdict(result)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._by_key, indent=1))
        os.replace(part, self._path)


def score(outcomes: list[tuple[str, Result]]) -> list[str]:
    """Return a line for each room, and one for all."""
    by_room = defaultdict(list)
    for room, result in outcomes:
        by_room[room].append(result)
    rows = [*sorted(by_room.items()), ("all", [result for _, result in outcomes])]
    return [f"{room:<24}{killed(own):>4} of {len(own):<4}{share(own):>6.0%}" for room, own in rows]


def enough(outcomes: list[tuple[str, Result]]) -> bool:
    """Return whether tests see so many breaks as is asked for, and every entry can be tried."""
    results = [result for _, result in outcomes]
    valid = all(result.outcome != "invalid" for result in results)
    return valid and share(results) >= ASKED


def killed(results: list[Result]) -> int:
    return sum(result.outcome == "killed" for result in results)


def share(results: list[Result]) -> float:
    return killed(results) / len(results)
