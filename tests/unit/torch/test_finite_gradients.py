"""What becomes of gradients that are not finite, tensor by tensor."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import ConfigError, NonFiniteGradient
from slipstream.torch.tensors.finite_gradients import (
    BECOMES_INFINITE,
    FiniteGradients,
    magnitude_of,
    magnitudes,
)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_least_value_that_a_cast_makes_infinite(dtype: str) -> None:
    least = torch.tensor(BECOMES_INFINITE[dtype], dtype=torch.float64)
    below = torch.nextafter(least, torch.zeros_like(least))
    # In one cast: from float64 torch would go by way of float32.
    wide = torch.float64 if dtype == "float32" else torch.float32
    below = below if dtype == "float32" else torch.nextafter(least.float(), torch.tensor(0.0))
    assert least.to(wide).to(getattr(torch, dtype)) == torch.inf
    assert below.to(wide).to(getattr(torch, dtype)).isfinite()


def test_all_that_is_finite_counts() -> None:
    for policy in ("pass", "refuse", "stop"):
        finite = FiniteGradients(policy)  # type: ignore[arg-type]
        assert finite.admits("w", 3e38)
        assert finite.admits("w", 65504.0, "float16")


@pytest.mark.parametrize("magnitude", [math.nan, math.inf])
@pytest.mark.parametrize(("policy", "counts"), [("pass", True), ("refuse", False)])
def test_what_is_not_finite_is_reported_once(magnitude: float, policy: Any, counts: bool) -> None:
    finite = FiniteGradients(policy, rank=3)
    finite.step = 17
    with pytest.warns(UserWarning, match="rank 3: the gradient of 'w' is not finite at step 17"):
        assert finite.admits("w", magnitude) is counts
    assert finite.admits("v", magnitude) is counts  # warnings are errors here


def test_who_is_not_the_first_says_nothing() -> None:
    asked: list[int] = []

    def is_first() -> bool:
        asked.append(1)
        return False

    finite = FiniteGradients("pass", is_first=is_first)
    assert finite.admits("w", math.nan)
    assert finite.admits("w", math.nan)
    assert asked == [1]


def test_a_cast_that_overflows_is_named() -> None:
    with pytest.raises(NonFiniteGradient, match="became infinite in the cast to float16") as caught:
        FiniteGradients("stop").admits("w", 7e4, "float16")
    assert caught.value.cast == "float16"
    with pytest.raises(NonFiniteGradient, match="'w' is not finite") as caught:
        FiniteGradients("stop").admits("w", math.inf, "float16")
    assert caught.value.cast == ""


def test_the_error_survives_pickling() -> None:
    error = NonFiniteGradient(2, "fc.weight", 40, "float16")
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.tensor, again.step, again.cast) == (2, "fc.weight", 40, "float16")
    assert str(again) == str(error)


def test_magnitudes_of_tensors_of_every_kind() -> None:
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 5.0], (4,), check_invariants=True)
    kinds = [
        torch.tensor(-3.0),
        torch.zeros(0, 4),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor([1 - 8j]).conj(),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.full((), 0.25).expand(3, 3),
        sparse,
    ]
    expected = [3.0, 0.0, 5.0, 8.0, 2.0, 0.25, 7.0]
    assert magnitudes(kinds) == expected
    assert [magnitude_of(kind) for kind in kinds] == expected


# ---- a world of one


def alone(optimizer: str = "SGD", strategy: str = "push_pull", **settings: Any) -> Any:
    model = nn.Linear(3, 2)
    job = slipstream.init(**settings)
    kind = getattr(torch.optim, optimizer)
    return job, *job.distribute(model, kind(model.parameters(), lr=0.1), strategy)


def backward(model: nn.Module, *, bad: bool) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(1, 3)).sum()
    loss.backward()
    if bad:
        model.bias.grad[1] = math.inf
    return loss


def test_alone_a_gradient_goes_on_as_in_the_plain_loop() -> None:
    job, model, optimizer = alone()
    with job:
        assert not optimizer._optimizer_step_pre_hooks, "nothing is done before a step"
        backward(model, bad=True)
        optimizer.step()
    assert not model.bias.isfinite().all()


@pytest.mark.parametrize("strategy", ["push_pull", "async_sgd(clip_norm=1.0)"])
def test_alone_a_gradient_is_refused(strategy: str) -> None:
    job, model, optimizer = alone(strategy=strategy, nonfinite="refuse")
    before = [p.detach().clone() for p in model.parameters()]
    with job:
        backward(model, bad=True)
        with pytest.warns(UserWarning, match="does not count"):
            optimizer.step()
    assert not torch.equal(model.weight, before[0])
    assert torch.equal(model.bias, before[1])


def test_alone_a_closure_is_watched() -> None:
    job, model, optimizer = alone("LBFGS", nonfinite="stop")
    with job, pytest.raises(NonFiniteGradient, match="rank 0: the gradient of 'bias'"):
        optimizer.step(lambda: backward(model, bad=True))


def test_a_policy_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'ignore'.*choose one of pass, refuse, stop"):
        slipstream.init(nonfinite="ignore")  # type: ignore[arg-type]
    monkeypatch.setenv("SLIPSTREAM_NONFINITE", "never")
    with pytest.raises(ConfigError, match="SLIPSTREAM_NONFINITE"):
        slipstream.init()
    monkeypatch.setenv("SLIPSTREAM_NONFINITE", "stop")
    job, model, optimizer = alone(nonfinite="refuse")  # the argument wins
    backward(model, bad=True)
    with job, pytest.warns(UserWarning, match="does not count"):
        optimizer.step()


@pytest.mark.filterwarnings("error")
def test_a_filter_that_makes_errors_of_warnings_does_not_end_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert FiniteGradients("pass", 1).admits("w", math.nan)
    assert "rank 1: the gradient of 'w' is not finite" in caplog.text
