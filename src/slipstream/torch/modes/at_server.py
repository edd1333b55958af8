"""Where servers update: gradients are sent, and new weights come back.

The loop has an optimizer whose steps end rounds; the user's runs at the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, RuntimeFault
from slipstream.runtime.exchange.engine import Applier
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.torch.capture.forward_gate import ForwardGate
from slipstream.torch.capture.loop_watch import PROBED_STEPS, LoopWatch
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer, State
from slipstream.torch.capture.replica_check import ReplicaCheck, keeps_replicas_equal
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.modes.networked import NetworkedMode, SetupInputs
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup
from slipstream.torch.modes.weights_at_servers import WeightsAtServers, no_shared_weights
from slipstream.torch.optimizers.shard_optimizer import settings_of
from slipstream.torch.tensors.tensor_sums import sum_of
from slipstream.types import Settings


class AtServerMode(NetworkedMode):
    """Servers update, in rounds of all workers, of the first N, or with each gradient.

    In rounds of all workers, all have the same weights after each step. Else a worker may miss
    results: servers then count rounds, deal batches, and have the weights that a checkpoint holds.
    """

    def __init__(self, given: SetupInputs) -> None:
        super().__init__(given)
        self._at_servers = None
        if not self.plans[0].delivers_every_result:
            self._at_servers = WeightsAtServers(self.parts, self.membership, self._chain)

    def _wire(self, setup: PairSetup) -> PairParts:
        service = setup.service()
        loop = setup.loop or RemoteOptimizer(setup.optimizer, setup.inventory.trained)
        assert isinstance(loop, RemoteOptimizer)
        servers, settings = setup.server_state(loop, service), RoundSettings(loop)
        applier = partial(
            ServerUpdates,
            loop=loop,
            servers=servers,
            settings=settings,
            is_first=setup.is_first("overlap"),
        )
        channels = setup.channels(settings=settings.now)
        check = None
        if keeps_replicas_equal(setup.plan):
            check = partial(compared_with_handed, loop=loop, member=setup.member)
        made = setup.parts(loop, channels, applier, servers, service, check)
        servers.begin()
        if state := loop.own_state():
            servers.take_state(state)
        return made

    @property
    def loads_midway(self) -> bool:
        return self._at_servers is None

    def lease(self, batches: int, returned: int) -> Batch:
        # The workers of a host make the same number of steps, so batches are dealt to them in turn.
        service = self.parts[0].service
        if self._at_servers is None or self.plans[0].cluster.members or service is None:
            return super().lease(batches, returned)
        return service.lease(batches, returned)

    def outer_weights(self) -> None:
        if self._at_servers is not None:
            raise no_shared_weights(self._name)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        if self._at_servers is None:
            super().save(path, facts)
        elif self.membership.env.rank == 0:
            steps = self._at_servers.steps_to_save(self._clocks)
            self.flush()
            self._at_servers.save(path, facts, steps)

    def _finish(self) -> None:
        if self._at_servers is not None:
            self._at_servers.finish()


def compared_with_handed(
    synchronizer: Synchronizer, *, loop: RemoteOptimizer, member: Endpoint
) -> ReplicaCheck:
    """Compare replicas, also by the weights that loops have put into them."""
    assert isinstance(synchronizer.applier, ServerUpdates)
    return ReplicaCheck(synchronizer, None, loop, member, synchronizer.applier.handed)


class RoundSettings:
    """The optimizer's settings, the same for all gradients of a round."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.of_round: Settings | None = None  # None: not sent yet

    def now(self) -> Settings:
        """Return the settings of this round, which are sent now."""
        if self.of_round is None:
            self.of_round = settings_of(self._optimizer)
        return self.of_round

    def next_round(self) -> None:
        """Read the settings again for the next gradient."""
        self.of_round = None


