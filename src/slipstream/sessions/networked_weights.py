"""Where a networked job's weights are: on every worker, at servers, or different on each worker.

This decides how workers get equal weights, who deals batches, and what a checkpoint holds.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.consistency.leases import Batch
from slipstream.errors import CheckpointError, RuntimeFault
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.members.heartbeat import SAME_STEPS
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.servers.accounts import merge_pairs
from slipstream.runtime.servers.shard_service import ShardService
from slipstream.sessions.collective_calls import CollectiveCalls
from slipstream.sessions.protocol import Pair
from slipstream.torch.checkpoints.training_state import OwnState
from slipstream.torch.distribute.replica import Replica
from slipstream.torch.distribute.sampler import in_turn
from slipstream.torch.distribute.saving import save_job, take_weights, write_state
from slipstream.torch.distribute.worker_part import (
    applier_of,
    part_path,
    read_part,
    take_part,
    write_part,
)
from slipstream.torch.modes.outer_updates import OuterUpdates
from slipstream.torch.modes.partial_updates import PartialUpdates
from slipstream.torch.tensors.copying import copy_state
from slipstream.torch.tensors.fingerprint import fingerprints
from slipstream.torch.tensors.pairs import distinct_models
from slipstream.torch.tensors.random_state import random_state
from slipstream.torch.tensors.script_lines import level_of_the_script
from slipstream.types import rank_of

Lease = Callable[[int, int], Batch]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a networked training; ``replicas`` are by pair."""

    pairs: tuple[Pair, ...]
    replicas: tuple[Replica, ...]
    membership: Membership
    calls: CollectiveCalls

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.membership.env.rank

    def wait(self) -> None:
        """Wait until this worker's weights are up to date."""
        for replica in self.replicas:
            replica.synchronizer.wait()

    def accounts(self) -> dict[str, Any]:
        """What servers report, if there are any."""
        services = [replica.service for replica in self.replicas]
        return merge_pairs([service.accounts() for service in services if service is not None])

    def save(self, path: Path, steps: Sequence[int], facts: dict[str, Any]) -> None:
        """Write a checkpoint on rank 0; every rank must call it."""
        with self.calls.watched("job.save"):
            save_job(
                path,
                self.calls.name("save"),
                self.pairs,
                self.replicas,
                self.membership,
                steps=steps,
                facts=facts,
            )


class Weights:
    """The authoritative weights are on every worker: all apply every result, so all are equal.

    Attributes:
        loads_midway: whether a checkpoint may be loaded after the first step.
        lease: gives the next batch of an epoch; see ``Training.lease``.
    """

    loads_midway = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.lease: Lease = in_turn(parts.rank, parts.membership.env.world_size)

    def flush(self) -> None:
        """Wait until every worker has all updates of all workers."""
        self._parts.wait()

    def settle(self) -> None:
        """Before a checkpoint replaces all weights: nothing may be under way."""
        self.flush()

    def save(self, path: Path, steps: Sequence[int], facts: dict[str, Any]) -> None:
        """Write a checkpoint; every rank must call it.

        Args:
            steps: By pair.
        """
        self.flush()
        self._parts.save(path, steps, facts)

    def loaded(self, path: Path, facts: Mapping[str, Any], *, takes_nonfinite: bool) -> None:
        """A checkpoint with these facts was loaded, and the step is set; every rank calls it."""

    def accounts(self) -> dict[str, Any]:
        """What servers and channels report about the training."""
        return self._parts.accounts()

    def finish(self) -> None:
        """Called when the loop is over: all workers get the last weights."""


