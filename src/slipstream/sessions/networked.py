"""A job of several processes that exchange messages."""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, JobEnded, LaunchError, RuntimeFault, SlipstreamError
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.planning.choosing import ByTime
from slipstream.planning.table import as_tables, as_text
from slipstream.runtime.exchange.choices import layer_of
from slipstream.runtime.figures.replica_reports import Difference, ReplicaReport
from slipstream.runtime.figures.summary import Traffic, WorkerFigures, combine
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.store import connect_store
from slipstream.runtime.process.error_reporting import describe_error, failed_line, rank_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.sessions.collective_calls import CollectiveCalls
from slipstream.sessions.default_group import GroupStore, is_lost_connection, is_of_process_group
from slipstream.sessions.networked_weights import (
    LocalWeights,
    OwnWeights,
    Parts,
    Weights,
    WeightsAtServers,
)
from slipstream.sessions.protocol import Pair, Training, TrainingFigures, never_stepped
from slipstream.sessions.undistributed import Undistributed
from slipstream.strategy import Strategy
from slipstream.systems import call_of
from slipstream.torch.capture.other_steps import OtherSteps, why_not_by_others
from slipstream.torch.capture.outside_parameters import OutsideParameters
from slipstream.torch.capture.step_watch import StepWatch
from slipstream.torch.channels.link_store import LinkStore
from slipstream.torch.checkpoints.outer_weights import OuterState
from slipstream.torch.checkpoints.server_state import ServerState
from slipstream.torch.distribute.loading import load_job
from slipstream.torch.distribute.replica import Replica, SharedParts
from slipstream.torch.distribute.replicating import replicate
from slipstream.torch.distribute.saving import kept_averages
from slipstream.torch.modes.gossip import come_back
from slipstream.torch.tensors.inventory import whole_vector
from slipstream.torch.tensors.mean_weights import MeanWeights, by_name_of
from slipstream.types import Cluster

logger = logging.getLogger(__name__)


