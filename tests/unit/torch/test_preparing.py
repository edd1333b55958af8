"""What is exchanged for several pairs, and how their strategy sends it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream import systems
from slipstream.codecs import Factors
from slipstream.errors import ConfigError
from slipstream.methods import Rounds
from slipstream.routes import ByTensor, Everywhere, Large, Prefer, Route, Rule
from slipstream.routes import dense_only as dense
from slipstream.strategy import Strategy
from slipstream.topologies import Mesh, Sharded
from slipstream.torch.distribute.preparing import as_trained, check_rounds, prepare_pairs
from slipstream.torch.tensors.pairs import Pair, distinct_models

FACTORS, PLAIN = Route(Mesh(), up=Factors()), Route(Mesh())


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def names(pairs: list[Pair], strategy: Strategy | None = None) -> list[list[str]]:
    inventories = prepare_pairs(pairs, strategy or systems.push_pull())
    return [[spec.name for spec in inventory.specs] for inventory in inventories]


BUFFERS = ["1.running_mean", "1.running_var"]


def test_one_pair_exchanges_all_of_its_model() -> None:
    whole = model()
    (found,) = names([Pair(whole, sgd(whole[0]))])
    assert found == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", *BUFFERS]


@pytest.mark.parametrize("update", ["worker", "server"])
def test_of_several_each_exchanges_what_its_optimizer_holds(update: str) -> None:
    whole = model()
    pairs = [Pair(whole, sgd(whole[0])), Pair(whole, sgd(whole[2]))]
    first, second = names(pairs, systems.push_pull(update=update))  # type: ignore[arg-type]
    assert first == ["0.weight", "0.bias", *BUFFERS]
    assert second == ["2.weight", "2.bias"], "buffers belong to the first pair that has them"
    assert distinct_models(pairs) == [whole]


def test_buffers_of_a_part_belong_to_whoever_comes_first() -> None:
    whole = model()
    part = nn.Sequential(whole[1])
    first, second = names([Pair(part, sgd(whole[1])), Pair(whole, sgd(whole[0]))])
    assert first == ["0.weight", "0.bias", "0.running_mean", "0.running_var"]
    assert second == ["0.weight", "0.bias"]


def test_with_several_pairs_layers_travel_dense() -> None:
    assert dense(Prefer((FACTORS, PLAIN))) == Prefer((PLAIN,))
    rules = (Rule(Large(), FACTORS), Rule(Large(8), PLAIN))
    assert dense(ByTensor(rules, PLAIN)) == ByTensor(rules[1:], PLAIN)
    assert dense(Everywhere(PLAIN)) == Everywhere(PLAIN)
    poseidon = as_trained(systems.poseidon(dense=["head"]), 2)
    assert all(route.up.form == "dense" for route in poseidon.rounds.routes.routes())
    assert "dense/collective" in {route.scheme for route in poseidon.rounds.routes.routes()}


@pytest.mark.parametrize("name", ["push_pull", "allreduce", "all_to_all", "backup_workers"])
def test_a_strategy_of_dense_routes_stays_as_it_is(name: str) -> None:
    strategy = systems.parse(name)
    assert as_trained(strategy, 3) == strategy


def test_one_pair_keeps_compact_routes() -> None:
    assert as_trained(systems.poseidon(), 1) == systems.poseidon()


@pytest.mark.parametrize(
    "routes",
    [Everywhere(FACTORS), Prefer((FACTORS,)), ByTensor((), Route(Sharded(True), Factors()))],
)
def test_a_strategy_without_a_dense_route_is_refused(routes: Everywhere) -> None:
    with pytest.raises(ConfigError, match=r"mine: it knows no dense route.*add one"):
        as_trained(Strategy("mine", Rounds(routes)), 2)


def test_rounds_that_workers_miss_may_have_to_close_by_time() -> None:
    allowed = [
        systems.push_pull(),
        systems.async_sgd(),
        systems.backup_workers(first=3),
        systems.backup_workers(backup=0),
        systems.backup_workers(first=2, close_after_s=1.0),
        systems.backup_workers(close_after_s=1.0),
    ]
    for strategy in allowed:
        check_rounds(strategy, 2, workers=3)
    refused = [
        systems.backup_workers(first=2),
        systems.backup_workers(backup=1),
        systems.backup_workers(first="auto"),
        systems.backup_workers(first=3, close_after_s=1.0, min_first=2),
    ]
    for strategy in refused:
        check_rounds(strategy, 1, workers=3)
        with pytest.raises(ConfigError, match=r"backup_workers with 2 pairs: .* use first=3"):
            check_rounds(strategy, 2, workers=3)


def test_tables_that_forward_passes_change_are_refused_where_servers_update() -> None:
    net = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 2))
    strategy = systems.push_pull(update="server")
    with pytest.raises(ConfigError, match=r"'0.weight' belongs to a table with max_norm"):
        names([Pair(net, sgd(net))], strategy)
    assert names([Pair(net, sgd(net))])[0][0] == "0.weight"
    assert names([Pair(net, sgd(net[1]))], strategy) == [["1.weight", "1.bias"]]
