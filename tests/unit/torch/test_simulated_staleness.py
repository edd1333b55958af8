"""Which gradient each step applies: the old one, exactly, once."""

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.apps.studies.simulated_staleness import simulated_staleness
from slipstream.apps.studies.staleness import ramped_staleness
from slipstream.errors import ConfigError

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.02, momentum=0.9, weight_decay=1e-2, nesterov=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9),
}
STEPS = 25


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def loss_at(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: Tensor = model(torch.randn(6, 5, generator=generator)).square().mean()
    return loss


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        optimizer.step()


def train_by_hand(make: Make, staleness: int) -> nn.Module:
    """Step t at the weights of step t: the gradient that was taken at the weights of t − k."""
    model = small_model()
    optimizer = make(model.parameters())
    taken_at: list[list[Tensor]] = []
    for step in range(STEPS):
        taken_at.append(list(torch.autograd.grad(loss_at(model, step), list(model.parameters()))))
        if step >= staleness:
            for parameter, gradient in zip(
                model.parameters(), taken_at[step - staleness], strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
    return model


class Line:
    """One weight w that starts at 0, and whose gradient at step t is −1 / 2^t: with a rate of 1,
    its binary digits say which gradients were applied, and how often."""

    def __init__(self, steps: int, ramp_up: int = 0) -> None:
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.stale = simulated_staleness(self.optimizer, steps=steps, ramp_up=ramp_up)
        self.taken = 0

    def step(self) -> list[int]:
        """The steps whose gradients this one applied."""
        before = self.weight.item()
        self.optimizer.zero_grad()
        (self.weight * -(2.0**-self.taken)).backward()
        self.optimizer.step()
        self.taken += 1
        moved = self.weight.item() - before
        return [t for t in range(self.taken) if int(moved * 2**t) % 2]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("staleness", [1, 4])
def test_each_step_applies_the_gradient_of_k_steps_ago(name: str, staleness: int) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    stale = simulated_staleness(optimizer, steps=staleness)
    train(model, optimizer)
    assert same(weights(model), weights(train_by_hand(OPTIMIZERS[name], staleness)))
    assert stale.pending == staleness


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_gradients_train_as_without_bit_for_bit(name: str) -> None:
    plain, watched = small_model(), small_model()
    train(plain, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](watched.parameters())
    stale = simulated_staleness(optimizer, steps=0, ramp_up=10)
    train(watched, optimizer)
    assert same(weights(plain), weights(watched))
    assert stale.pending == 0


def test_the_first_steps_leave_weights_and_optimizer_state_alone() -> None:
    model = small_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with simulated_staleness(optimizer, steps=3) as stale:
        before = weights(model)
        train(model, optimizer, steps=3)
        assert same(weights(model), before)
        assert not optimizer.state
        assert stale.pending == 3
        train(model, optimizer, steps=1)
        assert not same(weights(model), before)


def test_a_ramp_applies_nothing_whenever_staleness_grows() -> None:
    line = Line(steps=2, ramp_up=4)
    pending, applied = [], []
    for _ in range(8):
        applied.append(line.step())
        pending.append(line.stale.pending)
    assert pending == [0, 0, 1, 1, 2, 2, 2, 2]
    assert applied == [[0], [1], [], [2], [], [3], [4], [5]]


@given(st.integers(0, 8), st.integers(0, 24))
def test_every_gradient_is_applied_once_and_in_order(steps: int, ramp_up: int) -> None:
    line = Line(steps, ramp_up)
    total = ramp_up + steps + 8
    applied, lag = [], 0
    for t in range(total):
        now = line.step()
        # It grows by at most one a step, however steep the ramp.
        lag = min(ramped_staleness(t, staleness=steps, ramp_up=ramp_up), lag + 1)
        assert line.stale.pending == lag
        assert now in ([], [t - lag])
        applied += now
    assert applied == list(range(total - steps))
    assert line.stale.pending == steps


def test_the_fresh_gradient_is_back_after_the_step() -> None:
    model = small_model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    simulated_staleness(optimizer, steps=2)
    for step in range(5):
        optimizer.zero_grad()
        loss_at(model, step).backward()
        fresh = [parameter.grad for parameter in model.parameters()]
        values = [gradient.clone() for gradient in fresh if gradient is not None]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(model.parameters(), fresh, strict=True))
        assert same(values, [p.grad for p in model.parameters() if p.grad is not None])


def test_gradients_wait_as_copies() -> None:
    """A loop that zeroes in place writes over the gradient that was handed to it."""
    dropped, zeroed = small_model(), small_model()
    for model, to_none in ((dropped, True), (zeroed, False)):
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        simulated_staleness(optimizer, steps=3)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            loss_at(model, step).backward()
            optimizer.step()
    assert same(weights(dropped), weights(zeroed))


def test_absent_gradients_are_as_old_as_the_others() -> None:
    """A layer that only even steps use is left alone, momentum and all, k steps after odd ones."""
    always, sometimes = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    unused = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([always, sometimes, unused], lr=1.0, momentum=0.5)
    simulated_staleness(optimizer, steps=1)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        (always + sometimes if step % 2 == 0 else always * 1.0).backward()
        optimizer.step()
        assert (sometimes.grad is None) == (step % 2 == 1)
        seen.append(sometimes.item())
    # Steps 1, 3 and 5 apply the gradients of 0, 2 and 4; the buffer is 1, 1.5, 1.75.
    assert seen == [0.0, -1.0, -1.0, -2.5, -2.5, -4.25]
    assert unused.grad is None
    assert unused.item() == 0.0
    assert unused not in optimizer.state


def test_parameters_added_on_the_way_join_the_queue() -> None:
    first, later = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([first], lr=1.0)
    simulated_staleness(optimizer, steps=1)
    first.grad = torch.ones(())
    optimizer.step()
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(())
    optimizer.step()
    assert (first.item(), later.item()) == (-1.0, 0.0)
    optimizer.step()
    assert (first.item(), later.item()) == (-2.0, -1.0)


def test_rates_are_those_of_the_step_that_applies() -> None:
    line = Line(steps=1)
    line.step()
    line.optimizer.param_groups[0]["lr"] = 0.5
    line.step()
    assert line.weight.item() == 0.5


def test_closed_it_leaves_the_optimizer_as_it_was() -> None:
    line = Line(steps=2)
    with line.stale:
        assert [line.step() for _ in range(3)] == [[], [], [0]]
    assert [line.step() for _ in range(2)] == [[3], [4]]
    assert line.stale.pending == 2
    line.stale.close()
    assert not line.optimizer._optimizer_step_pre_hooks
    assert not line.optimizer._optimizer_step_post_hooks


def test_a_closure_is_refused_before_anything_changes() -> None:
    model = small_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    simulated_staleness(optimizer, steps=1)
    before = weights(model)
    with pytest.raises(ConfigError, match=r"LBFGS.step\(closure\).*call backward\(\) first"):
        optimizer.step(lambda: 0.0)
    assert same(weights(model), before)


@pytest.mark.parametrize(("steps", "ramp_up"), [(-1, 0), (1, -1)])
def test_negative_counts_leave_no_hook_behind(steps: int, ramp_up: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    with pytest.raises(ConfigError, match="=-1: give 0"):
        simulated_staleness(optimizer, steps=steps, ramp_up=ramp_up)
    assert not optimizer._optimizer_step_pre_hooks
