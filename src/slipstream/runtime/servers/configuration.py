"""Rank 0's message to a server: the whole strategy, from which the server computes the plan."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.strategy import Strategy
from slipstream.types import Cluster, OptimizerRecipe, Spec


class Configuration(msgspec.Struct, frozen=True):
    """Everything a server needs to hold its shard."""

    strategy: Strategy
    cluster: Cluster
    specs: tuple[Spec, ...]
    addresses: dict[str, str]
    processes: dict[str, int]
    silence_s: float
    optimizer: OptimizerRecipe | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        addresses: dict[str, str],
        processes: dict[str, int],
        silence_s: float,
        optimizer: OptimizerRecipe | None,
    ) -> Configuration:
        return cls(
            plan.strategy, plan.cluster, plan.specs, addresses, processes, silence_s, optimizer
        )

    def plan(self) -> Plan:
        return self.strategy.plan(self.specs, self.cluster)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, content: Any) -> Configuration:
        """Read what ``encode`` wrote.

        Raises:
            FrameRefused: It has another format.
        """
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameRefused(f"unreadable configuration: {error}") from error
