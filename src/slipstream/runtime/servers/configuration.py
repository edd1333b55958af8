"""Rank 0's message to a server: the whole strategy, from which the server computes the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.strategy import Strategy
from slipstream.types import Cluster, OptimizerRecipe, Spec


class Configuration(msgspec.Struct, frozen=True):
    """Everything a server needs to hold its shard.

    ``strategy`` is JSON: a server that may not import its parts can still read the addresses, and
    answer.
    """

    strategy: msgspec.Raw
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
        parts: Sequence[str] = (),
    ) -> Configuration:
        """Return rank 0's configuration of the servers of a plan.

        Args:
            parts: The modules of the user's own parts.
        """
        strategy = msgspec.Raw(plan.strategy.to_json(parts=parts).encode())
        return cls(strategy, plan.cluster, plan.specs, addresses, processes, silence_s, optimizer)

    def plan(self, parts: Sequence[str] = ()) -> Plan:
        """Return the plan that rank 0 has.

        Args:
            parts: The modules that this server may import for the user's own parts.

        Raises:
            ConfigError: The strategy cannot be read, or names a part that is in no such module.
        """
        strategy = Strategy.from_json(bytes(self.strategy), parts=parts)
        return strategy.plan(self.specs, self.cluster)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, content: Any) -> Configuration:
        """Read what ``encode`` wrote.

        Raises:
            FrameRefused: The content has another format.
        """
        try:
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameRefused(f"unreadable configuration: {error}") from error
