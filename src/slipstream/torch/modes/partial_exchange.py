"""Partial exchange (Ako): a worker applies its own update at once, and accumulates it for peers.

Each peer gets one partition a step. A worker that was started again comes back into the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.consistency.leases import in_turn
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.gossip.handover import JoinCoordinator, JoinPeer
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.channels.channel_set import ChannelSet
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.modes.gossip import come_back, give_untrained, make_partial
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.networked import NetworkedMode, SetupInputs
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup
from slipstream.torch.modes.weights_at_servers import no_shared_weights
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.copying import copy_state
from slipstream.torch.tensors.flat_weights import FlatWeights
from slipstream.torch.tensors.inventory import is_constant
from slipstream.torch.tensors.mean_weights import MeanWeights
from slipstream.torch.tensors.written_weights import WrittenWarning
from slipstream.types import rank_of


class PartialExchangeMode(NetworkedMode):
    """Every worker has its own weights, and workers exchange partitions of their updates."""

    def __init__(self, given: SetupInputs) -> None:
        super().__init__(given)
        (only,) = self.parts
        assert only.channels.partial is not None
        assert isinstance(only.channels.partial.weights, FlatWeights)
        self._channel, self._flat = only.channels.partial, only.channels.partial.weights
        self._calls.wait_with(self._channel.poll, self._position)
        self._looping, self._back_at = not self.membership.env.incarnation, 0
        if self.membership.env.incarnation:
            try:
                self._come_back()
            except BaseException:
                self.close()  # nobody else knows of its hooks yet
                raise
            env = self.membership.env
            self._lease = in_turn(env.rank, env.world_size, self._back_at)

    def _wire(self, setup: PairSetup) -> PairParts:
        plan, names = setup.plan, setup.inventory.parameter_names
        assert plan.partial_exchange is not None
        flat = FlatWeights(setup.inventory, is_constant(setup.model))
        channel = make_partial(plan.partial_exchange, flat, setup.membership)
        loop = setup.loop or LoopOptimizer(setup.optimizer, flat.still)
        averages = Averages(setup.model, plan.update.average, names)
        applier = partial(
            PartialUpdates,
            loop=loop,
            channel=channel,
            averages=averages,
            written=WrittenWarning(flat.written, setup.is_first("written")),
        )
        self._accept_joiners(channel, setup)
        channels = ChannelSet(setup.collective(), partial=channel)
        state = StateAtWorker(setup.model, loop, averages)
        return setup.parts(loop, channels, applier, state, setup.accounting())

    @property
    def loads_midway(self) -> bool:
        return False

    # ---- restarted workers

    @property
    def rejoined(self) -> bool:
        """Whether this worker was started again and has taken no step since. The others make
        collective calls without it meanwhile."""
        return bool(self.membership.env.incarnation) and self.own_steps == self._back_at

    def begin_step(self) -> None:
        self._looping = True

    def _position(self) -> str:
        """Calls of a restarted worker before its loop match the other workers' calls before
        theirs."""
        return f"/{self.committed if self._looping else self._clocks[0].resumed_at}"

    def _standing(self) -> list[int]:
        """The numbers that a restarted worker needs."""
        return [self._clocks[0].resumed_at, self._chain.sync]

    def _accept_joiners(self, channel: GossipChannel, setup: PairSetup) -> None:
        """Let dead workers come back."""
        member, workers = setup.membership.member, setup.plan.cluster.workers
        if member.is_hub:
            give = partial(give_untrained, setup.model, setup.plan, setup.chain)
            JoinCoordinator(channel, member, workers, self._standing, give)
        else:
            JoinPeer(channel, member)

    def _come_back(self) -> None:
        """Rejoin a job that has continued without this worker."""
        model, env = self.pairs[0].model, self.membership.env
        welcome = come_back(model, self.plans[0], self._channel, self._chain, self.membership)
        self._clocks[0].resumed_at = welcome.standing[0]
        self.parts[0].synchronizer.resume(welcome.standing[0] + welcome.steps)
        self._back_at = self.own_steps
        if env.back_fd is not None:
            with os.fdopen(env.back_fd, "wb") as launcher:
                launcher.write(b".")

    # ---- weights

    def flush(self) -> None:
        self.refuse_in_block("job.flush()")
        if not self.rejoined:
            self._channel.drain()
            self._take_first_ranks("flushed")

    def _finish(self) -> None:
        self._channel.drain(final=True)
        self._take_first_ranks("ended")

    def _take_first_ranks(self, what: str) -> None:
        """Give all workers rank 0's weights. Before this, all have the same updates, but added in a
        different order; and of a dead worker's updates some may have received more than others."""
        self._flat.look()  # before these weights replace what the loop has written
        applier = self.parts[0].synchronizer.applier
        assert isinstance(applier, PartialUpdates)
        applier.warn_of_written()
        self._flat.begin()
        with self._chain.opened():
            while True:
                lost = [rank_of(name) for name in self.membership.member.lost]
                self._chain.among(self._gather(what, lost)[0])
                self._gather(what, None)  # now all ranks know the sender of the pieces
                copied = copy_state(self._chain, self.pairs[0].model)
                # A worker that continued would send partitions, and the copy in flight would
                # overwrite them.
                if all(self._gather(what, copied)):
                    break
        self._flat.note()

    def _gather(self, what: str, value: Any) -> list[Any]:
        return self._calls.gather(what, value, "job.flush")

    @contextmanager
    def frozen(self, block: str) -> Iterator[None]:
        with self._flat.keeping_apart(), super().frozen(block):
            yield

    def _while_waiting(self) -> None:
        self._channel.poll()

    def mean_weights(self) -> MeanWeights:
        if self.rejoined:
            return TrainingMode.mean_weights(self)
        return super().mean_weights()

    def outer_weights(self) -> None:
        raise no_shared_weights(self._name)

    # ---- checkpoints

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        if not self.rejoined:
            super().save(path, facts)

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """Load; a restarted worker already has the other workers' weights, which are newer."""
        if not self.rejoined:
            super().load(path, takes_nonfinite=takes_nonfinite)

    def accounts(self) -> dict[str, Any]:
        return {"slices": self._channel.account()}


