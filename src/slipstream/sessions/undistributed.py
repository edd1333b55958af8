"""The training of a job before ``job.distribute``: none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError
from slipstream.plan import Plan
from slipstream.sessions.protocol import Training
from slipstream.torch.distribute.sampler import LeasedBatches
from slipstream.torch.tensors.mean_weights import MeanWeights


def comes_after_distribute(doing: str) -> ConfigError:
    """The error of a call that needs a training."""
    return ConfigError(f"job.{doing} comes after job.distribute(model, optimizer)")


class Undistributed(Training):
    """There is no model to wait for or to save."""

    committed = 0

    @property
    def plan(self) -> Plan:
        raise ConfigError("there is no plan before job.distribute(model, optimizer)")

    def plan_table(self) -> str:
        raise ConfigError("there is no plan before job.distribute(model, optimizer)")

    def lease(self, batches: int, returned: int) -> Batch:
        raise comes_after_distribute("sampler")

    def sampler(self, *_: Any, **__: Any) -> LeasedBatches:
        raise comes_after_distribute("sampler")

    def backward_for(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        raise comes_after_distribute("backward_for")

    def averaged_weights(self) -> AbstractContextManager[None]:
        raise comes_after_distribute("averaged_weights")

    def outer_weights(self) -> AbstractContextManager[None]:
        raise comes_after_distribute("outer_weights")

    def mean_weights(self) -> MeanWeights:
        raise comes_after_distribute("consensus")

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        raise comes_after_distribute("save")

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        raise comes_after_distribute("load")
