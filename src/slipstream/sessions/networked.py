"""A job of several processes that exchange messages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed

from slipstream.errors import JobEnded, LaunchError, RuntimeFault, SlipstreamError
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.runtime.exchange.consensus import Consensus
from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.figures.summary import WorkerFigures, combine
from slipstream.runtime.members.collective_calls import CollectiveCalls
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.store import connect_store
from slipstream.runtime.process.error_reporting import describe_error, failed_line, rank_reports
from slipstream.runtime.process.event_log import log_event
from slipstream.runtime.servers.shards import Shards
from slipstream.sessions.default_group import GroupStore, is_lost_connection, is_of_process_group
from slipstream.strategy import Strategy
from slipstream.systems import call_of
from slipstream.torch.capture.other_steps import OtherSteps, why_not_by_others
from slipstream.torch.capture.outside_parameters import OutsideParameters
from slipstream.torch.capture.step_watch import StepWatch, never_stepped
from slipstream.torch.channels.link_store import LinkStore
from slipstream.torch.distribute.setup import set_up
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.torch.modes.pair_setup import SharedParts
from slipstream.torch.modes.undistributed import Undistributed
from slipstream.torch.tensors.inventory import whole_vector
from slipstream.torch.tensors.pairs import Pair

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
        self._mode: NetworkedMode | None = None
        self._shared: SharedParts | None = None
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

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> TrainingMode:
        if (
            isinstance(strategy.method, SharedMemoryUpdates)
            and self.membership.env.launcher is not None
        ):
            raise on_one_machine_only(strategy)
        if self._shared is None:
            self._shared = self._shared_parts(pairs[0])
        before = () if self._mode is None else self._mode.parts
        self._mode = mode = set_up(pairs, strategy, call_of(strategy), self._shared, before)
        self._opened.close()
        self._watch_steps(mode, pairs, strategy)
        self._watch_outside(mode, pairs)
        for each in mode.parts:
            self._warn_of_momentum(strategy, each.optimizer)
            self._warn_of_unused_rules(each.plan)
        return mode

    def _shared_parts(self, first: Pair) -> SharedParts:
        """Make what all pairs share; ``job.consensus`` averages the first one's weights."""
        env, member = self.membership.env, self.membership.member
        limit_s = self.membership.limits.wait_s
        transfer, numel = Transfer(member), len(whole_vector(first.model))
        chain = StateChain(env.rank, env.world_size, transfer, limit_s)
        consensus = Consensus(env.rank, env.world_size, transfer, numel, limit_s)
        return SharedParts(self.membership, Shards(), transfer, chain, consensus, self._calls)

    def _watch_steps(self, mode: NetworkedMode, pairs: Sequence[Pair], strategy: Strategy) -> None:
        each = [parts.synchronizer for parts in mode.parts]
        trained = {p for one in each for p in one.inventory.trained.values()}
        optimizers = [parts.optimizer for parts in mode.parts]
        watch = StepWatch(
            trained if self.membership.env.rank == 0 else (),
            optimizers,
            stepped=lambda: any(one.ended or one.driver.exchanged for one in each),
            told=never_stepped(call_of(strategy), pairs=len(each), over=False),
        )
        self._opened.callback(watch.close)
        why = why_not_by_others(mode.plans[0], call_of(strategy), pairs=len(pairs))
        if why:
            exchanged = [named for one in each for named in one.inventory.trained.items()]
            known = [*optimizers, *(pair.optimizer for pair in pairs)]
            self._opened.callback(OtherSteps(exchanged, known, why).close)

    def _watch_outside(self, mode: NetworkedMode, pairs: Sequence[Pair]) -> None:
        exchanged = [t for each in mode.parts for t in each.synchronizer.inventory.tensors]
        known = [each.optimizer for each in mode.parts]
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
        mode = self._mode or Undistributed()
        accounts = mode.accounts() if is_first else {}
        others = self.membership.leave(figures.encode())
        if not is_first:
            return None
        each = [figures, *(WorkerFigures.decode(other) for other in others)]
        found = mode.difference(each)
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
        if self._mode is not None:
            self._mode.close()
        if self._shared is not None:
            self._shared.close()
        self.membership.member.fail(JobEnded())  # a loop that goes on has nothing to wait for


def on_one_machine_only(strategy: Strategy) -> LaunchError:
    """The error for ``slipstream run`` with options that spread a job over hosts."""
    return LaunchError(
        f"{strategy.name}: learners share the memory of one machine, and have a server of their "
        "own: leave out --lab and --servers"
    )