class LocalWeights(Weights):
    """Workers train on weights of their own between outer rounds."""

    def flush(self) -> None:
        """Make an outer round now, after which all workers have the same weights.

        Raises:
            RuntimeFault: A worker has made more or fewer steps.
        """
        self._synchronize("flushed")

    def finish(self) -> None:
        self._synchronize("ended")

    def _synchronize(self, what: str) -> None:
        # Before any tensor is sent: fragments of different sizes would be summed with each other.
        appliers = [applier_of(replica) for replica in self._parts.replicas]
        made = [replica.synchronizer.step for replica in self._parts.replicas]
        ended_after = sum(made) if what == "ended" else None
        own = [made, [[each.has_steps, each.changed, each.moved] for each in appliers]]
        said = self._parts.calls.gather(what, own, ended_after=ended_after)
        if any(steps != made for steps, _ in said):
            told = ", ".join(f"rank {rank} {sum(steps)}" for rank, (steps, _) in enumerate(said))
            raise RuntimeFault(f"workers ran different numbers of steps: {told}; {SAME_STEPS}")
        for pair, applier in enumerate(appliers):
            # All ranks decide alike: one that made no round would miss the others'.
            has_steps, changed, moved = zip(*(states[pair] for _, states in said), strict=True)
            differ = any(changed) or any(moved)
            if any(has_steps) or (differ and not self._changed_alike(pair, applier, changed)):
                applier.synchronize()

    def _changed_alike(self, pair: int, applier: OuterUpdates, changed: Sequence[str]) -> bool:
        """Whether all workers have the same weights, which their loops have changed since the last
        round; if not, say who has. Forward passes in training mode may have changed them, too.

        Args:
            changed: by rank, the first parameter; empty if there is none.
        """
        own = fingerprints(self._parts.pairs[pair].model).whole
        if len(set(self._gather("job.flush, changed weights", own, "job.flush"))) == 1:
            return applier.follow()
        if self._parts.rank == 0 and any(changed):
            rank, name = next((rank, name) for rank, name in enumerate(changed) if name)
            warnings.warn(
                f"rank {rank} has changed weights after the last outer round ({name!r}), and not "
                "all ranks have done the same: all workers get the mean of their weights. Make the "
                "same change on all ranks, or make it after the `with` block",
                stacklevel=level_of_the_script(),
            )
        return False

    def settle(self) -> None:
        self._parts.wait()

    def save(self, path: Path, steps: Sequence[int], facts: dict[str, Any]) -> None:
        """The outer weights, and each worker's own in a part beside them.

        Training goes on as if nothing was saved. Parts are written first: who finds the checkpoint
        finds them.
        """
        token = self._gather("job.save", secrets.token_hex(8), "job.save")[0]
        facts, problem = {**facts, "parts": token}, ""
        try:
            write_part(self._part(path), self._parts.pairs, self._parts.replicas, steps, facts)
        except CheckpointError as error:
            problem = str(error)
        self._warn_of(
            self._gather("job.save, its own part written", problem, "job.save"),
            path,
            "cannot be written",
        )
        self._parts.save(path, steps, facts)

    def loaded(self, path: Path, facts: Mapping[str, Any], *, takes_nonfinite: bool) -> None:
        """Each worker takes its own part, if all have theirs."""
        part, token, problem = None, facts.get("parts", ""), ""
        if token and facts["workers"] != self._parts.membership.env.world_size:
            problem = f"{facts['workers']} workers wrote it"
        elif token:
            try:
                pairs, replicas = self._parts.pairs, self._parts.replicas
                part = read_part(
                    self._part(path), pairs, replicas, token, takes_nonfinite=takes_nonfinite
                )
            except CheckpointError as error:
                problem = str(error)
        said = self._gather("job.load, its own part read", problem, "job.load")
        self._warn_of(said, path, "cannot be used")
        take_part(self._parts.pairs, self._parts.replicas, None if any(said) else part)

    def _part(self, path: Path) -> Path:
        return part_path(path, self._parts.rank)

    def _gather(self, what: str, value: Any, doing: str) -> list[Any]:
        return self._parts.calls.gather(what, value, doing)

    def _warn_of(self, problems: Sequence[str], path: Path, what: str) -> None:
        """Rank 0 says why workers' own weights are not saved, or not loaded."""
        found = {problem: rank for rank, problem in enumerate(problems) if problem}
        if found and self._parts.rank == 0:
            why = "; ".join(f"rank {rank}: {problem}" for problem, rank in found.items())
            warnings.warn(
                f"workers' own parts of {path} {what} ({why}): of it there are only the outer "
                "weights and momentum, and rank 0's optimizer state for all. Steps that workers "
                "had made since their last outer round are left out",
                stacklevel=4,
            )


