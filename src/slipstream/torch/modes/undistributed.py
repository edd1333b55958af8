"""The mode of a job before ``job.distribute``: nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.tensors.mean_weights import MeanWeights


def comes_after_distribute(call: str) -> ConfigError:
    """Return the error of a call that needs a model."""
    return ConfigError(f"job.{call} comes after job.distribute(model, optimizer)")


class Undistributed(TrainingMode):
    """There is no model to wait for or to save."""

    committed = 0

    def lease(self, batches: int, returned: int) -> Batch:
        raise comes_after_distribute("sampler")

    def mean_weights(self) -> MeanWeights:
        raise comes_after_distribute("consensus")

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        raise comes_after_distribute("save")

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        raise comes_after_distribute("load")