class PartialUpdates(Applier):
    """Sends the changes that the user's optimizer makes to the weights.

    Any optimizer works: its momentum and other state see this worker's gradients only.

    Args:
        loop: The optimizer that the training loop uses; its ``step`` ends a step here.
        averages: Follow each update of the weights.
        written: Warns of weights that the loop has written itself.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        loop: LoopOptimizer,
        channel: GossipChannel,
        averages: Averages,
        written: WrittenWarning,
    ) -> None:
        self._synchronizer, self._optimizer = synchronizer, loop.local
        self._step = loop.step_local
        self._channel, self._averages = channel, averages
        self._written = written
        loop.attach(self.end_step)

    def takes_pass(self) -> bool:
        """Nothing is sent before the step, so passes add up."""
        return True

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Nothing to do: weights are complete only after ``job.flush``."""

    def warn_of_written(self) -> None:
        """Warn if it was noticed since the last step that the loop has written weights."""
        self._written.give(self._synchronizer.step)

    def end_step(self) -> None:
        """Step, accumulate the update for the peers, and wait for peers that are far behind."""
        synchronizer, channel = self._synchronizer, self._channel
        synchronizer.tap.end()
        synchronizer.gradients.refuse_unknown(self._optimizer)
        synchronizer.gradients.clear_refused()
        synchronizer.gradients.clip()
        channel.admit_joiners()
        coefficient = channel.rule.coefficient(synchronizer.step, channel.workers)
        self._averages.before_update()
        channel.give(channel.weights.stepped(self._step, coefficient))
        self._averages.follow()
        self.warn_of_written()
        channel.wait()
        synchronizer.end_step()
