"""slipstream under Ray Train: ``DataParallelTrainer(loop, backend_config=SlipstreamConfig())``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig

from slipstream.integrations.ray.workers import (
    CAUSED,
    AsScript,
    checked,
    environments,
    listen,
    node_id,
    portable,
    set_environment,
    settings_of,
)
from slipstream.strategy import Strategy

CAUSE_FIRST_S = 10.0  # for Ray Train to look at all workers, which it does every 2 s


class SlipstreamBackend(Backend):
    """A backend that gives Ray Train's workers a job; a new one whenever Ray restarts them."""

    share_cuda_visible_devices = True  # as with TorchTrainer: ``job.local_rank`` is the GPU

    def on_start(self, worker_group: Any, backend_config: SlipstreamConfig) -> None:
        """Open the socket on rank 0, then set the variables of all workers."""
        nodes = worker_group.execute(node_id)
        address = worker_group.execute_single(0, listen, len(set(nodes)) == 1)
        settings = settings_of(checked(backend_config.strategy))
        by_rank = environments(nodes, address, settings)
        ray.get(
            [
                worker_group.execute_single_async(rank, set_environment, variables)
                for rank, variables in enumerate(by_rank)
            ]
        )


@contextmanager
def cause_first() -> Iterator[None]:
    """Delay errors that another worker caused, so that Ray Train sees the cause first.

    It then ends the training, and lists the errors of all workers that have ended: only the cause.
    """
    try:
        with AsScript():
            yield
    except Exception as error:
        if isinstance(error, CAUSED):
            time.sleep(CAUSE_FIRST_S)
        if (sendable := portable(error)) is not error:
            raise sendable.with_traceback(error.__traceback__) from None
        raise


@dataclass
class SlipstreamConfig(BackendConfig):
    """The backend of a Ray Train trainer whose loop calls ``slipstream.init``.

    For ``DataParallelTrainer(loop, backend_config=SlipstreamConfig("poseidon"))``; ``TorchTrainer``
    takes it as its ``torch_config``, and then makes no process group of torch
    (``job.init_process_group`` makes one).

    Args:
        strategy: The strategy; by default the one that the loop names, else ``push_pull``.

    Raises:
        ConfigError: Ray's workers cannot train with this strategy.
    """

    strategy: Strategy | str | None = None
    backend = "slipstream"  # TorchTrainer would choose one of torch's

    def __post_init__(self) -> None:
        checked(self.strategy)

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """The context in which Ray Train runs the loop."""
        return cause_first

    @property
    def backend_cls(self) -> type[SlipstreamBackend]:
        """The class that Ray Train calls when it starts workers."""
        return SlipstreamBackend

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration for Ray's record of the run."""
        strategy = checked(self.strategy)
        return {"strategy": None if strategy is None else strategy.name}
