"""What the training modes have in common whose workers exchange messages."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.consistency.leases import Batch, in_turn
from slipstream.errors import ConfigError, RuntimeFault
from slipstream.planning.table import as_tables
from slipstream.runtime.figures.replica_reports import Difference, ReplicaReport
from slipstream.runtime.figures.summary import Traffic, TrainingFigures, WorkerFigures
from slipstream.runtime.servers.accounts import merge_pairs
from slipstream.torch.capture.step_watch import never_stepped
from slipstream.torch.checkpoints.loading import load_job
from slipstream.torch.checkpoints.saving import save_job
from slipstream.torch.modes.clocks import clock_of
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.pair_parts import PairParts
from slipstream.torch.modes.pair_setup import PairSetup, SharedParts
from slipstream.torch.tensors.inventory import whole_vector
from slipstream.torch.tensors.mean_weights import MeanWeights, by_name_of


@dataclass(frozen=True, slots=True)
class SetupInputs:
    """What exists before a mode is made.

    Attributes:
        name: The strategy's, in messages.
        call: The call that makes it, in messages.
        pairs: What each pair's parts are made of; or the parts, if an earlier call made them and
            they are still valid.
        meet: Waits until all ranks can receive gradients of these parts.
    """

    name: str
    call: str
    shared: SharedParts
    pairs: Sequence[PairSetup | PairParts]
    meet: Callable[[Sequence[PairParts]], None]


class NetworkedMode(TrainingMode):
    """Workers exchange messages; by default all workers make every step and have equal weights.

    Attributes:
        parts: By pair.
    """

    def __init__(self, given: SetupInputs) -> None:
        self._name, self._call = given.name, given.call
        self.membership = given.shared.membership
        self._calls, self._consensus = given.shared.calls, given.shared.consensus
        self._chain = given.shared.chain
        self.parts = tuple(
            each if isinstance(each, PairParts) else self._wire(each) for each in given.pairs
        )
        self.pairs = tuple(each.trained for each in self.parts)
        self.plans = [each.plan for each in self.parts]
        self._clocks = [clock_of(each) for each in self.parts]
        env = self.membership.env
        self._lease = in_turn(env.rank, env.world_size)
        given.meet(self.parts)
        self._begin_checks()

    @abstractmethod
    def _wire(self, setup: PairSetup) -> PairParts:
        """Make one pair's parts; every rank calls it in the same order."""

    def _begin_checks(self) -> None:
        for each in self.parts:
            if each.check is not None:
                each.check.begin()

    # ---- steps

    @property
    def committed(self) -> int:
        return self._clocks[0].committed

    @property
    def begun(self) -> bool:
        return any(each.synchronizer.step for each in self.parts)

    @property
    def own_steps(self) -> int:
        return self.parts[0].synchronizer.step - self._clocks[0].resumed_at

    def next_step(self) -> int:
        return self._clocks[0].next_step()

    def end_step(self, step: int) -> None:
        self._clocks[0].end_step(step)

    def lease(self, batches: int, returned: int) -> Batch:
        return self._lease(batches, returned)

    # ---- gradients

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self.parts:
                stack.enter_context(each.synchronizer.accumulate())
            yield

    def leaving_during_backward(self, pair: int) -> AbstractContextManager[None]:
        if len(self.parts) == 1:
            return nullcontext()
        return self.parts[pair].synchronizer.leaving_during_backward()

    def ready(self, pair: int, tensor: int) -> None:
        self.parts[pair].synchronizer.gradient_ready(tensor)

    # ---- weights

    def wait(self) -> None:
        for each in self.parts:
            each.synchronizer.applier.wait()

    def finish(self) -> None:
        each = [parts.synchronizer for parts in self.parts]
        if any(one.never_left for one in each) and not any(one.ended for one in each):
            raise RuntimeFault(never_stepped(self._call, pairs=len(each), over=True))
        self._finish()

    def _finish(self) -> None:
        """Give all workers the last weights; by default they have them."""

    @contextmanager
    def frozen(self, block: str) -> Iterator[None]:
        drivers = [each.synchronizer.driver for each in self.parts]
        before = [driver.frozen_in for driver in drivers]
        for driver in drivers:
            driver.frozen_in = block
        try:
            with super().frozen(block):
                yield
        finally:
            for driver, earlier in zip(drivers, before, strict=True):
                driver.frozen_in = earlier

    def averages(self) -> list[dict[str, Tensor]]:
        kept = [each.plan.update.average is not None for each in self.parts]
        return [
            each.state.fetch().averages if keeps else {}
            for each, keeps in zip(self.parts, kept, strict=True)
        ]

    def mean_weights(self) -> MeanWeights:
        model = self.pairs[0].model
        found, spread = self._consensus.reach(whole_vector(model).numpy(), self._while_waiting)
        return MeanWeights(by_name_of(model, torch.from_numpy(found)), spread)

    def _while_waiting(self) -> None:
        """Do what cannot be left undone while this worker waits for others' weights."""

    # ---- checkpoints

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        self.flush()
        self._save_together(path, facts)

    def _save_together(self, path: Path, facts: dict[str, Any]) -> None:
        """Write a checkpoint on rank 0; every rank calls it."""
        steps = [clock.committed for clock in self._clocks]
        with self._calls.watched("job.save"):
            occasion = self._calls.name("save")
            save_job(
                path, occasion, self.pairs, self.parts, self.membership, steps=steps, facts=facts
            )

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        if self.own_steps and not self.loads_midway:
            raise ConfigError(f"with {self._name} job.load comes before the first step")
        self._settle()
        self._take(path, takes_nonfinite=takes_nonfinite)
        self._begin_checks()

    @property
    def loads_midway(self) -> bool:
        """Whether a checkpoint may be loaded after the first step."""
        return True

    def _settle(self) -> None:
        """Wait until nothing is under way that a checkpoint would replace."""
        self.flush()

    def _take(self, path: Path, *, takes_nonfinite: bool) -> Mapping[str, Any]:
        """Load a checkpoint on all ranks, set the steps, and return its facts."""
        occasion = self._calls.name("load")
        with self._calls.watched("job.load"):
            saved = load_job(
                path,
                occasion,
                self.pairs,
                self.parts,
                self._chain,
                self.membership,
                takes_nonfinite=takes_nonfinite,
            )
        for clock, each, shared in zip(self._clocks, self.parts, saved.shared, strict=True):
            clock.resumed_at = shared.step
            each.synchronizer.resume(shared.step)
        return saved.facts

    # ---- figures

    def figures(self) -> TrainingFigures:
        transport = self.membership.transport
        return TrainingFigures(
            servers=max(each.plan.cluster.servers for each in self.parts),
            traffic=self._traffic(),
            wait_s=sum(each.synchronizer.driver.wait_s for each in self.parts),
            refused=self.membership.member.refused + sum(transport.refused.values()),
        )

    def _traffic(self) -> Traffic:
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for each in self.parts:
            out, back = each.channels.bytes()
            sent, received = sent + out, received + back
        transport = self.membership.transport
        moved = transport.sent + transport.received
        local = sum(
            moved[peer] for peer in {p for each in self.parts for p in each.shards.colocated}
        )
        by_links = sum(
            channel.sent.total() + channel.received.total()
            for each in self.parts
            for channel in each.channels.of_messages
        )
        return Traffic(
            sent=sent.total(),
            received=received.total(),
            local=local,
            control=moved.total() - local - by_links,
            by_scheme=dict(sent + received),
        )

    def accounts(self) -> dict[str, Any]:
        services = [each.service for each in self.parts]
        return merge_pairs([service.accounts() for service in services if service is not None])

    def replica_reports(self) -> list[ReplicaReport | None]:
        return [
            None if each.check is None else each.check.report(each.synchronizer.step)
            for each in self.parts
        ]

    def difference(self, figures: Sequence[WorkerFigures]) -> Difference | None:
        for number, each in enumerate(self.parts):
            reports = [
                (worker.rank, report)
                for worker in figures
                if (report := worker.replicas[number]) is not None
            ]
            if each.check is None or not reports:
                continue
            own, *others = reports
            if (found := each.check.find_at_end(own[1], others)) is not None:
                return found
        return None

    def plan_table(self) -> str:
        return as_tables([each.table() for each in self.parts])

    def close(self) -> None:
        for each in self.parts:
            each.close()
