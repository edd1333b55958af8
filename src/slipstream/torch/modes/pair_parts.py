"""One pair's parts on this worker, wired together by a training mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from slipstream.plan import Plan
from slipstream.planning.choosing import ByTime
from slipstream.planning.table import as_text
from slipstream.runtime.exchange.choices import layer_of
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.runtime.servers.shards import Shards
from slipstream.torch.capture.compact_gradients import CompactGradients
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer
from slipstream.torch.capture.replica_check import ReplicaCheck
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.channels.channel_set import ChannelSet
from slipstream.torch.checkpoints.kept_state import KeptState
from slipstream.torch.checkpoints.residuals import Residuals
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.pairs import Pair
from slipstream.types import Cluster


@dataclass(frozen=True, slots=True)
class PairParts:
    """One pair's parts; implements ``LoadedPair``.

    Attributes:
        optimizer: The training loop's: the user's own, or a ``LoopOptimizer``.
        compact: Captures layers that may be sent in compact form, if there are any.
        service: Sends requests to servers, where these deal batches or keep accounts.
        state: The optimizer's state and averaged weights, here or at servers.
        residuals: Saves codecs' residuals in checkpoints, where gradients are sent over links.
        check: Compares replicas, where they are equal after each step.
    """

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    synchronizer: Synchronizer
    channels: ChannelSet
    shards: Shards
    member: Endpoint
    compact: CompactGradients | None
    service: ShardService | None
    state: KeptState
    residuals: Residuals | None
    check: ReplicaCheck | None

    @property
    def trained(self) -> Pair:
        """The model, and the optimizer that the loop uses."""
        return Pair(self.model, self.optimizer)

    @property
    def loop(self) -> LoopOptimizer | None:
        """The optimizer that replaces the user's in the loop, if one does."""
        return self.optimizer if isinstance(self.optimizer, LoopOptimizer) else None

    @property
    def needs_store(self) -> bool:
        """Whether the rendezvous store is used during training."""
        collective = self.channels.collective
        on_gpu = collective is not None and collective.collectives.device.type == "cuda"
        return self.channels.partial is not None or on_gpu

    def forget(self) -> None:
        """Forget what belongs to weights that a checkpoint has replaced."""
        if self.channels.links is not None:
            self.channels.links.forget_residuals()
        self.synchronizer.slots.know_buffers()

    def retire(self) -> None:
        """Make no more rounds; where another worker speaks for this one, that one says so."""
        worker = self.plan.cluster.worker(self.member.name)
        if worker >= 0:
            self.shards.retire(worker, self.member)

    def table(self) -> str:
        """The plan as text, with the choices of its layers."""
        choices = None if self.compact is None else self.compact.choices
        link = link_of(self.plan.cluster)
        if choices is None:
            return as_text(self.plan.rows(self.plan.verdicts(0, None)), link)
        names = [layer_of(unit).name for unit in choices.units]
        verdicts = dict(zip(names, choices.verdicts, strict=False))
        speeds = choices.chooser.speeds if isinstance(choices.chooser, ByTime) else None
        return as_text(self.plan.rows(verdicts, speeds), link)

    def close(self) -> None:
        if isinstance(self.optimizer, RemoteOptimizer):
            self.optimizer.keep_at(None)
        if self.check is not None:
            self.check.close()
        if self.residuals is not None:
            self.residuals.close()
        self.synchronizer.close()
        self.member.close()
        self.channels.close()


def link_of(cluster: Cluster) -> str:
    """Whose traffic the table shows."""
    if not cluster.members:
        return "a worker's link"
    return f"a host's link ({cluster.workers} hosts; the workers of each aggregate first)"
