"""A whole job in one thread, on virtual time, in an order that a seed decides.

The workers' exchanges, the servers and their holders are the runtime's own objects; only threads,
sockets and the clock are simulated. The same seed gives the same run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream._native import mean_into
from slipstream.errors import ConfigError
from slipstream.plan import Plan
from slipstream.runtime.servers.accounts import ServerFigures
from slipstream.strategy import Strategy
from slipstream.testing.cluster import Stage
from slipstream.testing.layers import Rows, whole_numbers
from slipstream.testing.members import Event, Owed, Tensors
from slipstream.testing.worker import Conduct, Contribute, Step, Worker
from slipstream.types import Cluster, OptimizerRecipe, Spec, Values

SLOW = 0.05  # the speed of a slow worker relative to the others


@dataclass(frozen=True)
class Simulation:
    """The record of a simulation."""

    plan: Plan
    steps: tuple[tuple[Step, ...], ...]  # by rank
    updates: tuple[tuple[Tensors, ...], ...]  # by rank: applied updates, where it runs ahead
    final: tuple[Tensors, ...]  # by rank: its tensors at the end
    held: Tensors  # weights at the servers at the end, if these update
    owed: tuple[Owed, ...]  # by rank: what codecs still hold back, by tensor
    owed_back: Owed  # the same of results, at servers or workers that hold
    figures: tuple[ServerFigures, ...]  # by server
    trace: tuple[Event, ...]
    max_spread: int  # most rounds between the fastest and the slowest worker
    sent: tuple[Counter[str], ...]  # by rank: payload bytes by scheme
    received: tuple[Counter[str], ...]
    refused: int
    virtual_s: float

    @property
    def contributions(self) -> tuple[tuple[Tensors, ...], ...]:
        """The contributions by round, then by rank, if all workers make every round."""
        return tuple(zip(*([s.given for s in steps] for steps in self.steps), strict=True))

    @property
    def results(self) -> tuple[tuple[Tensors, ...], ...]:
        """The results by round, then by rank, if all workers make every round."""
        had = [[step.had for step in steps] for steps in self.steps]
        after = [[*own[1:], last] for own, last in zip(had, self.final, strict=True)]
        return tuple(zip(*after, strict=True))


def simulate(
    strategy: Strategy,
    specs: Sequence[Spec],
    *,
    workers: int,
    servers: int = 0,
    rounds: int = 3,
    seed: int = 0,
    contribute: Contribute | None = None,
    slow: int | None = None,
    conduct: Mapping[int, Conduct] | None = None,
    optimizer: OptimizerRecipe | None = None,
    rows: Rows | None = None,
) -> Simulation:
    """Train ``rounds`` rounds over links that deliver in an order decided by ``seed``.

    Args:
        strategy: The strategy; all of its routes must be over links.
        specs: The model's tensors.
        workers: The number of workers.
        servers: The number of servers.
        rounds: The number of rounds.
        seed: The seed of contributions, and of the order in which members act and messages arrive.
        contribute: A worker's contribution, by rank, round and tensor; by default normal numbers.
        slow: The rank of a worker that acts seldom.
        conduct: By rank, how a worker differs from the others.
        optimizer: The optimizer of servers that update, on weights that begin at zero. An outer
            optimizer at servers is the strategy's own.
        rows: Workers' matrices of layers that are sent in compact form; by default small
            integers.

    Returns:
        The record of the simulation.

    Raises:
        ConfigError: The strategy is refused, or cannot be simulated.

    >>> from slipstream import push_pull
    >>> specs = [Spec("w", (4,), "float32", 0)]
    >>> run = simulate(push_pull(), specs, workers=2, servers=1, rounds=3)
    >>> len(run.results), run.final[0] == run.final[1]
    (3, True)
    """
    plan = strategy.plan(specs, Cluster(workers, servers))
    if len(plan.over_links()) < len(plan.units) or plan.partial_exchange is not None:
        raise ConfigError(f"{strategy.name}: only rounds over links can be simulated")
    contributor = contribute or normal(specs, seed)
    conducts = [(conduct or {}).get(rank, Conduct()) for rank in range(workers)]
    if slow is not None and slow < workers:
        conducts[slow] = replace(conducts[slow], speed=SLOW)
    stage = Stage(plan, seed, optimizer)
    shared = (stage, rounds, contributor)
    of_layers = rows or whole_numbers(seed)
    cast = [Worker(rank, *shared, conducts[rank], of_layers) for rank in range(workers)]
    return outcome(stage, cast, stage.play(cast))


def outcome(stage: Stage, cast: Sequence[Worker], spread: int) -> Simulation:
    """Return the members' state at the end."""
    return Simulation(
        plan=stage.plan,
        steps=tuple(tuple(worker.steps) for worker in cast),
        updates=tuple(tuple(worker.updates) for worker in cast),
        owed=tuple(worker.owed() for worker in cast),
        owed_back=stage.owed_back(cast),
        final=tuple(worker.last() for worker in cast),
        held=stage.held(),
        figures=tuple(stage.figures()),
        trace=tuple(stage.trace),
        max_spread=spread,
        sent=tuple(worker.exchange.sent for worker in cast),
        received=tuple(worker.exchange.received for worker in cast),
        refused=sum(member.refused for member in stage.members.values()),
        virtual_s=stage.clock.now,
    )


def normal(specs: Sequence[Spec], seed: int) -> Contribute:
    """Let every worker contribute to every tensor, with new random numbers each time."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        spec = specs[tensor]
        numbers = np.random.default_rng((seed, rank, round_, tensor)).normal(size=spec.numel)
        out = Values.empty(spec.numel, spec.dtype)
        mean_into(out.data, [numbers], "float64", 1.0, out_dtype=spec.dtype)
        return out.data.tobytes()

    return contribute