class NetworkedSession:
    """Implements ``Session`` for a member of a job."""

    def __init__(self, membership: Membership) -> None:
        log_event(
            logger,
            "joined",
            rank=membership.env.rank,
            size=membership.env.world_size,
            host=membership.host,
        )
        self.membership = membership
        self._calls = CollectiveCalls(membership)
        self._training: Training = Undistributed()
        self._shared: SharedParts | None = None
        self._replicas: tuple[Replica, ...] = ()
        self._opened = ExitStack()  # what watches the current training
        self._link_store = LinkStore(membership.gathering)  # torch does not keep Python's object
        self._groups = 0

    def broadcast(self, value: Any) -> Any:
        # Every rank waits for all: if one continued at once, a rank that has not called this yet
        # could see it train.
        return self._calls.gather("broadcast", value if self.membership.env.rank == 0 else None)[0]

    def group_store(self, backend: str) -> GroupStore:
        membership, self._groups = self.membership, self._groups + 1
        # Only gloo works with a store that is not torch's own.
        store: Any = self._link_store if backend == "gloo" else membership.rendezvous.store
        if store is None:
            store = connect_store(membership.env, membership.limits.start_s)
        store = distributed.PrefixStore(f"default_group/{self._groups}", store)
        return GroupStore(store, membership.host, membership.limits.wait_s)

    def gather(self, call: str, value: Any) -> list[Any]:
        return self._calls.gather(call, value)

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> Training:
        if (
            isinstance(strategy.method, SharedMemoryUpdates)
            and self.membership.env.launcher is not None
        ):
            raise on_one_machine_only(strategy)
        if self._shared is None:
            self._shared = SharedParts.of(self.membership, pairs[0])
        self._replicas = replicate(pairs, strategy, self._shared, self._replicas)
        trained = tuple(
            Pair(pair.model, replica.optimizer)
            for pair, replica in zip(pairs, self._replicas, strict=True)
        )
        parts = Parts(trained, self._replicas, self.membership, self._calls)
        self._training = NetworkedTraining(parts, strategy.name)
        self._opened.close()
        self._watch_steps(pairs, strategy)
        self._watch_outside(pairs)
        for pair, replica in zip(trained, self._replicas, strict=True):
            self._warn_of_momentum(strategy, pair.optimizer)
            self._warn_of_unused_rules(replica.plan)
        return self._training

    def _watch_steps(self, pairs: Sequence[Pair], strategy: Strategy) -> None:
        each = [replica.synchronizer for replica in self._replicas]
        trained = {p for one in each for p in one.inventory.trained.values()}
        optimizers = [replica.optimizer for replica in self._replicas]
        watch = StepWatch(
            trained if self.membership.env.rank == 0 else (),
            optimizers,
            stepped=lambda: any(one.ended or one.driver.exchanged for one in each),
            told=never_stepped(strategy, pairs=len(each), over=False),
        )
        self._opened.callback(watch.close)
        why = why_not_by_others(self._replicas[0].plan, call_of(strategy), pairs=len(pairs))
        if why:
            exchanged = [named for one in each for named in one.inventory.trained.items()]
            known = [*optimizers, *(pair.optimizer for pair in pairs)]
            self._opened.callback(OtherSteps(exchanged, known, why).close)

    def _watch_outside(self, pairs: Sequence[Pair]) -> None:
        exchanged = [t for one in self._replicas for t in one.synchronizer.inventory.tensors]
        known = [replica.optimizer for replica in self._replicas]
        outside = OutsideParameters(
            exchanged,
            [*known, *(pair.optimizer for pair in pairs)],
            is_first=self.membership.env.rank == 0,
        )
        self._opened.callback(outside.close)

    def _warn_of_momentum(self, strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
        momentum = max((group.get("momentum") or 0.0) for group in optimizer.param_groups)
        env = self.membership.env
        if env.rank == 0 and strategy.rounds.consistency.alone and momentum > 0.5:
            warnings.warn(
                f"{strategy.name} with momentum {momentum}: every one of {env.world_size} workers' "
                "gradients is applied by itself, on top of each other's momentum. Divide the "
                "learning rate by the number of workers and take momentum near 0",
                stacklevel=4,
            )

    def _warn_of_unused_rules(self, plan: Plan) -> None:
        for rule in plan.unused_rules if self.membership.env.rank == 0 else ():
            dtypes = sorted({spec.dtype for spec in plan.specs if spec.role == "parameter"})
            warnings.warn(
                f"no tensor takes the route {rule.routes()[0].scheme}, which is for float32 "
                f"parameters of {rule.where.numel} values or more (this model's are "
                f"{', '.join(dtypes)}): everything travels {plan.routes[plan.route_of[0]].scheme}",
                stacklevel=4,
            )

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        is_first = self.membership.env.rank == 0
        accounts = self._training.accounts() if is_first else {}
        others = self.membership.leave(figures.encode())
        if not is_first:
            return None
        each = [figures, *(WorkerFigures.decode(other) for other in others)]
        found = self._training.difference(each)
        difference = {} if found is None else {"difference": found._asdict()}
        return combine(each) | accounts | difference

    def fault_behind(self, error: BaseException) -> RuntimeFault | None:
        """A peer that fails closes torch's connections, too, and tells why over the job's links."""
        if not is_of_process_group(error):
            return None
        if is_lost_connection(error):
            grace_s = self.membership.limits.silence_s + 2
            self.membership.member.waiter.wait(lambda: False, grace_s)
        return self.membership.member.fault

    def abort(self, error: BaseException) -> None:
        # Rank 0 prints slipstream's own errors: see ``error_reporting``.
        reported = isinstance(error, SlipstreamError)
        where = failed_line(error.__traceback__)
        self.membership.member.abandon(describe_error(error), reported=reported, where=where)

    def reports(self, error: SlipstreamError) -> bool:
        return rank_reports(error, self.membership.env.rank)

    def close(self) -> None:
        self._opened.close()
        self.membership.member.stop()
        self.membership.close_store()
        for replica in self._replicas:
            replica.close()
        if self._shared is not None:
            self._shared.close()
        self.membership.member.fail(JobEnded())  # a loop that goes on has nothing to wait for


class NetworkedTraining(Training):
    """One worker's replicas of the models."""

    def __init__(self, parts: Parts, name: str) -> None:
        self.pairs, self.replicas, self.membership = parts.pairs, parts.replicas, parts.membership
        self.replica = self.replicas[0]
        self.plans = [replica.plan for replica in self.replicas]
        self._name, self._calls, self._parts = name, parts.calls, parts
        self._clocks = [clock_of(replica) for replica in self.replicas]
        self._clock = self._clocks[0]
        self._looping = not self.membership.env.incarnation
        self._back_at = 0
        if self.replica.join_coordinator is not None:
            self.replica.join_coordinator.standing = self._standing
        if self.membership.env.incarnation:
            self._come_back()
        self._weights = self._weights_of(parts)
        for replica in self.replicas:
            state = replica.state
            servers = state.servers if isinstance(state, OuterState) else state
            if isinstance(servers, ServerState):
                servers.meet = self._meet
        self._begin_checks()

    def _begin_checks(self) -> None:
        for replica in self.replicas:
            if replica.check is not None:
                replica.check.begin()

    def _meet(self, value: Any) -> list[Any]:
        """The values of all ranks, which load the same state."""
        return self._calls.gather("load_state_dict", value)

    def _weights_of(self, parts: Parts) -> Weights:
        channel = self.replica.partial
        if channel is not None:
            self._calls.poll = channel.poll
            self._calls.position = self._position
            if self.replica.consensus is not None:
                self.replica.consensus.meanwhile = channel.poll
            return OwnWeights(parts, channel, lambda: self.rejoined, self._back_at)
        if self.plan.delivers_every_result:
            return Weights(parts) if self.plan.local_steps is None else LocalWeights(parts)
        assert self.replica.service is not None
        return WeightsAtServers(
            parts, self.replica.service, lambda: [clock.resumed_at for clock in self._clocks]
        )

    # ---- steps

    @property
    def committed(self) -> int:
        return self._clock.committed

    @property
    def begun(self) -> bool:
        return any(replica.synchronizer.step for replica in self.replicas)

    @property
    def own_steps(self) -> int:
        return self.replica.synchronizer.step - self._clock.resumed_at

    @property
    def rejoined(self) -> bool:
        """Whether this worker was started again and has taken no step since. Collective calls
        before the end of this step were already made by the other workers."""
        return bool(self.membership.env.incarnation) and self.own_steps == self._back_at

    def next_step(self) -> int:
        return self._clock.next_step()

    def begin_step(self) -> None:
        self._looping = True

    def end_step(self, step: int) -> None:
        self._clock.end_step(step)

    def _position(self) -> str:
        """Calls of a restarted worker before its loop match the other workers' calls before
        theirs."""
        return f"/{self.committed if self._looping else self._clock.resumed_at}"

    # ---- a restarted worker

    def _standing(self) -> list[int]:
        """State that a restarted worker needs."""
        return [self._clock.resumed_at, self.replica.chain.sync]

    def _come_back(self) -> None:
        """Rejoin a job that has continued without this worker."""
        replica, env = self.replica, self.membership.env
        assert replica.partial is not None
        model = self.pairs[0].model
        welcome = come_back(model, self.plan, replica.partial, replica.chain, self.membership)
        self._clock.resumed_at = welcome.standing[0]
        replica.synchronizer.resume(self._clock.resumed_at + welcome.steps)
        self._back_at = self.own_steps
        if env.back_fd is not None:
            with os.fdopen(env.back_fd, "wb") as launcher:
                launcher.write(b".")

    # ---- weights

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with ExitStack() as stack:
            for replica in self.replicas:
                stack.enter_context(replica.synchronizer.accumulate())
            yield

    def leaving_during_backward(self, pair: int) -> AbstractContextManager[None]:
        if len(self.replicas) == 1:
            return nullcontext()
        return self.replicas[pair].synchronizer.leaving_during_backward()

    @contextmanager
    def keeping_apart(self, block: str) -> Iterator[None]:
        drivers = [replica.synchronizer.driver for replica in self.replicas]
        before = [driver.frozen_in for driver in drivers]
        with ExitStack() as stack:
            for replica in self.replicas:
                if replica.flat is not None:
                    stack.enter_context(replica.flat.keeping_apart())
            for driver in drivers:
                driver.frozen_in = block
            try:
                yield
            finally:
                for driver, earlier in zip(drivers, before, strict=True):
                    driver.frozen_in = earlier

    def ready(self, pair: int, tensor: int) -> None:
        self.replicas[pair].synchronizer.gradient_ready(tensor)

    def wait(self) -> None:
        self._parts.wait()

    def flush(self) -> None:
        if self.plan.local_steps is not None or self.replica.partial is not None:
            self.refuse_in_block("job.flush()")  # it gives all workers the same weights
        self._weights.flush()

    def lease(self, batches: int, returned: int) -> Batch:
        return self._weights.lease(batches, returned)

    def averages(self) -> list[dict[str, torch.Tensor]]:
        return [kept_averages(replica) for replica in self.replicas]

    def outer_weights(self) -> AbstractContextManager[None]:
        if self.plan.local_steps is None and self.plan.consistency.lockstep:
            return nullcontext()  # all workers have the same weights
        if self.plan.local_steps is None:
            raise ConfigError(
                f"{self._name} has no weights that all workers share: evaluate each worker's own, "
                "or those of job.save()"
            )
        found = [replica.outer for replica in self.replicas]
        return self._swapped(
            "job.outer_weights()", [outer.copies() for outer in found if outer is not None]
        )

    def mean_weights(self) -> MeanWeights:
        model = self.pairs[0].model
        mean, spread = whole_vector(model), 0.0
        if self.replica.consensus is not None and not self.rejoined:
            found, spread = self.replica.consensus.reach(mean.numpy())
            mean = torch.from_numpy(found)
        return MeanWeights(by_name_of(model, mean), spread)

    # ---- checkpoints

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        if not self.rejoined:
            steps = [clock.committed for clock in self._clocks]
            self._weights.save(path, steps, facts)

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """A restarted worker already has the other workers' weights, which are newer."""
        if self.rejoined:
            return
        if self.own_steps and not self._weights.loads_midway:
            raise ConfigError(f"with {self._name} job.load comes before the first step")
        self._weights.settle()
        occasion = self._calls.name("load")
        with self._calls.watched("job.load"):
            saved = load_job(
                path,
                occasion,
                self.pairs,
                self.replicas,
                self.membership,
                takes_nonfinite=takes_nonfinite,
            )
        for clock, replica, shared in zip(self._clocks, self.replicas, saved.shared, strict=True):
            clock.resumed_at = shared.step
            replica.synchronizer.resume(shared.step)
        self._weights.loaded(path, saved.facts, takes_nonfinite=takes_nonfinite)
        self._begin_checks()

    # ---- metrics

    def figures(self) -> TrainingFigures:
        transport = self.membership.transport
        return TrainingFigures(
            servers=max(replica.plan.cluster.servers for replica in self.replicas),
            traffic=self._traffic(),
            wait_s=sum(replica.synchronizer.driver.wait_s for replica in self.replicas),
            refused=self.membership.member.refused + sum(transport.refused.values()),
        )

    def _traffic(self) -> Traffic:
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for replica in self.replicas:
            out, back = replica.bytes()
            sent, received = sent + out, received + back
        transport = self.membership.transport
        moved = transport.sent + transport.received
        colocated = {peer for replica in self.replicas for peer in replica.shards.colocated}
        local = sum(moved[peer] for peer in colocated)
        by_links = sum(
            exchange.sent.total() + exchange.received.total()
            for replica in self.replicas
            for exchange in (*replica.link_exchanges, replica.partial)
            if exchange is not None
        )
        return Traffic(
            sent=sent.total(),
            received=received.total(),
            local=local,
            control=moved.total() - local - by_links,
            by_scheme=dict(sent + received),
        )

    def accounts(self) -> dict[str, Any]:
        return self._weights.accounts()

    def replica_reports(self) -> list[ReplicaReport | None]:
        return [
            None if replica.check is None else replica.check.report(replica.synchronizer.step)
            for replica in self.replicas
        ]

    def difference(self, figures: Sequence[WorkerFigures]) -> Difference | None:
        for number, replica in enumerate(self.replicas):
            reports = [
                (worker.rank, report)
                for worker in figures
                if (report := worker.replicas[number]) is not None
            ]
            if replica.check is None or not reports:
                continue
            own, *others = reports
            if (found := replica.check.find_at_end(own[1], others)) is not None:
                return found
        return None

    def plan_table(self) -> str:
        return as_tables([table_of(replica) for replica in self.replicas])

    def finish(self) -> None:
        each = [replica.synchronizer for replica in self.replicas]
        if any(one.never_left for one in each) and not any(one.ended for one in each):
            raise RuntimeFault(never_stepped(self.plan.strategy, pairs=len(each), over=True))
        self._weights.finish()


class StepClock:
    """This worker counts steps, because it makes every step.

    Attributes:
        resumed_at: the step of the checkpoint that the job began with.
    """

    def __init__(self, replica: Replica) -> None:
        self._synchronizer = replica.synchronizer
        self.resumed_at = 0

    @property
    def committed(self) -> int:
        """Steps completed."""
        return self._synchronizer.step

    def next_step(self) -> int:
        """The number of the next step."""
        return self._synchronizer.step

    def end_step(self, step: int) -> None:
        """Raise RuntimeFault if the step was never made."""
        if self._synchronizer.step == step:
            raise RuntimeFault(f"step {step} of job.steps ended without optimizer.step()")


class RoundClock:
    """The servers count rounds, and this worker may miss some.

    Attributes:
        resumed_at: the step of the checkpoint that the job began with.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica, self._steps_a_round = replica, replica.plan.steps_a_round
        self.resumed_at = 0

    @property
    def committed(self) -> int:
        """Rounds committed, in steps, and this worker's steps since."""
        return self._step_in(self._replica.round)

    def next_step(self) -> int:
        """The next step of the round that is open; waits to learn which that is."""
        return self._step_in(self._replica.open_round())

    def _step_in(self, round_: int) -> int:
        per_round = self._steps_a_round
        begun = self.resumed_at // per_round * per_round  # a checkpoint may be within a round
        return begun + round_ * per_round + self._replica.synchronizer.step % per_round

    def end_step(self, step: int) -> None:
        """Nothing to check: a worker may miss rounds."""


def table_of(replica: Replica) -> str:
    """The plan of one pair as text, with the choices of its layers."""
    choices = None if replica.compact is None else replica.compact.choices
    link = link_of(replica.plan.cluster)
    if choices is None:
        return as_text(replica.plan.rows(replica.plan.verdicts(0, None)), link)
    names = [layer_of(unit).name for unit in choices.units]
    verdicts = dict(zip(names, choices.verdicts, strict=False))
    speeds = choices.chooser.speeds if isinstance(choices.chooser, ByTime) else None
    return as_text(replica.plan.rows(verdicts, speeds), link)


def link_of(cluster: Cluster) -> str:
    """Whose traffic the table shows."""
    if not cluster.members:
        return "a worker's link"
    return f"a host's link ({cluster.workers} hosts; the workers of each aggregate first)"


def clock_of(replica: Replica) -> StepClock | RoundClock:
    """Rounds are counted by servers where a worker may miss some."""
    return RoundClock(replica) if replica.plan.counts_rounds else StepClock(replica)


def on_one_machine_only(strategy: Strategy) -> LaunchError:
    """The error for ``slipstream run`` with options that spread a job over hosts."""
    return LaunchError(
        f"{strategy.name}: learners share the memory of one machine, and have a server of their "
        "own: leave out --lab and --servers"
    )
