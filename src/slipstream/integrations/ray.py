"""slipstream on Ray: ``run`` on actors of a placement group; ``SlipstreamConfig`` for Ray Train.

Ray places the workers and shows their output. Needs Ray 2.51 or later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.errors import (
    ConfigError,
    LaunchError,
    LeftBehind,
    PeerFailed,
    PeerLost,
    RuntimeFault,
    SlipstreamError,
)
from slipstream.runtime.event_log import log_event
from slipstream.runtime.launch.supervision import (
    EXIT_PEER_FAILED,
    CameBack,
    Ended,
    Limits,
    Supervision,
)
from slipstream.strategy import Strategy

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"slipstream.integrations.ray needs Ray ({missing}): pip install 'slipstream[ray]'"
    ) from missing

from slipstream.integrations.ray_workers import (
    Outcome,
    Returns,
    Worker,
    checked,
    environments,
    refuse_learners,
    settings_of,
)

if TYPE_CHECKING:
    from slipstream.integrations.ray_train import SlipstreamConfig as SlipstreamConfig

__all__ = ["SlipstreamConfig", "run"]

logger = logging.getLogger(__name__)
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
OLDEST = (2, 51)
START_S = 120.0  # for Ray to start the actors' processes
KILL_S = 10.0  # for killed actors to end
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # of an actor


def require_version(found: str) -> None:
    """Raises ImportError if Ray is too old."""
    numbers = [int(part) for part in found.split(".")[:2] if part.isdecimal()]
    if tuple(numbers) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"slipstream.integrations.ray needs Ray {wanted} or later, and this is {found}: "
            "pip install --upgrade 'slipstream[ray]'"
        )


require_version(ray.__version__)


def __getattr__(name: str) -> Any:
    # Importing Ray Train takes seconds, which workers of ``run`` need not spend.
    if name == "SlipstreamConfig":
        from slipstream.integrations.ray_train import SlipstreamConfig

        return SlipstreamConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run(
    fn: Callable[[], Any],
    *,
    workers: int,
    strategy: Strategy | str | None = None,
    resources: Mapping[str, float] | None = None,
    placement: str = "PACK",
    restarts: int | None = None,
    place_limit_s: float = 60.0,
) -> list[Any]:
    """Train on Ray: call ``fn`` once on each of ``workers`` actors, and wait for all.

    ``fn`` takes no argument and has the two lines: ``slipstream.init`` and ``job.distribute``. All
    actors have ended when ``run`` returns or raises, also after Ctrl-C.

    Args:
        workers: how many.
        strategy: by default the one that ``fn`` names, else ``push_pull``.
        resources: of each worker, by default ``{"CPU": 1}``.
        placement: Ray's strategy for the placement group: PACK, SPREAD, STRICT_PACK or
            STRICT_SPREAD.
        restarts: how many workers that died are started again in all. Only with ``ako``, where
            they rejoin the training; if ``strategy`` is ``ako``, ``workers`` by default, else 0.
        place_limit_s: how long to wait until the cluster has the resources.

    Returns:
        The results of ``fn``, by rank; None of a worker that was started again too late to rejoin.

    Raises:
        ConfigError: an argument is invalid, and nothing was started.
        LaunchError: the cluster has no place for the workers, or cannot start them.
        PeerFailed: a worker's process or node died.
        Exception: the first error that a worker raised.
    """
    chosen = checked(strategy)
    bundle = _checked_arguments(fn, workers, resources, placement, place_limit_s)
    if workers > 1:
        refuse_learners(chosen)
    again = _checked_restarts(restarts, workers, chosen)
    if not ray.is_initialized():
        ray.init()
    sent = _sent(fn)
    with _placed(workers, bundle, placement, place_limit_s) as group:
        job = _Job(group, bundle, sent, settings_of(chosen), again)
        try:
            job.start(workers)
            return job.results()
        finally:
            job.end()


def _checked_arguments(
    fn: object,
    workers: object,
    resources: Mapping[str, float] | None,
    placement: str,
    place_limit_s: float,
) -> dict[str, float]:
    """The bundle of one worker; raises ConfigError."""
    if not callable(fn):
        raise ConfigError(f"run takes a function without arguments; it was given {fn!r}")
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers={workers!r}: give a whole number, 1 or more")
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement={placement!r}: choose one of {', '.join(PLACEMENTS)}")
    if not place_limit_s > 0:
        raise ConfigError(f"place_limit_s={place_limit_s!r}: give seconds, more than 0")
    bundle = {"CPU": 1.0} if resources is None else dict(resources)
    for name, amount in bundle.items():
        if not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise ConfigError(f"resources: {name}={amount!r} of each worker has to be above 0")
    if not bundle:
        raise ConfigError("resources are empty: give at least one, such as {'CPU': 1}")
    return bundle


def _checked_restarts(restarts: int | None, workers: int, strategy: Strategy | None) -> int:
    """How many restarts there may be; raises ConfigError."""
    rejoins = strategy is not None and strategy.rotation is not None
    if restarts is None:
        return workers if rejoins else 0
    if type(restarts) is not int or restarts < 0:
        raise ConfigError(f"restarts={restarts!r}: give a whole number, 0 or more")
    if restarts and strategy is not None and not rejoins:
        raise ConfigError(
            f"restarts={restarts}: a worker of {strategy.name} cannot rejoin a job that goes on; "
            "use ako, or resume from job.save with Ray Train's FailureConfig"
        )
    return restarts


def _sent(fn: Callable[[], Any]) -> Any:
    """The function in Ray's object store; raises ConfigError."""
    try:
        return ray.put(fn)
    except TypeError as error:
        raise ConfigError(f"{fn!r} cannot be sent to workers: {error}") from error


