"""Loops that never call ``optimizer.step()``, and loops that only call it late."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from slipstream.torch.capture.step_watch import CHANGES, StepWatch

Update = Callable[[nn.Module], None]


def backward(*models: nn.Module) -> None:
    x = torch.ones(3, 4)
    for model in models:
        x = model(x)
    x.square().mean().backward()


def watched(*models: nn.Module, stepped: Callable[[], bool] = lambda: False) -> StepWatch:
    parameters = [p for model in models for p in model.parameters()]
    return StepWatch(parameters, (), stepped, "no step was made")


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter -= 0.1 * parameter.grad
        parameter.grad.zero_()


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:  # frozen
            continue
        parameter.data.add_(parameter.grad, alpha=-0.1)
    model.zero_grad()


def by_new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad
        parameter.grad.data.zero_()


@pytest.mark.parametrize("update", [in_place, through_data, by_new_data])
def test_a_loop_that_updates_by_hand_is_told_once(update: Update) -> None:
    model = nn.Linear(4, 4)
    watched(model)
    for _ in range(CHANGES):
        backward(model)
        update(model)
    with pytest.warns(UserWarning, match="no step was made") as given:
        backward(model)
    assert given[0].filename == __file__
    for _ in range(3 * CHANGES):
        update(model)
        backward(model)  # where a warning is an error


@pytest.mark.parametrize("arrives", [False, True])
def test_passes_that_accumulate_are_not_counted(arrives: bool) -> None:
    """Not even while the weights of other workers arrive, as with shared memory."""
    model = nn.Linear(4, 4)
    watched(model)
    for _ in range(20 * CHANGES):
        backward(model)
        if arrives:
            model.weight.data.add_(0.1)
            model.bias.data.add_(0.1)


def test_gradients_that_are_dropped_are_not_counted() -> None:
    """Of the tasks of one step, say, or of a GradScaler that skips its first steps."""
    model = nn.Linear(4, 4)
    watched(model)
    for _ in range(5 * CHANGES):
        backward(model)
        model.zero_grad()


def test_the_line_is_that_of_the_script_however_it_calls_torch() -> None:
    model = nn.Linear(4, 4)
    watched(model)
    for _ in range(CHANGES):
        backward(model)
        in_place(model)
    loss = model(torch.ones(3, 4)).square().mean()
    with pytest.warns(UserWarning, match="no step was made") as given:
        torch.autograd.backward(loss)
    assert given[0].filename == __file__
    assert linecache.getline(__file__, given[0].lineno).strip().startswith("torch.autograd")


def test_weights_that_are_loaded_before_the_first_step_count_once() -> None:
    model = nn.Linear(4, 4)
    watched(model)
    for _ in range(CHANGES - 1):
        backward(model)
        model.load_state_dict(nn.Linear(4, 4).state_dict())
    for _ in range(5 * CHANGES):
        backward(model)


def test_passes_within_a_step_are_not_counted() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3 * CHANGES)
    passes = 0

    def closure() -> float:
        nonlocal passes
        passes += 1
        optimizer.zero_grad()
        backward(model)
        return 1.0 / passes

    watch = StepWatch(model.parameters(), [optimizer], lambda: False, "no step was made")
    optimizer.step(closure)
    assert passes > CHANGES
    watch.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_gradients_of_a_model_that_is_not_stepped_yet_are_none_of_its_business() -> None:
    """A GAN: the generator's passes run through the critic, which drops these gradients."""
    generator, critic, made = nn.Linear(4, 4), nn.Linear(4, 4), 0
    watched(generator, critic, stepped=lambda: made > 0)
    for _ in range(5 * CHANGES):
        backward(generator, critic)
        generator.zero_grad()  # where an optimizer makes a step
        made += 1
        critic.zero_grad()


def test_parameters_have_no_hook_after_the_first_step_and_after_the_end() -> None:
    for end in ("step", "close"):
        model = nn.Linear(4, 4)
        watch = watched(model, stepped=lambda: True)
        backward(model) if end == "step" else watch.close()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_frozen_parameter_is_passed_over() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    watched(model)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(CHANGES + 1):
            backward(model)
            through_data(model)
    assert len(given) == 1
