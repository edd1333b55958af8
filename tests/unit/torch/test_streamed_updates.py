"""Settings that the loop goes on changing, while updates of earlier clocks are still to come."""

from __future__ import annotations

import pytest
import torch

from slipstream.torch.streamed_updates import Timeline


class Recording(torch.optim.SGD):
    """Notes the rate of every step, and counts steps in its group, as some optimizers do."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.rates: list[float] = []
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure=None) -> None:
        group = self.param_groups[0]
        self.rates.append(float(group["lr"]))
        group["k"] += 1


def recording(lr: float | torch.Tensor = 1.0) -> Recording:
    return Recording([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def step(timeline: Timeline, optimizer: Recording, clock: int) -> None:
    with timeline.at(clock):
        optimizer.step()


@pytest.mark.parametrize("tensor", [False, True])
def test_an_update_has_the_rate_of_its_clock(tensor: bool) -> None:
    optimizer = recording(torch.tensor(1.0) if tensor else 1.0)
    timeline = Timeline(optimizer, factor=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for clock in range(3):
        timeline.note(clock)
        optimizer._opt_called = True
        schedule.step()
    for clock in range(3):
        step(timeline, optimizer, clock)
    assert optimizer.rates == [1.0, 0.5, 0.25]
    assert float(optimizer.param_groups[0]["lr"]) == 0.125
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == 0.0625


def test_the_factor_is_for_the_step_alone() -> None:
    optimizer = recording()
    timeline = Timeline(optimizer, factor=0.25)
    for clock in range(2):
        timeline.note(clock)
        step(timeline, optimizer, clock)
    assert optimizer.rates == [0.25, 0.25]
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_what_an_optimizer_counts_goes_on() -> None:
    optimizer = recording()
    timeline = Timeline(optimizer, factor=1.0)
    for clock in range(4):
        timeline.note(clock)
    for clock in range(4):
        step(timeline, optimizer, clock)
    assert optimizer.param_groups[0]["k"] == 4
    timeline.note(4)
    step(timeline, optimizer, 4)
    assert optimizer.param_groups[0]["k"] == 5


def test_settings_are_the_loops_own_again_after_an_error() -> None:
    optimizer = recording()
    timeline = Timeline(optimizer, factor=0.5)
    timeline.note(0)
    with pytest.raises(KeyError), timeline.at(0):
        raise KeyError
    assert optimizer.param_groups[0]["lr"] == 1.0
