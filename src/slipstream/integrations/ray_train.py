"""slipstream under Ray Train: ``DataParallelTrainer(loop, backend_config=SlipstreamConfig())``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from slipstream.integrations.ray_workers import (
    checked,
    environments,
    listen,
    node_id,
    refuse_learners,
    set_environment,
    settings_of,
)
from slipstream.strategy import Strategy


class SlipstreamBackend(Backend):
    """Gives Ray Train's workers a job of slipstream; another one whenever Ray starts them again."""

    share_cuda_visible_devices = True  # as with TorchTrainer: ``job.local_rank`` is the GPU

    def on_start(self, worker_group: Any, backend_config: SlipstreamConfig) -> None:
        """Rank 0 opens the socket; then all workers are told their place."""
        nodes = worker_group.execute(node_id)
        address = worker_group.execute_single(0, listen, len(set(nodes)) == 1)
        settings = settings_of(checked(backend_config.strategy))
        told = environments(nodes, address, settings)
        ray.get(
            [
                worker_group.execute_single_async(rank, set_environment, variables)
                for rank, variables in enumerate(told)
            ]
        )


@dataclass
class SlipstreamConfig(BackendConfig):
    """The backend of a Ray Train trainer whose loop calls ``slipstream.init``.

    For ``DataParallelTrainer(loop, backend_config=SlipstreamConfig("poseidon"))``; ``TorchTrainer``
    takes it as its ``torch_config``, and then makes no process group of torch
    (``job.init_process_group`` makes one).

    Args:
        strategy: by default the one that the loop names, else ``push_pull``.

    Raises:
        ConfigError: Ray's workers cannot train with this strategy.
    """

    strategy: Strategy | str | None = None
    backend = "slipstream"  # TorchTrainer would choose one of torch's

    def __post_init__(self) -> None:
        refuse_learners(checked(self.strategy))

    @property
    def backend_cls(self) -> type[SlipstreamBackend]:
        """What Ray Train calls when it starts workers."""
        return SlipstreamBackend

    def to_dict(self) -> dict[str, Any]:
        """For Ray's record of the run."""
        strategy = checked(self.strategy)
        return {"strategy": None if strategy is None else strategy.name}
