"""MovieLens: ``ratings.csv`` with a line ``userId,movieId,rating,timestamp`` for each rating."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.apps.bench.data.examples import Split, TensorExamples, split_off
from slipstream.apps.bench.reading import columns_of, lines_of, read_text, refused, rows_of
from slipstream.printable import shown

COLUMNS = ("userId", "movieId", "rating")
TEST_SHARE = 0.1
MOST_RATING = 1e6
_WAY_OUT = "give the ratings.csv of a MovieLens set, or the folder it is in"


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings: ``pairs`` are users and items, numbered from 0 without gaps, ``values`` the ratings.

    ``item_names`` are the names of items in a file, by their numbers.
    """

    pairs: Tensor
    values: Tensor
    users: int
    items: int
    origin: str
    item_names: tuple[str, ...] = ()

    def split(self, seed: int = 0) -> Split[TensorExamples]:
        """Split off a tenth, at random, for the test."""
        train, test = (
            TensorExamples(self.pairs[part], self.values[part])
            for part in split_off(len(self.values), TEST_SHARE, seed)
        )
        return Split(train, test, 1, self.origin)


def read_ratings(path: Path) -> Ratings:
    """Read all ratings; users and films are numbered in the order in which they appear."""
    path = path / "ratings.csv" if path.is_dir() else path
    rows = csv.DictReader(lines_of(read_text(path, _WAY_OUT)))
    missing = [column for column in COLUMNS if column not in columns_of(path, rows)]
    if missing:
        raise refused(path, 1, f"no column {', '.join(missing)}", _WAY_OUT)
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    pairs, values = [], []
    for row in rows_of(path, rows):
        user, item, rating = (row[column] for column in COLUMNS)
        value = _rating(path, rows.line_num, rating)
        if not user or not item:
            raise refused(path, rows.line_num, "no user or no film", "mend or remove the line")
        pairs.append((users.setdefault(user, len(users)), items.setdefault(item, len(items))))
        values.append(value)
    if len(values) < 2:
        raise refused(path, None, f"{len(values)} ratings are too few to split", _WAY_OUT)
    return Ratings(
        torch.tensor(pairs),
        torch.tensor(values),
        len(users),
        len(items),
        origin=str(path),
        item_names=tuple(items),
    )


def _rating(path: Path, line: int, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) <= MOST_RATING:
        problem = f"rating {shown(text)} is not a number"
        raise refused(path, line, problem, "mend or remove the line")
    return value
