"""Updates of earlier clocks: their settings, and the gradients of the loop, which stay its own."""

from __future__ import annotations

import copy

import pytest
import torch

from slipstream.runtime.exchange.update_stream import UpdateStream
from slipstream.runtime.members.member import HUB
from slipstream.systems import parameter_flow
from slipstream.testing.cluster import Stage
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.modes.streamed import ClockedOptimizer, StreamedUpdates, Timeline
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.slots import LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.types import Cluster


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


class Counted(Averages):
    """How often weights were updated."""

    updates = 0

    def follow(self) -> None:
        self.updates += 1


class Worker:
    """One worker and one server, with all that applies updates of earlier clocks."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **how) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))
        self.plain = copy.deepcopy(self.model)
        self.local = optimizer(self.model.parameters(), lr=0.5)
        self.reference = torch.optim.SGD(self.plain.parameters(), lr=0.5)
        inventory = Inventory.of(self.model)
        settings = {"delta": 0.0, "staleness": 1, "rate_factor": 1.0, **how}
        plan = parameter_flow(**settings).plan(inventory.specs, Cluster(1, 1))
        self.stage = Stage(plan, 0, None)
        slots = LiveTensors(plan, inventory, Staging())
        self.optimizer = LoopOptimizer(self.local)
        self.averages = Counted(self.model, None, ())
        clocked = ClockedOptimizer(plan, inventory, slots, self.optimizer, self.averages)
        stream = UpdateStream(
            0, plan, self.stage.members[HUB], slots, apply=clocked.apply, limit_s=10
        )
        self.synchronizer = Synchronizer(
            self.model,
            plan,
            inventory,
            slots,
            (stream,),
            lambda made: StreamedUpdates(made, self.optimizer, clocked, stream),
        )

    @property
    def applied(self) -> int:
        return self.averages.updates

    def backward(self, step: int) -> None:
        """Of a loss that is linear in the weights: delay does not change gradients."""
        for model in (self.model, self.plain):
            model.zero_grad()
            data = torch.full((2, 6), step + 1.0)
            (model[0](data).sum() + model[1](data[:, :4]).sum()).backward()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()


def notes(gradients: list[torch.Tensor]) -> list[tuple[int, int, list[float]]]:
    return [(id(g), g._version, g.flatten().tolist()) for g in gradients]


HOW = [{}, {"overlap": False}, {"payload": "update", "overlap": False}]


@pytest.mark.parametrize("how", HOW)
def test_the_gradients_of_the_loop_are_its_own_whatever_is_applied(how: dict) -> None:
    worker = Worker(**how)
    for step in range(4):
        worker.backward(step)
        gradients = worker.gradients()
        known = notes(gradients)
        worker.step()
        assert notes(worker.gradients()) == known
        worker.synchronizer.applier.wait()
        assert notes(worker.gradients()) == known
        assert worker.applied == step + 1
    for own, expected in zip(worker.model.parameters(), worker.plain.parameters(), strict=True):
        assert torch.equal(own, expected)


def test_updates_that_come_between_backward_and_step_leave_gradients_alone() -> None:
    worker = Worker()
    worker.backward(0)
    worker.step()
    worker.backward(1)
    known = notes(worker.gradients())
    worker.stage.drain()
    worker.synchronizer.applier.wait()
    assert worker.applied == 1
    assert notes(worker.gradients()) == known
    worker.step()  # refuses gradients that have changed since they left
    worker.synchronizer.applier.wait()
    assert worker.applied == 2


class Keeping(torch.optim.SGD):
    """Keeps the gradients of its last step, without a copy."""

    def step(self, closure=None):
        kept = [p.grad for group in self.param_groups for p in group["params"]]
        self.seen = [*getattr(self, "seen", []), kept]
        return super().step(closure)


def test_an_update_that_the_optimizer_keeps_is_not_overwritten() -> None:
    worker = Worker(Keeping)
    for step in range(3):
        worker.backward(step)
        worker.step()
    worker.synchronizer.applier.wait()
    assert [float(kept[0][0, 0]) for kept in worker.local.seen] == [2.0, 4.0, 6.0]


def test_an_error_of_the_optimizer_leaves_gradients_alone() -> None:
    worker = Worker()
    worker.local.register_step_pre_hook(lambda *_: 1 / 0)
    worker.backward(0)
    known = notes(worker.gradients())
    worker.optimizer.step()
    with pytest.raises(ZeroDivisionError):
        worker.synchronizer.applier.wait()
    assert notes(worker.gradients()) == known
