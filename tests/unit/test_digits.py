from __future__ import annotations

import pytest
import torch

from slipstream.apps.cli.digits import Digits, Recipe
from slipstream.apps.cli.summary import human_bytes

RECIPE = Recipe(epochs=1, batch=60, lr=0.1, seed=3)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits.load()


@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_the_batch_of_all_workers_does_not_depend_on_their_number(
    digits: Digits, workers: int
) -> None:
    alone = list(digits.shards(RECIPE, 0, 0, 1))
    shards = zip(*(digits.shards(RECIPE, 0, rank, workers) for rank in range(workers)), strict=True)
    for (_, labels), parts in zip(alone, shards, strict=True):
        assert len(labels) == 60
        together = torch.cat([part for _, part in parts])
        assert torch.equal(together.sort().values, labels.sort().values)
        assert max(len(part) for _, part in parts) - min(len(part) for _, part in parts) <= 1


def test_epochs_differ_and_repeat(digits: Digits) -> None:
    def first_labels(epoch: int) -> torch.Tensor:
        return next(digits.shards(RECIPE, epoch, 0, 1))[1]

    assert torch.equal(first_labels(0), first_labels(0))
    assert not torch.equal(first_labels(0), first_labels(1))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_human_bytes(nbytes: int, text: str) -> None:
    assert human_bytes(nbytes) == text
