"""Steps of optimizers whose classes do without ``Optimizer.__init__``, or that were replaced."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.torch.optimizers.own_step import check_own_step, check_whole, is_replaced, run_hooks


class Wrapper(torch.optim.Optimizer):
    """Has neither settings nor hooks, as public implementations of Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.made = inner, 0
        self.param_groups, self.state = inner.param_groups, defaultdict(dict)

    def step(self, closure: Any = None) -> str:
        self.made += 1
        self.inner.step()
        return "made"


def sgd() -> torch.optim.SGD:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def noted(optimizer: torch.optim.Optimizer) -> list[str]:
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    return seen


def test_run_hooks_of_a_wrapper_without_any_runs_each_once() -> None:
    wrapper, other = Wrapper(sgd()), Wrapper(sgd())
    run_hooks(wrapper)
    run_hooks(wrapper)  # of a later job.distribute
    seen, inner = noted(wrapper), noted(wrapper.inner)
    assert wrapper.step() == "made"
    assert (seen, inner, wrapper.made) == (["before", "after"], ["before", "after"], 1)
    other.step()  # another one of its class is as it was
    assert not hasattr(other, "_optimizer_step_pre_hooks")


@pytest.mark.parametrize("first", [False, True])
def test_run_hooks_with_a_scheduler_runs_each_once(first: bool) -> None:
    wrapper = Wrapper(sgd())
    schedule = torch.optim.lr_scheduler.ExponentialLR
    scheduler = schedule(wrapper, 0.5) if first else None
    run_hooks(wrapper)
    seen = noted(wrapper)
    scheduler = scheduler or schedule(wrapper, 0.5)
    wrapper.step()
    scheduler.step()  # which warns if its wrapper of step is gone
    assert (seen, wrapper.made) == (["before", "after"], 1)
    assert wrapper.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("calls_it", [False, True])
def test_run_hooks_of_a_replaced_step_runs_each_once(calls_it: bool) -> None:
    optimizer = sgd()
    before, made = optimizer.step, []

    def step(closure: Any = None) -> None:
        made.append(1)
        if calls_it:
            before(closure)

    optimizer.step = step
    run_hooks(optimizer)
    seen = noted(optimizer)
    optimizer.step()
    optimizer.step()
    assert (seen, len(made)) == (["before", "after"] * 2, 2)


def test_run_hooks_after_a_step_that_fails_still_runs_them() -> None:
    optimizer = sgd()
    optimizer.step = lambda: 1 / 0
    run_hooks(optimizer)
    seen = noted(optimizer)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert seen == ["before"] * 2


def test_is_replaced_tells_schedulers_from_other_functions() -> None:
    optimizer, other = sgd(), sgd()
    assert not is_replaced(optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert not is_replaced(optimizer)
    check_own_step(optimizer)
    other.step = lambda: None
    with pytest.raises(ConfigError, match=r"SGD.step was replaced.*push_pull\(\)"):
        check_own_step(other)


def test_check_whole_names_what_a_wrapper_lacks() -> None:
    wrapper = Wrapper(sgd())
    check_whole(wrapper)
    del wrapper.state
    with pytest.raises(ConfigError, match=r"Wrapper has no state: let its __init__ call super"):
        check_whole(wrapper)
