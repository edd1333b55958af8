"""What a refusal advises must be possible: for that system, and for what was refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.methods import SharedMemoryUpdates
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse, read_call
from slipstream.torch.distribute.preparing import check_rounds, prepare_pairs
from slipstream.torch.modes.shared_weights import check_shareable
from slipstream.torch.optimizers.shard_optimizer import settings_of
from slipstream.torch.tensors.pairs import Pair

VARIANTS = (
    *(name for name in SYSTEMS),
    "push_pull(update='server')",
    "parameter_flow(staleness=1)",
    "parameter_flow(payload='update')",
    "allreduce(wire='int8')",
    "diloco(first=2)",
)
WORKERS = 4
OPTIONS = {name for system in SYSTEMS.values() for name in inspect.signature(system).parameters}


class RowWise(torch.optim.Optimizer):
    """Such as DLRM's RWSAdagrad."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def with_state() -> Pair:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return Pair(model, optimizer)


def of(make: Callable[..., torch.optim.Optimizer], model: nn.Module | None = None) -> Pair:
    model = model or net()
    return Pair(model, make(model.parameters()))


def complex_weights() -> nn.Module:
    model = net()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    return model


PAIRS: dict[str, Callable[[], list[Pair]]] = {
    "sgd": lambda: [of(torch.optim.SGD)],
    "LBFGS": lambda: [of(torch.optim.LBFGS)],
    "SparseAdam": lambda: [of(torch.optim.SparseAdam)],
    "Adafactor": lambda: [of(torch.optim.Adafactor)],
    "RMSprop": lambda: [of(torch.optim.RMSprop)],
    "amsgrad": lambda: [of(lambda p: torch.optim.Adam(p, amsgrad=True))],
    "not torch's": lambda: [of(RowWise)],
    "row-wise": lambda: [of(RowWise, nn.Embedding(5, 2, sparse=True))],
    "has state": lambda: [with_state()],
    "complex": lambda: [of(torch.optim.SGD, complex_weights())],
    "bfloat16": lambda: [of(torch.optim.SGD, net().bfloat16())],
    "two pairs": lambda: [of(torch.optim.SGD), of(torch.optim.SGD)],
    "two pairs of LBFGS": lambda: [of(torch.optim.LBFGS), of(torch.optim.LBFGS)],
}


def refusal(strategy: Strategy, pairs: list[Pair]) -> str:
    """What ``job.distribute`` would say; empty if it takes this."""
    try:
        inventories = prepare_pairs(pairs, strategy)
        if isinstance(strategy.method, SharedMemoryUpdates):
            check_shareable(*pairs[0])
        check_rounds(strategy, len(pairs), WORKERS)
        assert all(inventory.specs for inventory in inventories)
        for pair in pairs if strategy.rounds.update.user_at_holder else ():
            settings_of(pair.optimizer)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("given", PAIRS)
def test_advice_is_possible(text: str, given: str) -> None:
    said = refusal(parse(text), PAIRS[given]())
    own, _ = read_call(text)
    takes = set(inspect.signature(SYSTEMS[own]).parameters)
    for option in re.findall(r"\b([a-z_]+)=", said):
        assert option in takes or option not in OPTIONS, said
    _, _, advice = said.partition(": ")
    for other in set(re.findall(r"\b[a-z_]+\b", advice)) & SYSTEMS.keys() - {own}:
        assert not refusal(parse(other), PAIRS[given]()), f"{text} with {given}: {said}"


def test_row_wise_optimizers_are_refused_as_sparse_adam_is() -> None:
    embedding = nn.Sequential(nn.EmbeddingBag(5, 2, sparse=True))
    pair = Pair(embedding, RowWise(embedding.parameters()))
    for text in VARIANTS:
        strategy = parse(text)
        if strategy.rounds.update.inner.travels == "gradients" and not isinstance(
            strategy.method, SharedMemoryUpdates
        ):
            said = refusal(strategy, [pair])
            assert all(word in said for word in ("'0'", "RowWise", "sparse=False")), (
                f"{text}: {said}"
            )
    dense = nn.Sequential(nn.EmbeddingBag(5, 2))
    assert not refusal(parse("push_pull"), [Pair(dense, RowWise(dense.parameters()))])
    torchs = [Pair(embedding, torch.optim.Adagrad(embedding.parameters()))]
    assert not refusal(parse("push_pull"), torchs)
