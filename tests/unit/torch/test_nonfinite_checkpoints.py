"""Checkpoints of trainings that have diverged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import CheckpointError, ConfigError

NAN, INFINITY = float("nan"), float("inf")
AVERAGED = "push_pull(averaged=0.9)"
Disturb = Callable[[Any, Any], None]


class Net(nn.Module):
    """With a mask that is infinite on purpose, and a buffer that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.mask = nn.Parameter(torch.full((2,), -INFINITY), requires_grad=False)
        self.register_buffer("least", torch.full((1,), INFINITY))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def saved(path: Path, disturb: Disturb = lambda *_: None) -> None:
    torch.manual_seed(0)
    model: Any = Net()
    with slipstream.init() as job:
        optimizer: Any = torch.optim.Adam(model.layer.parameters())
        model, optimizer = job.distribute(model, optimizer, AVERAGED)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        disturb(model, optimizer)
        job.save(path)


def loaded(path: Path, **options: Any) -> Any:
    model: Any = Net()
    with slipstream.init() as job:
        model, _ = job.distribute(model, torch.optim.Adam(model.layer.parameters()), AVERAGED)
        before = model.layer.weight.clone()
        try:
            job.load(path, **options)
        except CheckpointError:
            assert torch.equal(model.layer.weight, before), "nothing was loaded"
            assert job.step == 0
            raise
    return model


def test_finite_checkpoint_with_infinite_buffer_and_frozen_weight_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path / "file")
    assert loaded(tmp_path / "file").layer.weight.isfinite().all()


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_weight_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    saved(tmp_path / "file", lambda model, _: model.layer.weight.data[0].fill_(value))
    with pytest.raises(CheckpointError) as refused:
        loaded(tmp_path / "file")
    assert f"{tmp_path / 'file'}: model/layer.weight has values that are not finite" in str(
        refused.value
    )
    assert "job.load(..., nonfinite='pass')" in str(refused.value)


def test_optimizer_state_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    def disturb(_: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].fill_(INFINITY)

    saved(tmp_path / "file", disturb)
    with pytest.raises(CheckpointError, match=r"optimizer/state/layer.\w+/exp_avg_sq has values"):
        loaded(tmp_path / "file")


def test_checkpoint_that_is_not_finite_is_taken_if_asked(tmp_path: Path) -> None:
    saved(tmp_path / "file", lambda model, _: model.layer.weight.data.fill_(NAN))
    assert loaded(tmp_path / "file", nonfinite="pass").layer.weight.isnan().all()


def test_another_policy_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "file")
    with pytest.raises(ConfigError, match="nonfinite='stop'"):
        loaded(tmp_path / "file", nonfinite="stop")
