"""Where workers train on weights of their own between outer rounds (DiLoCo, local SGD).

``outer_updates.py`` has the rounds of one pair. Here is what joins all pairs, and all workers:
flushing, saving, and who has the outer weights.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import CheckpointError, RuntimeFault
from slipstream.runtime.members.heartbeat import SAME_STEPS
from slipstream.torch.checkpoints.kept_state import StateAtWorker
from slipstream.torch.checkpoints.loaded_weights import LoadedWeights, PostedDigests
from slipstream.torch.checkpoints.outer_weights import OuterState, OuterWeights
from slipstream.torch.checkpoints.worker_part import (
    PartOfPair,
    part_path,
    read_part,
    take_part,
    write_part,
)
from slipstream.torch.modes.networked import NetworkedMode, SetupInputs
from slipstream.torch.modes.outer_updates import OuterUpdates
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup
from slipstream.torch.modes.weights_at_servers import WeightsAtServers
from slipstream.torch.tensors.averages import Averages
from slipstream.torch.tensors.fingerprint import fingerprints
from slipstream.torch.tensors.inventory import is_constant
from slipstream.torch.tensors.script_lines import level_of_the_script


class LocalStepsMode(NetworkedMode):
    """The user's optimizer steps on this worker's weights; an outer one follows every H steps.

    The outer optimizer runs at workers, or at servers. Of rounds that servers make of the first N
    outer gradients a worker may miss some: the servers then have the outer weights.
    """

    def __init__(self, given: SetupInputs) -> None:
        super().__init__(given)
        self._at_servers = None
        if not self.plans[0].delivers_every_result:
            self._at_servers = WeightsAtServers(self.parts, self.membership, self._chain)

    def _wire(self, setup: PairSetup) -> PairParts:
        plan, own = setup.plan, setup.optimizer
        optimizer = plan.update.outer_optimizer
        assert optimizer is not None
        outer = OuterWeights(setup.inventory, optimizer, is_constant(setup.model))
        at_server = optimizer.at == "server"
        service = setup.service() if at_server else setup.accounting()
        servers = setup.server_state(own, service) if at_server and service else None
        channels = setup.channels()
        digests = PostedDigests(setup.membership, setup.key("first step"))
        applier = partial(
            OuterUpdates,
            optimizer=own,
            outer=outer,
            loaded=LoadedWeights(setup.model, outer, digests),
            links=channels.links,
            servers=servers,
        )
        average = plan.update.average if servers is None else None
        averages = Averages(setup.model, average, setup.inventory.parameter_names)
        inner = StateAtWorker(setup.model, own, averages)
        state = OuterState(inner, outer, setup.slots.known_buffers, servers)
        made = setup.parts(own, channels, applier, state, service)
        if servers is not None:
            servers.begin()
        return made

    @property
    def loads_midway(self) -> bool:
        return self._at_servers is None

    @property
    def _appliers(self) -> list[OuterUpdates]:
        appliers = [each.synchronizer.applier for each in self.parts]
        return [applier for applier in appliers if isinstance(applier, OuterUpdates)]

    def outer_weights(self) -> Sequence[Mapping[str, Tensor]]:
        return [applier.outer.copies() for applier in self._appliers]

    # ---- equal weights

    def flush(self) -> None:
        """Make an outer round now, after which all workers have the same weights.

        Where workers may miss rounds, only wait for this worker's.

        Raises:
            RuntimeFault: A worker has made more or fewer steps.
        """
        self.refuse_in_block("job.flush()")
        if self._at_servers is None:
            self._synchronize("flushed")
        else:
            self.wait()

    def _finish(self) -> None:
        if self._at_servers is None:
            self._synchronize("ended")
        else:
            self._at_servers.finish()

    def _settle(self) -> None:
        self.wait()

    def _synchronize(self, what: str) -> None:
        # Before any tensor is sent: fragments of different sizes would be summed with each other.
        appliers = self._appliers
        steps = [each.synchronizer.step for each in self.parts]
        ended_after = sum(steps) if what == "ended" else None
        own = [steps, [[each.has_steps, each.changed, each.moved] for each in appliers]]
        said = self._calls.gather(what, own, ended_after=ended_after)
        if any(others != steps for others, _ in said):
            told = ", ".join(f"rank {rank} {sum(each)}" for rank, (each, _) in enumerate(said))
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
            changed: By rank, the first parameter; empty if there is none.
        """
        own = fingerprints(self.pairs[pair].model).whole
        if len(set(self._calls.gather("job.flush, changed weights", own, "job.flush"))) == 1:
            return applier.follow()
        if self.membership.env.rank == 0 and any(changed):
            rank, name = next((rank, name) for rank, name in enumerate(changed) if name)
            warnings.warn(
                f"rank {rank} has changed weights after the last outer round ({name!r}), and not "
                "all ranks have done the same: all workers get the mean of their weights. Make the "
                "same change on all ranks, or make it after the `with` block",
                stacklevel=level_of_the_script(),
            )
        return False

    # ---- checkpoints

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write the outer weights, and each worker's own in a part beside them.

        Training goes on as if nothing was saved. Parts are written first: whoever finds the
        checkpoint finds them. Where workers may miss rounds, rank 0 writes what the servers have.
        """
        if self._at_servers is not None:
            if self.membership.env.rank == 0:
                steps = self._at_servers.steps_to_save(self._clocks)
                self.flush()
                self._at_servers.save(path, facts, steps)
            return
        token = self._calls.gather("job.save", secrets.token_hex(8), "job.save")[0]
        facts, problem = {**facts, "parts": token}, ""
        steps = [clock.committed for clock in self._clocks]
        try:
            write_part(self._part(path), self.pairs, self._pair_parts, steps, facts)
        except CheckpointError as error:
            problem = str(error)
        said = self._calls.gather("job.save, its own part written", problem, "job.save")
        self._warn_of(said, path, "cannot be written")
        self._save_together(path, facts)

    def _take(self, path: Path, *, takes_nonfinite: bool) -> Mapping[str, Any]:
        facts = super()._take(path, takes_nonfinite=takes_nonfinite)
        if self._at_servers is None:
            self._take_own_part(path, facts, takes_nonfinite=takes_nonfinite)
        return facts

    def _take_own_part(
        self, path: Path, facts: Mapping[str, Any], *, takes_nonfinite: bool
    ) -> None:
        """Let each worker take its own part, if all have theirs."""
        part, token, problem = None, facts.get("parts", ""), ""
        if token and facts["workers"] != self.membership.env.world_size:
            problem = f"{facts['workers']} workers wrote it"
        elif token:
            try:
                part = read_part(
                    self._part(path),
                    self.pairs,
                    self._pair_parts,
                    token,
                    takes_nonfinite=takes_nonfinite,
                )
            except CheckpointError as error:
                problem = str(error)
        said = self._calls.gather("job.load, its own part read", problem, "job.load")
        self._warn_of(said, path, "cannot be used")
        take_part(self.pairs, self._pair_parts, None if any(said) else part)

    @property
    def _pair_parts(self) -> list[PartOfPair]:
        return [
            PartOfPair(each.plan, each.synchronizer.inventory.tensors, applier, each.state.own)
            for each, applier in zip(self.parts, self._appliers, strict=True)
            if isinstance(each.state, OuterState)
        ]

    def _part(self, path: Path) -> Path:
        return part_path(path, self.membership.env.rank)

    def _warn_of(self, problems: Sequence[str], path: Path, what: str) -> None:
        """Rank 0 says why workers' own weights are not saved, or not loaded."""
        found = {problem: rank for rank, problem in enumerate(problems) if problem}
        if found and self.membership.env.rank == 0:
            why = "; ".join(f"rank {rank}: {problem}" for problem, rank in found.items())
            warnings.warn(
                f"workers' own parts of {path} {what} ({why}): of it there are only the outer "
                "weights and momentum, and rank 0's optimizer state for all. Steps that workers "
                "had made since their last outer round are left out",
                stacklevel=level_of_the_script(),
            )