@contextmanager
def _placed(
    workers: int, bundle: Mapping[str, float], placement: str, limit_s: float
) -> Iterator[Any]:
    """A placement group with a bundle for each worker; raises LaunchError."""
    group = placement_group([dict(bundle)] * workers, strategy=placement)
    try:
        if not group.wait(limit_s):
            raise LaunchError(_no_place(workers, bundle, placement, limit_s))
        yield group
    finally:
        remove_placement_group(group)


def _no_place(workers: int, bundle: Mapping[str, float], placement: str, limit_s: float) -> str:
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
class _Failure:
    """An error that ended a worker; ``code`` is as of a process that ``slipstream run`` started."""

    rank: int
    error: Exception
    where: str
    code: int


@dataclass(slots=True, repr=False)  # it has the secret
class _Job:
    """The actors of a job and how they end.

    Args:
        settings: variables that are the same on all workers.
        restarts: how many workers may be started again.
    """

    group: Any
    bundle: Mapping[str, float]
    fn: Any
    settings: Mapping[str, str]
    restarts: int
    actors: list[Any] = field(default_factory=list)  # by rank
    bundles: list[int] = field(default_factory=list)  # by rank
    told: list[dict[str, str]] = field(default_factory=list)  # by rank
    ranks: dict[Any, int] = field(default_factory=dict)  # by the reference of a call
    failures: list[_Failure] = field(default_factory=list)
    tolerated: list[_Failure] = field(default_factory=list)  # of workers that were started again
    killed: set[int] = field(default_factory=set)  # ranks that took too long to end
    kind: Any = None
    returns: Any = None

    def start(self, workers: int) -> None:
        """Start the actors, and call the function on each."""
        self.kind = ray.remote(Worker)
        self.actors = [self._actor(index) for index in range(workers)]
        nodes = self._ask([actor.node.remote() for actor in self.actors])
        # Ranks of one node follow each other.
        order = sorted(range(workers), key=lambda index: nodes.index(nodes[index]))
        self.actors, self.bundles = [self.actors[index] for index in order], order
        address = self._ask([self.actors[0].listen.remote(len(set(nodes)) == 1)])[0]
        self.told = environments([nodes[index] for index in order], address, self.settings)
        for rank in range(workers):
            self._call(rank)

    def _actor(self, index: int) -> Any:
        options: dict[str, Any] = {OPTIONS[k]: v for k, v in self.bundle.items() if k in OPTIONS}
        others = {k: v for k, v in self.bundle.items() if k not in OPTIONS}
        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        options = {"num_cpus": 0} | options | {"resources": others, "scheduling_strategy": where}
        return self.kind.options(**options).remote()

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
        call = self.actors[rank].train.remote(self.fn, self.told[rank], self.returns)
        self.ranks[call] = rank

    # ---- until all have ended

    def results(self) -> list[Any]:
        """Wait for all workers; raises the error that ended the job."""
        found: dict[int, Any] = {}
        watch = Supervision(Limits(), time.monotonic, restarts=self.restarts)
        for rank in self.ranks.values():
            watch.started(f"rank {rank}")
        while watch.running:
            left_s = min(1.0, max(0.0, watch.deadline - time.monotonic()))
            for call in ray.wait(list(self.ranks), timeout=left_s)[0]:
                self._take(watch, self._ended(call, found))
            if time.monotonic() >= watch.deadline and watch.escalate() is not None:
                self._kill(_rank_of(name) for name in watch.to_signal)
        if watch.verdict().code:
            raise self._cause()
        return [found.get(rank) for rank in range(len(self.actors))]

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            log_event(logger, "stopped", level=logging.WARNING, rank=rank)
            self.killed.add(rank)
            ray.kill(self.actors[rank])

    def _ended(self, call: Any, found: dict[int, Any]) -> Ended:
        rank = self.ranks.pop(call)
        try:
            outcome: Outcome = ray.get(call)
        except RayActorError as error:
            failure = _Failure(rank, PeerFailed(f"rank {rank}", _death(error)), "", -9)
        except RayError as error:
            lost = f"rank {rank} cannot read its function or send its result: {error}"
            failure = _Failure(rank, RuntimeFault(lost), "", 1)
        else:
            if outcome.error is None:
                found[rank] = outcome.result
                return Ended(f"rank {rank}", 0)
            secondary = isinstance(outcome.error, PeerLost | PeerFailed | LeftBehind)
            code = EXIT_PEER_FAILED if secondary else 1
            failure = _Failure(rank, outcome.error, outcome.where, code)
        if rank not in self.killed:
            self.failures.append(failure)
            log_event(logger, "worker_ended", rank=rank, error=str(failure.error))
        return Ended(f"rank {rank}", failure.code)

    def _take(self, watch: Supervision, ended: Ended) -> None:
        if self.returns is not None and ended.member == watch.leader:
            for rank in ray.get(self.returns.back.remote(), timeout=START_S):
                watch.take(CameBack(f"rank {rank}"))
        before = len(watch.replaced)
        watch.take(ended)
        for lost in watch.replaced[before:]:
            self.tolerated.append(self.failures.pop())
            incarnation = sum(other.member == lost.member for other in watch.replaced)
            watch.started(lost.member)
            self._start_again(_rank_of(lost.member), incarnation)

    def _start_again(self, rank: int, incarnation: int) -> None:
        """Start a worker again in its bundle, which Ray moves if its node has died."""
        level = logging.WARNING
        log_event(logger, "started_again", level=level, rank=rank, incarnation=incarnation)
        if self.returns is None:
            # If this node dies, the driver does, too.
            here = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            options = {"num_cpus": 0, "scheduling_strategy": here}
            self.returns = ray.remote(Returns).options(**options).remote()
        self.actors[rank] = self._actor(self.bundles[rank])
        self.told[rank]["SLIPSTREAM_INCARNATION"] = str(incarnation)
        self._call(rank)

    def _cause(self) -> Exception:
        """The first error that no other worker caused, with the place where it was raised."""
        causes = [failure for failure in self.failures if failure.code != EXIT_PEER_FAILED]
        first = (causes or self.tolerated[-1:] or self.failures)[0]
        if first.where:
            first.error.add_note(f"rank {first.rank}: {first.where}")
        return first.error

    def end(self) -> None:
        """End all actors."""
        for actor in (*self.actors, *([self.returns] if self.returns is not None else [])):
            ray.kill(actor)
        if self.ranks:
            ray.wait(list(self.ranks), num_returns=len(self.ranks), timeout=KILL_S)


def _rank_of(member: str) -> int:
    return int(member.removeprefix("rank "))


def _death(error: RayActorError) -> str:
    """Ray's last line about an actor that died."""
    reason = str(error).strip().splitlines()[-1].split(" Some common causes")[0]
    return f"its process or its node died ({reason})"
