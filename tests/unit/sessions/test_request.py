"""What job.distribute was asked for, over all of its calls."""

from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.sessions.request import Request, own_optimizer, pair_of
from slipstream.systems import push_pull
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_pairs_of_later_calls_follow_those_of_earlier_ones() -> None:
    first, second = pair(), pair()
    request = Request.extend(None, [first], "push_pull(overlap=False)", default="allreduce")
    assert (request.strategy, request.name) == (
        push_pull(overlap=False),
        "push_pull(overlap=False)",
    )
    request = Request.extend(request, [second], None, default="allreduce")
    assert request.pairs == (first, second)
    assert request.strategy == push_pull(overlap=False)


@pytest.mark.parametrize(("default", "name"), [("allreduce", "allreduce"), (None, "push_pull")])
def test_without_a_strategy_the_command_line_decides(default: str | None, name: str) -> None:
    assert Request.extend(None, [pair()], None, default).name == name


def test_all_pairs_have_one_strategy() -> None:
    before = Request.extend(None, [pair()], "push_pull", None)
    with pytest.raises(ConfigError, match="push_pull before, and now with allreduce"):
        Request.extend(before, [pair()], "allreduce", None)
    with pytest.raises(ConfigError, match="push_pull before, and now with other settings"):
        Request.extend(before, [pair()], "push_pull(overlap=False)", None)


@pytest.mark.parametrize("given", [None, 3, [], (nn.Linear(1, 1),), tuple(reversed(pair()))])
def test_what_is_no_pair_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="takes a model and an optimizer"):
        pair_of(given)


def test_what_distribute_returned_stands_for_the_users_optimizer() -> None:
    model, optimizer = pair()
    loop = LoopOptimizer(optimizer)
    assert pair_of((model, loop)).optimizer is optimizer
    assert own_optimizer(loop) is own_optimizer(optimizer) is optimizer
