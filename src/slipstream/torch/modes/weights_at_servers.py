"""Where a worker may miss results: servers have the weights that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.members.joining import Membership
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.saving import write_state
from slipstream.torch.checkpoints.training_state import OwnState
from slipstream.torch.modes.clocks import Clock
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.tensors.copying import copy_state
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.pairs import distinct_models
from slipstream.torch.tensors.random_state import random_state


class WeightsAtServers:
    """Saves servers' weights, and gives them to all workers in the end.

    Args:
        parts: By pair.
        chain: Copies rank 0's weights to all ranks.
    """

    def __init__(
        self, parts: Sequence[PairParts], membership: Membership, chain: StateChain
    ) -> None:
        self._parts, self._membership, self._chain = parts, membership, chain
        self._pairs = [each.trained for each in parts]

    def steps_to_save(self, clocks: Sequence[Clock]) -> list[int]:
        """Return by pair the steps of a checkpoint, to which the servers add their rounds."""
        if self._parts[0].plan.consistency.agreed:
            return [clock.resumed_at for clock in clocks]
        return [clock.committed for clock in clocks]

    def save(self, path: Path, facts: dict[str, Any], steps: Sequence[int]) -> None:
        """Write what the servers have; rank 0 alone calls it.

        Args:
            steps: By pair: see ``steps_to_save``.
        """
        states = [each.state for each in self._parts]
        own: dict[int | str, OwnState] = {0: OwnState(random_state())}
        write_state(path, self._pairs, states, steps, facts, own)

    def finish(self) -> None:
        """Give all workers the last weights; they end at different times."""
        for each in self._parts:
            if each.channels.links is not None:
                each.channels.links.drain()
        for each in self._parts:
            each.retire()
        rank = self._membership.env.rank
        with self._chain.opened():
            complete = self._membership.finish_training()
            if rank == 0 or not complete:
                for each in self._parts:
                    take_weights(each.model, each.state)
            for model in distinct_models(self._pairs) if complete else ():
                copy_state(self._chain, model)


def take_weights(model: nn.Module, state: KeptState) -> None:
    """Copy the servers' weights into the model."""
    own = dict(whole_state(model))
    with torch.no_grad():
        for name, weights in state.fetch().model.items():
            own[name].data.copy_(weights)


def no_shared_weights(name: str) -> ConfigError:
    """The error of ``job.outer_weights`` where workers share none."""
    return ConfigError(
        f"{name} has no weights that all workers share: evaluate each worker's own, or those of "
        "job.save()"
    )
