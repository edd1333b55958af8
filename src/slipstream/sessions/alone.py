"""A job of one process: the plain loop, at the plain loop's speed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import distributed

from slipstream.errors import SlipstreamError
from slipstream.runtime.figures.summary import WorkerFigures, combine
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import rank_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.sessions.default_group import GroupStore
from slipstream.strategy import Strategy
from slipstream.torch.distribute.preparing import as_trained, prepare_pairs
from slipstream.torch.modes.alone import AloneMode
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.undistributed import Undistributed
from slipstream.torch.tensors.pairs import Pair
from slipstream.types import Cluster

logger = logging.getLogger(__name__)


class AloneSession:
    """Implements ``Session`` for a job of one process."""

    def __init__(self, env: Environment) -> None:
        log_event(logger, "joined", rank=env.rank, size=env.world_size, host="localhost")
        self._env = env
        self._mode: TrainingMode = Undistributed()

    def broadcast(self, value: Any) -> Any:
        return value

    def group_store(self, backend: str) -> GroupStore:
        return GroupStore(distributed.HashStore())

    def gather(self, call: str, value: Any) -> list[Any]:
        return [value]

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> TrainingMode:
        self._mode.close()
        inventories = prepare_pairs(pairs, strategy, self._env.parts)
        planned, cluster = as_trained(strategy, len(pairs)), Cluster(1, servers=1)
        plans = [planned.plan(inventory.specs, cluster) for inventory in inventories]
        names = [inventory.parameter_names for inventory in inventories]
        if len(pairs) == 1:
            names = [[name for name, p in pairs[0].model.named_parameters() if p.requires_grad]]
        self._mode = AloneMode(tuple(pairs), plans, names, strategy, self._env)
        return self._mode

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        return combine([figures])

    def fault_behind(self, error: BaseException) -> None:
        return None

    def abort(self, error: BaseException) -> None:
        pass

    def reports(self, error: SlipstreamError) -> bool:
        return rank_reports(error, self._env.rank)

    def close(self) -> None:
        pass