class ServerUpdates(Applier):
    """Waits for results layer by layer, before the next forward.

    The learning rate and other settings are sent with each gradient. Where the loop changes these
    or gradients between ``backward()`` and ``step()``, both are sent at ``step()``: see
    ``LoopWatch``.

    Weights that the loop changes after ``step()`` are rank 0's from then on, at the servers, too,
    where all workers have the same weights after a step: all make the same change. In the first
    steps, and in a loop that changes weights in these, ``step()`` waits for the new weights, so
    that the loop changes those. Where workers have different weights, a change would undo other
    workers' updates. Weights that were loaded before the first step are taken everywhere, just
    before the first gradients leave.

    Args:
        loop: The optimizer that the training loop uses; its ``step`` ends a step here.
        servers: The weights and state that servers have.
        settings: Those that are sent with gradients.
        is_first: Whether this worker is the one that warns.

    Attributes:
        made: Steps of this worker in this job.
        alike: Whether all workers have the same weights after a step.
        handed: By tensor, a number for all weights that the loop has put into it since the first
            step: equal on workers that have made the same changes.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        loop: RemoteOptimizer,
        servers: ServerState,
        settings: RoundSettings,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        self._synchronizer, self._optimizer = synchronizer, loop
        self._servers, self._settings = servers, settings
        loop.attach(self.end_step)
        synchronizer.call_at_step(self.begin_step)
        loop.keep_at(StateAtServers(self, servers))
        self.made = 0
        self.handed: dict[int, int] = {}
        self.alike = synchronizer.plan.delivers_every_result
        self._refreshed_for = -1
        self._between_passes = False  # whether no forward pass has begun since the last step
        self._is_current = True  # whether this worker has waited for all weights since its step
        self._changes_weights = False
        self._watch = LoopWatch(
            synchronizer,
            hooked=lambda: loop.has_pre_hooks,
            settings=lambda: settings_of(loop),
            is_first=is_first,
        )
        tensors = synchronizer.inventory.tensors
        places = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._trained = [(i, tensors[i]) for i in synchronizer.inventory.parameters]
        self.hooks = [
            ForwardGate(
                synchronizer.model, places, self.wait, self._begin_forward, self._before_reading
            )
        ]
        self.begin_step()

    def begin_step(self) -> None:
        # Arrived weights are written without autograd's knowledge: a changed version is the user's
        # write, and so is other memory.
        self._seen = [(tensor._version, tensor.data_ptr()) for _, tensor in self._trained]
        self._sums: list[torch.Tensor] = []

    def _before_reading(self) -> None:
        """The loop is about to read weights by hand, or to change them."""
        driver = self._synchronizer.driver
        if driver.frozen_in or driver.exchanged:
            return  # they are lent; or those of this step are there, and are not the next one's
        self.wait()
        if self._between_passes and not self._sums:
            self._note_sums()

    def _note_sums(self) -> None:
        """In the first steps, and where weights are read or changed, also see writes to
        ``.data``."""
        if self.made:
            self._sums = [tensor.detach().sum() for _, tensor in self._trained]

    def _changed_weights(self) -> set[int]:
        """The tensors that the loop has changed since this step began.

        Raises:
            RuntimeFault: One was converted, and no server could take it.
        """
        known = zip(self._trained, self._seen, strict=True)
        changed = {
            i
            for (i, tensor), (version, place) in known
            if tensor._version != version or tensor.data_ptr() != place
        }
        for (i, tensor), before in zip(self._trained, self._sums, strict=False):
            total = tensor.detach().sum()
            if not torch.equal(total, before) and not bool(total.isnan() & before.isnan()):
                changed.add(i)
        for i in sorted(changed):
            self._synchronizer.gradients.refuse_converted(i)
        return changed

    def _begin_forward(self) -> None:
        """Apply weights that have arrived; once per step, so that no layer changes during a
        pass."""
        driver = self._synchronizer.driver
        if driver.frozen_in:
            return
        if self._is_current and not torch.is_grad_enabled():
            return  # an evaluation, maybe of other weights, which the loop then takes out again
        self._between_passes = False
        self._take_changed_weights()
        if self._refreshed_for != driver.step:
            self._refreshed_for = driver.step
            driver.refresh()

    def _take_changed_weights(self) -> None:
        """Give the servers what the loop has made of the newest weights since the last step.

        Raises:
            RuntimeFault: The servers cannot take them.
        """
        takes = self.made and self._is_current
        exchanged = self._synchronizer.driver.exchanged
        if takes and not exchanged and (changed := self._changed_weights()):
            if not self.alike:
                raise RuntimeFault(self._why_not_taken())
            self._servers.take_weights(changed)
            self._note_handed(changed)
            # What the loop has put in for an evaluation with gradients, it takes out again.
            self._changes_weights = self._between_passes = True
            self.begin_step()
        self._sums = []  # from here on, weights that arrive change them

    def _note_handed(self, changed: Container[int]) -> None:
        for i, tensor in self._trained:
            if i in changed:
                self.handed[i] = (31 * self.handed.get(i, 7) + sum_of(tensor)) % 2**63

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        overwrites = tensors is None and self.made > 0 and not self._is_current
        if overwrites and not self._synchronizer.driver.frozen_in and self._changed_weights():
            raise RuntimeFault(self._why_not_taken())
        self._synchronizer.driver.wait(tensors)
        self._is_current |= tensors is None

    def takes_pass(self) -> bool:
        """No: the settings have left, and the servers may have updated already."""
        self._watch.note_late_pass()
        return False

    def pass_ended(self) -> None:
        if self._synchronizer.plan.schedule.leaves_during_backward and not self._watch.late_pass:
            self._synchronizer.flush()
            self._synchronizer.gradients.note_left()

    def end_step(self) -> None:
        """Send what has not been sent yet; new weights are awaited before they are used.

        Raises:
            RuntimeFault: Weights were changed where the servers cannot take them.
        """
        synchronizer = self._synchronizer
        synchronizer.tap.end()
        synchronizer.gradients.refuse_unknown(self._optimizer)
        if synchronizer.driver.exchanged:
            self._sums = []  # new weights may have arrived
        if changed := self._changed_weights():
            if self.made or synchronizer.driver.exchanged:
                raise RuntimeFault(self._why_not_taken())
            self._servers.take_loaded_weights(changed)
            self.begin_step()
        self._watch.examine(self._settings.of_round)
        synchronizer.end_exchange()
        self._settings.next_round()
        self._optimizer.forget_state()
        self.made += 1
        self._is_current, self._between_passes = False, True
        synchronizer.end_step()
        changes_weights = self._changes_weights or self._optimizer.has_post_hooks
        if changes_weights or self.made < PROBED_STEPS:
            self.wait()
            self._note_sums()

    def _why_not_taken(self) -> str:
        if not self.made:
            return (
                "weights were changed after job.distribute, and the first gradients have already "
                "left: change weights before job.distribute"
            )
        if not self.alike:
            return (
                "weights were changed outside of the optimizer, but servers update them, and "
                "workers are not in step: the change would undo other workers' updates. Constrain "
                "weights by torch.nn.utils.parametrize, use push_pull(), or job.load before the "
                "first step for a checkpoint"
            )
        if self._is_current:
            return (
                "weights were changed between a forward pass and step(), but the servers update "
                "them: change them after step()"
            )
        return (
            "weights were changed after a step, but new ones were still on their way from the "
            f"servers, since the first {PROBED_STEPS} steps changed none: call job.wait() before "
            "you change weights"
        )


class StateAtServers:
    """The optimizer's state is at the servers; implements ``StateKeeper``."""

    def __init__(self, updates: ServerUpdates, servers: ServerState) -> None:
        self._updates, self._servers = updates, servers

    def fetch(self) -> State:
        self._updates.wait()
        return self._servers.fetch().optimizer.state

    def take(self, state: State) -> None:
        """Wait for the steps that were made with the old state, and replace it everywhere.

        Raises:
            ConfigError: Workers are not in step, so other workers may be in the midst of theirs.
        """
        if self._updates.made and not self._updates.alike:
            raise ConfigError(
                "servers update, and workers are not in step: optimizer.load_state_dict comes "
                "before the first step, on every rank"
            )
        self._updates.wait()
        self._servers.meet(None)
        self._servers.take_state(state)
        self._servers.meet(None)
