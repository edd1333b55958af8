"""Weights that a loop loads before its first step, where outer rounds follow."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from slipstream.errors import RuntimeFault
from slipstream.torch.checkpoints.loaded_weights import LoadedWeights
from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.tensors.inventory import Inventory, is_constant
from slipstream.updates import Nesterov


class SharedDigests:
    """Digests of ranks that take their first step one after the other; implements ``Digests``."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    def post(self, digest: str) -> None:
        self.posted.append(digest)

    def read(self) -> Sequence[str]:
        return self.posted


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, max_norm=0.5)
        self.head = nn.Linear(3, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(words))
        return found


def rank_of(
    model: nn.Module, digests: SharedDigests, pair: nn.Module | None = None
) -> LoadedWeights:
    """One rank's part, of the pair that trains the model or a part of it."""
    trained = list((pair or model).parameters())
    inventory = Inventory.of(model).of_optimizer(torch.optim.SGD(trained, lr=0.1))
    outer = OuterWeights(inventory, Nesterov(), is_constant(model))
    return LoadedWeights(model, outer, digests)


def same_models() -> list[Table]:
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(Table())
    return made


def test_tables_that_forward_passes_renormalize_are_not_loaded_weights() -> None:
    digests, models = SharedDigests(), same_models()
    ranks = [rank_of(model, digests) for model in models]
    for number, (rank, model) in enumerate(zip(ranks, models, strict=True)):
        model(torch.tensor([number]))
        assert rank.take() == []
    assert not torch.equal(models[0].table.weight, models[1].table.weight)


def test_steps_of_another_pair_of_the_model_are_not_loaded_weights() -> None:
    digests, models = SharedDigests(), same_models()
    pairs = [rank_of(model, digests, model.head) for model in models]
    for number, (pair, model) in enumerate(zip(pairs, models, strict=True)):
        nn.init.constant_(model.table.weight, float(number))
        assert pair.take() == []


def test_frozen_weights_that_one_rank_alone_has_loaded_are_refused() -> None:
    digests, models = SharedDigests(), same_models()
    for model in models:
        model.head.requires_grad_(False)
    one, two = (rank_of(model, digests, model.table) for model in models)
    assert one.take() == []
    nn.init.zeros_(models[1].head.weight)
    with pytest.raises(RuntimeFault, match="not alike on all ranks"):
        two.take()
