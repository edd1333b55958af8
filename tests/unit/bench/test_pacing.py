"""The pace of a real net, on a clock that only sleeping and looking at it move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from slipstream.apps.bench import pacing
from slipstream.apps.bench.pacing import Pace

TICK_S = 1e-6
STEP_S = 0.3  # two layers: each 0.05 s forward and 0.1 s backward


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep)
    monkeypatch.setattr(pacing, "time", fake)
    return clock


class Slow(nn.Module):
    """Takes time that is nobody's computing, forward or backward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.forward_s
        y = x.view_as(x)
        y.register_hook(self._backward)
        return y

    def _backward(self, _gradient: Tensor) -> None:
        self.clock.now += self.backward_s


@pytest.fixture
def between(clock: Clock) -> Slow:
    return Slow(clock)


@pytest.fixture
def net(between: Slow) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), between, nn.ReLU(), nn.Linear(4, 2))


def arrivals(net: nn.Sequential, pace: Pace, clock: Clock) -> dict[str, float]:
    """A step; when its parts ended, from its beginning."""
    begun, seen = clock.now, {}
    for index in (0, 3):
        net[index].weight.register_post_accumulate_grad_hook(
            lambda _, index=index: seen.update({f"gradient {index}": clock.now - begun})
        )
    pace.begin_step()
    output = net(torch.ones(1, 3))
    seen["forward"] = clock.now - begun
    output.sum().backward()
    seen["step"] = clock.now - begun
    return seen


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.001)


def test_gradients_leave_spread_over_the_step(net: nn.Sequential, clock: Clock) -> None:
    pace = Pace(net, STEP_S)
    for _ in range(2):
        seen = arrivals(net, pace, clock)
        assert seen == {
            "forward": about(0.1),
            "gradient 3": about(0.2),
            "gradient 0": about(0.3),
            "step": about(0.3),
        }
        clock.now += 5.0  # between steps


def test_waiting_in_forward_is_not_made_up_for(
    net: nn.Sequential, clock: Clock, between: Slow
) -> None:
    between.forward_s = 1.0
    assert arrivals(net, Pace(net, STEP_S), clock)["step"] == about(1.3)


def test_computing_in_backward_counts(net: nn.Sequential, clock: Clock, between: Slow) -> None:
    between.backward_s = 0.07
    assert arrivals(net, Pace(net, STEP_S), clock)["step"] == about(0.3)


def test_a_net_that_computes_longer_than_the_device_is_not_held_up(
    net: nn.Sequential, clock: Clock, between: Slow
) -> None:
    between.backward_s = 2.0
    pace = Pace(net, STEP_S)
    assert arrivals(net, pace, clock)["step"] == about(2.2)
    between.backward_s = 0.0
    assert arrivals(net, pace, clock)["step"] == about(0.3)  # each step has a clock of its own


def test_evaluating_registers_nothing(net: nn.Sequential, clock: Clock) -> None:
    Pace(net, STEP_S)
    with torch.no_grad():
        net[3](torch.ones(1, 4))
    assert clock.now == about(0.05)
