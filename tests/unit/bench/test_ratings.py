from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.apps.bench.data import read_ratings
from slipstream.errors import ConfigError

HEADER = "userId,movieId,rating,timestamp\n"


def test_users_and_films_are_numbered_as_they_appear(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(HEADER + "7,90,4.0,1\n3,11,0.5,2\n7,11,5,3\n")
    ratings = read_ratings(tmp_path)
    assert ratings.pairs.tolist() == [[0, 0], [1, 1], [0, 1]]
    assert ratings.values.tolist() == [4, 0.5, 5]
    assert (ratings.users, ratings.items) == (2, 2)
    split = ratings.split()
    assert (len(split.train), len(split.test)) == (2, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("user,film\n", "line 1: no column userId, movieId, rating"),
        (HEADER + "1,1,4,0\n1,2,good,0\n", "line 3: rating 'good' is not a number"),
        (HEADER + "1,1\n", "line 2: rating None"),
        (HEADER + ",1,4,0\n", "line 2: no user or no film"),
        (HEADER, "0 ratings are too few"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "ratings.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"ratings\.csv(, |: ){said}"):
        read_ratings(path)


def test_the_real_one(real_data: Callable[[str], Path]) -> None:
    ratings = read_ratings(real_data("ml-latest-small"))
    assert (len(ratings.values), ratings.users, ratings.items) == (100_836, 610, 9_724)
    assert (ratings.values.min(), ratings.values.max()) == (0.5, 5)
