"""Ratings of items that have genres: MovieLens' ``ratings.csv`` and its ``movies.csv``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.apps.bench.data.examples import Batch, SparseBatch, SparseExamples, Split, split_off
from slipstream.apps.bench.data.ratings import TEST_SHARE, Ratings, read_ratings
from slipstream.apps.bench.reading import columns_of, lines_of, read_text, refused, rows_of

COLUMNS = ("movieId", "genres")
NO_GENRES = "(no genres listed)"
_WAY_OUT = "give the folder of a MovieLens set, with its ratings.csv and movies.csv"


class RatingBatch(NamedTuple):
    """Users and items in pairs, and the genres of each pair's item."""

    pairs: Tensor
    genres: SparseBatch


@dataclass(frozen=True, slots=True)
class RatedItems:
    """Ratings with genres: ``genres`` has a row for each item; its targets mean nothing."""

    pairs: Tensor
    values: Tensor
    genres: SparseExamples

    def __len__(self) -> int:
        return len(self.values)

    def take(self, indices: Tensor) -> Batch:
        pairs = self.pairs[indices]
        genres, _ = self.genres.take(pairs[:, 1])
        return RatingBatch(pairs, genres), self.values[indices]


def split_rated(ratings: Ratings, genres: SparseExamples, seed: int = 0) -> Split[RatedItems]:
    """Split off a tenth of the ratings, at random, for the test."""
    train, test = (
        RatedItems(ratings.pairs[part], ratings.values[part], genres)
        for part in split_off(len(ratings.values), TEST_SHARE, seed)
    )
    return Split(train, test, 1, ratings.origin)


def read_rated_items(folder: Path) -> tuple[Ratings, SparseExamples]:
    """Read all ratings of a folder, and the genres of the items that were rated."""
    ratings = read_ratings(folder)
    listed = _listed_genres(folder / "movies.csv" if folder.is_dir() else folder)
    return ratings, genre_rows([listed.get(name, ()) for name in ratings.item_names])


def _listed_genres(path: Path) -> dict[str, Sequence[str]]:
    rows = csv.DictReader(lines_of(read_text(path, _WAY_OUT)))
    missing = [column for column in COLUMNS if column not in columns_of(path, rows)]
    if missing:
        raise refused(path, 1, f"no column {', '.join(missing)}", _WAY_OUT)
    listed = {row["movieId"]: row["genres"] or NO_GENRES for row in rows_of(path, rows)}
    return {
        name: () if genres == NO_GENRES else genres.split("|") for name, genres in listed.items()
    }


def genre_rows(genres: Sequence[Sequence[str]]) -> SparseExamples:
    """Return a row of genres' numbers for each item; genres are numbered in alphabetical order."""
    numbers = {name: number for number, name in enumerate(sorted({g for of in genres for g in of}))}
    entries = [numbers[genre] for of in genres for genre in of]
    lengths = torch.tensor([0, *map(len, genres)])
    return SparseExamples(
        indices=torch.tensor(entries, dtype=torch.long),
        values=torch.ones(len(entries)),
        offsets=lengths.cumsum(0),
        targets=torch.zeros(len(genres)),
        features=max(1, len(numbers)),
    )
