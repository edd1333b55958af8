"""Steps of optimizers that a job does not know, on parameters that it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import RuntimeFault
from slipstream.systems import parse
from slipstream.torch.capture.other_steps import OtherSteps, why_not_by_others
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.inventory import Inventory
from slipstream.types import Cluster


class Inner(torch.optim.Optimizer):
    """Steps another optimizer within its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.fixture
def model() -> nn.Module:
    made = nn.Linear(2, 2)
    made(torch.ones(1, 2)).sum().backward()
    return made


Watch = Callable[..., OtherSteps]


@pytest.fixture
def watch(model: nn.Module) -> Iterator[Watch]:
    with ExitStack() as opened:

        def begin(*known: torch.optim.Optimizer) -> OtherSteps:
            made = OtherSteps(model.named_parameters(), known, "it is not known")
            opened.callback(made.close)
            return made

        yield begin


def test_other_steps_of_an_unknown_optimizer_are_named(model: nn.Module, watch: Watch) -> None:
    known, other = sgd(model), sgd(model)
    watching = watch(known)
    known.step()
    for _ in range(2):
        with pytest.raises(RuntimeFault, match=r"SGD has made a step on 'weight'.*not known"):
            other.step()
    watching.close()
    other.step()


def test_other_steps_around_or_within_a_known_one_pass(model: nn.Module, watch: Watch) -> None:
    inner = sgd(model)
    watching = watch(inner)
    Inner(inner).step()
    watching.close()
    outer = Inner(sgd(model))
    watching = watch(outer)
    outer.step()
    watching.close()
    local = Inner(sgd(model))
    loop = LoopOptimizer(local)
    loop.attach(local.step)
    watching = watch(loop, local)
    loop.step()
    with pytest.raises(RuntimeFault):
        local.inner.step()  # afterwards it is another's


def test_other_steps_after_a_known_one_has_failed_are_named(model: nn.Module, watch: Watch) -> None:
    known, other = sgd(model), sgd(model)
    watch(known)
    handle = known.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        known.step()
    handle.remove()
    known.step()
    with pytest.raises(RuntimeFault):
        other.step()


def test_other_steps_on_others_or_without_gradients_pass(model: nn.Module, watch: Watch) -> None:
    watch(sgd(model))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    sgd(other).step()
    model.zero_grad()
    sgd(model).step()


@pytest.mark.parametrize(
    ("strategy", "pairs", "why"),
    [
        ("push_pull", 1, ""),
        ("allreduce", 1, ""),
        ("one_bit", 1, ""),
        ("push_pull", 2, "with 2 pairs"),
        ("push_pull(averaged=0.9)", 1, "averaged weights"),
        ("push_pull(update='server')", 1, "reach other workers"),
        ("backup_workers(first=2)", 1, "reach other workers"),
        ("async_sgd", 1, "reach other workers"),
        ("parameter_flow(staleness=1)", 1, "reach other workers"),
        ("parameter_flow(staleness=1, payload='update', overlap=False)", 1, "reach other workers"),
        ("ako", 1, "reach other workers"),
        ("diloco(every=2)", 1, "reach other workers"),
        ("gadei", 1, "reach other workers"),
    ],
)
def test_why_not_by_others_by_system(strategy: str, pairs: int, why: str) -> None:
    plan = parse(strategy).plan(Inventory.of(nn.Linear(2, 2)).specs, Cluster(2, servers=1))
    found = why_not_by_others(plan, strategy, pairs=pairs)
    assert why in found
    assert bool(found) == bool(why)
