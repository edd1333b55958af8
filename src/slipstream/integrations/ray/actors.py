"""The actors of a job on Ray: their placement, their start and their end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from slipstream.errors import (
    EXIT_PEER_FAILED,
    LaunchError,
    PeerFailed,
    RuntimeFault,
    SlipstreamError,
)
from slipstream.integrations.ray.workers import (
    CAUSED,
    Outcome,
    Returns,
    Worker,
    environments,
    listen,
    node_id,
    run_exit_handlers,
    train,
)
from slipstream.runtime.launch.supervision import CameBack, Ended, Limits, Supervision
from slipstream.runtime.process.event_log import log_event

logger = logging.getLogger(__name__)
START_S = 120.0  # for Ray to start the actors' processes
LEAVE_S = 10.0  # for exit handlers of workers whose function has ended
KILL_S = 10.0  # for killed actors to end
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # of an actor


@contextmanager
def placed(
    workers: int, bundle: Mapping[str, float], placement: str, limit_s: float
) -> Iterator[Any]:
    """Create a placement group with a bundle for each worker; raise LaunchError if it fails."""
    group = placement_group([dict(bundle)] * workers, strategy=placement)
    try:
        if not group.wait(limit_s):
            raise LaunchError(no_place(workers, bundle, placement, limit_s))
        yield group
    finally:
        remove_placement_group(group)


def no_place(workers: int, bundle: Mapping[str, float], placement: str, limit_s: float) -> str:
    totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = [int(min(total.get(k, 0) / v for k, v in bundle.items())) for total in totals]
    room = {
        "STRICT_PACK": max(fits, default=0),
        "STRICT_SPREAD": sum(fit > 0 for fit in fits),
    }.get(placement, sum(fits))
    each = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    if room < workers:
        why = f"its {len(totals)} nodes have room for {room} even when idle"
    else:
        why = "others use its resources now"
    return (
        f"no place for {workers} workers with {each} each ({placement}) within {limit_s:g} s: the "
        f"cluster is too small or busy; {why}. Ask for fewer workers or resources, or add nodes"
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that ended a worker; ``code`` is that of a process of ``slipstream run``."""

    rank: int
    error: Exception
    where: str
    code: int


