from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.apps.bench.data import Ratings, read_rated_items
from slipstream.apps.bench.data.generated import ratings_by_genre
from slipstream.apps.bench.data.rated_items import genre_rows, split_rated
from slipstream.errors import ConfigError

RATINGS = "userId,movieId,rating,timestamp\n7,90,4.0,1\n3,11,0.5,2\n7,11,5,3\n7,12,2,4\n"
MOVIES = "movieId,title,genres\n11,A,Drama|Comedy\n12,B,(no genres listed)\n99,C,War\n90,D,Drama\n"


def test_items_have_the_genres_of_their_line(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(RATINGS)
    (tmp_path / "movies.csv").write_text(MOVIES)
    ratings, genres = read_rated_items(tmp_path)
    assert ratings.item_names == ("90", "11", "12")
    assert genres.features == 2  # of items that somebody rated
    bags, _ = genres.take(torch.tensor([1, 2, 0]))
    assert bags.indices.tolist() == [1, 0, 1]  # Drama and Comedy, none, Drama
    assert bags.offsets.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("movies", "said"),
    [("movieId,title\n1,A\n", "line 1: no column genres"), (None, "cannot be read")],
)
def test_a_list_without_genres_is_refused(tmp_path: Path, movies: str | None, said: str) -> None:
    (tmp_path / "ratings.csv").write_text(RATINGS)
    if movies is not None:
        (tmp_path / "movies.csv").write_text(movies)
    with pytest.raises(ConfigError, match=rf"movies\.csv(, |: ){said}"):
        read_rated_items(tmp_path)


def test_a_batch_has_its_items_genres() -> None:
    ratings = Ratings(
        torch.tensor([[0, 1], [1, 0], [2, 1]]), torch.tensor([1.0, 2.0, 3.0]), 3, 2, "a test"
    )
    examples = split_rated(ratings, genre_rows([["b"], ["a", "b"]])).train
    assert len(examples) == 2
    batch, values = examples.take(torch.arange(2))
    for (user, item), value in zip(batch.pairs.tolist(), values.tolist(), strict=True):
        assert value == user + 1
        assert item == (0 if user == 1 else 1)
    assert len(batch.genres.offsets) == 2


def test_held_out_ratings_are_not_trained_on() -> None:
    count = 500
    ratings = Ratings(torch.zeros(count, 2).long(), torch.arange(count).float(), 1, 1, "a test")
    split = split_rated(ratings, genre_rows([["a"]]))
    assert len(split.test) == 50
    together = torch.cat([split.train.values, split.test.values])
    assert torch.equal(together.sort().values, ratings.values)


def test_generated_ratings_are_the_same_for_the_same_seed() -> None:
    (first, genres), (again, _), (other, _) = (
        ratings_by_genre(count=300, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, other.values)
    assert len(genres) == first.items
    lengths = genres.offsets.diff()
    assert (int(lengths.min()), int(lengths.max())) == (1, 3)