class WeightsAtServers(Weights):
    """Servers update the weights, and a worker may miss some results.

    Args:
        resumed_at: returns the step at which each pair began in this job.
    """

    loads_midway = False

    def __init__(
        self, parts: Parts, service: ShardService, resumed_at: Callable[[], list[int]]
    ) -> None:
        super().__init__(parts)
        plan = parts.replicas[0].plan
        # The workers of a host make the same number of steps, so batches are dealt to them in turn.
        if plan.local_steps is None and not plan.cluster.members:
            self.lease = service.lease
        self._resumed_at = resumed_at

    def save(self, path: Path, steps: Sequence[int], facts: dict[str, Any]) -> None:
        """The servers have all of the state: calls on other ranks do nothing."""
        if self._parts.rank != 0:
            return
        self.flush()
        replicas = self._parts.replicas
        if replicas[0].plan.consistency.agreed:  # servers tell the round of their state
            steps = self._resumed_at()
        states = [replica.state for replica in replicas]
        own: dict[int | str, OwnState] = {0: OwnState(random_state())}
        write_state(path, self._parts.pairs, states, steps, facts, own)

    def finish(self) -> None:
        """Workers end at different times; all get the last weights."""
        pairs, replicas = self._parts.pairs, self._parts.replicas
        membership, chain = self._parts.membership, replicas[0].chain
        for replica in replicas:
            for exchange in replica.link_exchanges:
                exchange.drain()
        for replica in replicas:
            replica.retire()
        with chain.opened():
            complete = membership.finish_training()
            if self._parts.rank == 0 or not complete:
                for pair, replica in zip(pairs, replicas, strict=True):
                    take_weights(pair.model, replica)
            for model in distinct_models(pairs) if complete else ():
                copy_state(chain, model)


class OwnWeights(Weights):
    """Every worker has its own weights, and workers exchange partitions of updates.

    Args:
        rejoined: whether this worker was started again and has taken no step since. The others
            make collective calls without it meanwhile.
        missed: the number of steps before it came back.
    """

    loads_midway = False

    def __init__(
        self, parts: Parts, channel: GossipChannel, rejoined: Callable[[], bool], missed: int
    ) -> None:
        super().__init__(parts)
        self._channel, self._rejoined = channel, rejoined
        self.lease = in_turn(parts.rank, parts.membership.env.world_size, missed)

    def flush(self) -> None:
        if self._rejoined():
            return
        self._channel.drain()
        self._take_first_ranks("flushed")

    def _take_first_ranks(self, what: str) -> None:
        """All workers take rank 0's weights. Before this, all have the same updates, but added in a
        different order; and of a dead worker's updates some may have received more than others."""
        ((model, _),), (replica,) = self._parts.pairs, self._parts.replicas
        membership = self._parts.membership
        if replica.flat is not None:
            replica.flat.look()  # before these weights replace what the loop has written
            assert isinstance(replica.synchronizer.applier, PartialUpdates)
            replica.synchronizer.applier.warn_of_written()
            replica.flat.begin()
        with replica.chain.opened():
            while True:
                lost = [rank_of(name) for name in membership.member.lost]
                replica.chain.among(self._gather(what, lost)[0])
                self._gather(what, None)  # now all ranks know the sender of the pieces
                copied = copy_state(replica.chain, model)
                # A worker that continued would send partitions, and the copy in flight would
                # overwrite them.
                if all(self._gather(what, copied)):
                    break
        if replica.flat is not None:
            replica.flat.note()

    def _gather(self, what: str, value: Any) -> list[Any]:
        return self._parts.calls.gather(what, value, "job.flush")

    def accounts(self) -> dict[str, Any]:
        return {"slices": self._channel.account()}

    def finish(self) -> None:
        self._channel.drain(final=True)
        self._take_first_ranks("ended")