@dataclass(slots=True, repr=False)  # it has the secret
class ActorJob:
    """The actors of a job, from their start to their end.

    Args:
        settings: Variables that are the same on all workers.
        restarts: The number of workers that may be started again.
    """

    group: Any
    bundle: Mapping[str, float]
    fn: Any
    settings: Mapping[str, str]
    restarts: int
    actors: list[Any] = field(default_factory=list)  # by rank
    bundles: list[int] = field(default_factory=list)  # by rank
    variables: list[dict[str, str]] = field(default_factory=list)  # by rank
    ranks: dict[Any, int] = field(default_factory=dict)  # by the reference of a call
    failures: list[Failure] = field(default_factory=list)
    tolerated: list[Failure] = field(default_factory=list)  # of workers that were started again
    killed: set[int] = field(default_factory=set)  # ranks that took too long to end
    over: list[Any] = field(default_factory=list)  # actors whose function has ended
    returns: Any = None

    def start(self, workers: int) -> None:
        """Start the actors, and call the function on each."""
        self.actors = [self._actor(index) for index in range(workers)]
        nodes = self._ask([actor.call.remote(node_id) for actor in self.actors])
        # Ranks of one node follow each other.
        order = sorted(range(workers), key=lambda index: nodes.index(nodes[index]))
        self.actors, self.bundles = [self.actors[index] for index in order], order
        address = self._ask([self.actors[0].call.remote(listen, len(set(nodes)) == 1)])[0]
        self.variables = environments([nodes[index] for index in order], address, self.settings)
        for rank in range(workers):
            self._call(rank)

    def _actor(self, index: int) -> Any:
        options: dict[str, Any] = {OPTIONS[k]: v for k, v in self.bundle.items() if k in OPTIONS}
        others = {k: v for k, v in self.bundle.items() if k not in OPTIONS}
        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options = {"num_cpus": 0} | options | {"resources": others, "scheduling_strategy": where}
        return ray.remote(Worker).options(**options).remote()

    def _ask(self, references: Sequence[Any]) -> list[Any]:
        try:
            return list(ray.get(list(references), timeout=START_S))
        except GetTimeoutError as error:
            raise LaunchError(
                f"Ray has not started all workers within {START_S:g} s; `ray status` and the logs "
                "of its nodes may show why"
            ) from error
        except SlipstreamError:
            raise
        except RayError as error:
            raise LaunchError(
                f"a worker cannot start: {error}\nCheck that every node has the same slipstream "
                "and torch"
            ) from error

    def _call(self, rank: int) -> None:
        call = self.actors[rank].call.remote(train, self.fn, self.variables[rank], self.returns)
        self.ranks[call] = rank

    # ---- until all have ended

    def results(self) -> list[Any]:
        """Wait for all workers and return their results; raise the error that ended the job."""
        results: dict[int, Any] = {}
        watch = Supervision(Limits(), time.monotonic, restarts=self.restarts)
        for rank in self.ranks.values():
            watch.started(f"rank {rank}")
        while watch.running:
            left_s = min(1.0, max(0.0, watch.deadline - time.monotonic()))
            for call in ray.wait(list(self.ranks), timeout=left_s)[0]:
                self._take(watch, self._ended(call, results))
            if time.monotonic() >= watch.deadline and watch.escalate() is not None:
                self._kill(rank_of(name) for name in watch.to_signal)
        if watch.verdict().code:
            raise self._cause()
        return [results.get(rank) for rank in range(len(self.actors))]

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            log_event(logger, "stopped", level=logging.WARNING, rank=rank)
            self.killed.add(rank)
            ray.kill(self.actors[rank])

    def _ended(self, call: Any, results: dict[int, Any]) -> Ended:
        rank = self.ranks.pop(call)
        try:
            outcome: Outcome = ray.get(call)
        except RayActorError as error:
            failure = Failure(rank, PeerFailed(f"rank {rank}", reason_of_death(error)), "", -9)
        except RayError as error:
            lost = f"rank {rank} cannot read its function or send its result: {error}"
            failure = Failure(rank, RuntimeFault(lost), "", 1)
        else:
            self.over.append(self.actors[rank])
            if outcome.error is None:
                results[rank] = outcome.result
                return Ended(f"rank {rank}", 0)
            secondary = isinstance(outcome.error, CAUSED)
            code = EXIT_PEER_FAILED if secondary else 1
            failure = Failure(rank, outcome.error, outcome.where, code)
        if rank not in self.killed:
            self.failures.append(failure)
            log_event(logger, "worker_ended", rank=rank, error=str(failure.error))
        return Ended(f"rank {rank}", failure.code)

    def _take(self, watch: Supervision, ended: Ended) -> None:
        if self.returns is not None and ended.member == watch.leader:
            for rank in self._rejoined_ranks():
                watch.take(CameBack(f"rank {rank}"))
        before = len(watch.replaced)
        watch.take(ended)
        for lost in watch.replaced[before:]:
            self.tolerated.append(self.failures.pop())
            incarnation = sum(other.member == lost.member for other in watch.replaced)
            watch.started(lost.member)
            self._start_again(rank_of(lost.member), incarnation)

    def _rejoined_ranks(self) -> list[int]:
        """Return the ranks that have rejoined; if this is unknown, all that were started again."""
        try:
            return list(ray.get(self.returns.back.remote(), timeout=KILL_S))
        except RayError:
            return []

    def _start_again(self, rank: int, incarnation: int) -> None:
        """Start a worker again in its bundle, which Ray moves if its node has died."""
        level = logging.WARNING
        log_event(logger, "started_again", level=level, rank=rank, incarnation=incarnation)
        if self.returns is None:
            # This node, since the driver dies with it.
            this_node = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            options = {"num_cpus": 0, "scheduling_strategy": this_node}
            self.returns = ray.remote(Returns).options(**options).remote()
        ray.kill(self.actors[rank])  # it may be alive, but unreachable
        self.actors[rank] = self._actor(self.bundles[rank])
        self.variables[rank]["SLIPSTREAM_INCARNATION"] = str(incarnation)
        self._call(rank)

    def _cause(self) -> Exception:
        """Return the first error that no other worker caused, with the line that raised it."""
        causes = [failure for failure in self.failures if failure.code != EXIT_PEER_FAILED]
        first = (causes or self.tolerated[-1:] or self.failures)[0]
        if first.where:
            first.error.add_note(f"rank {first.rank}: {first.where}")
        return first.error

    def end(self) -> None:
        """End all actors; those whose function has ended run their exit handlers first."""
        try:
            leaving = [actor.call.remote(run_exit_handlers) for actor in self.over]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        finally:  # also after Ctrl-C
            for actor in (*self.actors, *([self.returns] if self.returns is not None else [])):
                ray.kill(actor)
        if self.ranks:
            ray.wait(list(self.ranks), num_returns=len(self.ranks), timeout=KILL_S)


def rank_of(member: str) -> int:
    return int(member.removeprefix("rank "))


def reason_of_death(error: RayActorError) -> str:
    """Return Ray's last line about an actor that died."""
    reason = str(error).strip().splitlines()[-1].split(" Some common causes")[0]
    if isinstance(error, ActorUnavailableError):
        return f"its process or its node cannot be reached ({reason})"
    return f"its process or its node died ({reason})"
