"""Parameter Flow (Huawei): send updates only, hold back small ones, broadcast along trees.

- Topology: sharded servers; they send results to every worker directly (a star) or along one
  tree per shard, in which workers forward blocks as they arrive.
- Consistency: rounds of all n workers (UCC-BSP); with ``staleness`` s, a worker begins clock c only
  with the updates of all workers up to clock c − s − 1, and Uᵗ also holds what faster workers have
  pushed since (UCC-SSP). All workers apply the same sequence of U.
- What is sent: of fp32 weights the entries above a bound δᵗ, both ways (DVF); everything else
  dense. The rest stays in a residual, one per link, and is never lost.
- When: as each layer's backward ends; with ``payload="update"`` after the optimizer's own step.
- Update: at the worker. Weights are not sent after the start.

    a = u + r;  sent = a where not |a| ≤ δᵗ, else 0;  r ← a − sent      at worker p, towards a shard
    ā = (Σₚ sentₚ) / n + r̄;  U = ā where not |ā| ≤ δ̄ᵗ, else 0;  r̄ ← ā − U      at the shard
    W ← F(W, U)                                                    at every worker, F its optimizer

Deviations: U is the mean, not the sum, so that learning rates have their usual meaning.
δᵗ = δ·lrₜ/lr₀, since the paper's δ/√t lets traffic grow several times over a run for little gain
(``decay="root"`` selects it). A shard's δ̄ is δ/√n: the mean of n updates is that much smaller, and
the same bound both ways would hold back most of what workers sent. Servers keep no
copy of the weights: every worker that applies every U has them.

References:
    Future Network Theory Lab, Huawei Research: Improving Network Performance for Distributed
    Machine Learning in Commodity Clusters with Parameter Flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec

from slipstream.codecs import Above, Dense, Drop, Filter
from slipstream.codecs.filter import Precision, Squeeze
from slipstream.codecs.select import Decay
from slipstream.consistency import All, Consistency, Constant, Lag, StaleSynchronous
from slipstream.errors import ConfigError
from slipstream.input_files import read_limited
from slipstream.methods import Rounds
from slipstream.planning.learning_rates import stale_rate
from slipstream.planning.overlays import choose_overlay, read_topology
from slipstream.planning.overlays.topology_file import MOST_BYTES
from slipstream.printable import shown
from slipstream.routes import ByTensor, Large, Route, Rule
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import with_levels
from slipstream.topologies import AnyTopology, Sharded, Tree
from slipstream.units import bits_per_second
from slipstream.updates import Add, Update, UserOptimizer, UserSteps

Delta = float | str | Drop
Payload = Literal["gradient", "update"]
SMALLEST = 1024  # values; filtering smaller tensors gains nothing
BLOCK_BYTES = 512 * 1024  # of a chunk before it is filtered: a worker forwards whole blocks
TYPICAL_BLOCKS = 32  # per shard, to predict the cost of filling the pipeline


def parameter_flow(
    *,
    delta: Delta | Mapping[str, Delta] = "85%",
    decay: Decay = "rate",
    staleness: int = 0,
    tree: str | Tree = "star",
    codec: str = "float32",
    broadcast_delta: Delta | None = None,
    congested_delta: Delta | None = None,
    congested_below: str | float | None = None,
    payload: Payload = "gradient",
    rate_factor: float | None = None,
    overlap: bool = True,
    chunk_bytes: int = BLOCK_BYTES,
    hierarchical: bool = False,
) -> Strategy:
    """Send filtered updates up and filtered means down.

    Args:
        delta: Hold back entries up to this value, or a share of them ("90%"), or either by name
            ({"fc*": "95%", "*": 1e-4}; tensors that match no pattern are sent dense).
        decay: How the bound changes: "rate" with the learning rate, "root" with 1/√t, "constant".
        staleness: s, the number of clocks that a worker may run ahead.
        tree: "star", a topology file (see ``slipstream plan-tree``), or a ``Tree``.
        codec: "float32", "bfloat16", "int8", "int4"; "+snappy", "+lz4" or "+zstd" compresses.
        broadcast_delta: The same as ``delta`` for results; by default δ/√n.
        congested_delta: Replaces ``delta`` on congested links.
        congested_below: The available bandwidth below which a link is congested ("50mbit").
        payload: What is sent: a "gradient", or an "update": the optimizer's own step.
        rate_factor: Multiplies learning rates; by default it shrinks as staleness grows.
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        chunk_bytes: The largest part of a tensor that is sent as one message.
        hierarchical: Workers of a host aggregate first; then none may be lost.

    Raises:
        ConfigError: A value is invalid, or the topology file cannot be read.

    >>> parameter_flow(delta={"fc*": "95%"}, staleness=2).rounds.consistency.gate
    Lag(steps=2)
    """
    if payload not in get_args(Payload):
        raise ConfigError(f"payload={payload!r}: choose 'gradient' or 'update'")
    topology = levels_of(topology_of(tree, chunk_bytes), hierarchical)
    select = selector(decay, congested_delta, congested_below)
    filtered = msgspec.structs.replace(filter_as(codec), select=select)
    patterns = delta if isinstance(delta, Mapping) else {"*": delta}
    routes = {
        p: filtered_route(topology, filtered, d, broadcast_delta) for p, d in patterns.items()
    }
    rules = tuple(Rule(Large(SMALLEST, pattern=p), route) for p, route in routes.items())
    steps = payload == "update"
    return Strategy(
        "parameter_flow",
        Rounds(
            ByTensor(rules, default=Route(topology, up=Dense())),
            consistency_for(staleness, rate_factor, steps, may_lose=not hierarchical),
            Update(UserSteps(), Add(at="worker")) if steps else Update(outer=UserOptimizer()),
            WaitFree() if overlap and not steps else AfterBackward(),
            chunk_bytes,
        ),
    )


def levels_of(topology: AnyTopology, hierarchical: bool) -> AnyTopology:
    """Return the topology, with two levels if requested."""
    if isinstance(topology, Sharded):
        return with_levels(hierarchical, topology)
    if hierarchical:
        raise ConfigError("hierarchical=True: workers forward results along trees; use tree='star'")
    return topology


def selector(
    decay: Decay, congested_delta: Delta | None, congested_below: str | float | None
) -> Above:
    """Return a filter's rule without its bound, which differs by tensor."""
    if congested_delta is None and congested_below is None:
        return Above(decay=decay)
    if congested_delta is None or congested_below is None:
        raise ConfigError("parameter_flow: congested_delta and congested_below belong together")
    below = bits_per_second(congested_below) / 8
    return Above(decay=decay, congested=threshold(congested_delta), congested_below=below)


def filtered_route(
    topology: AnyTopology, filtered: Filter, delta: Delta, broadcast_delta: Delta | None
) -> Route:
    """Return a route with ``filtered`` both ways, with these bounds."""

    def bounded(delta: Delta, *, of_mean: bool) -> Filter:
        replace = msgspec.structs.replace
        select = replace(filtered.select, delta=threshold(delta), of_mean=of_mean)
        return replace(filtered, select=select)

    if broadcast_delta is None:
        down = bounded(delta, of_mean=True)
    else:
        down = bounded(broadcast_delta, of_mean=False)
    return Route(topology, up=bounded(delta, of_mean=False), down=down)


def consistency_for(
    staleness: int, rate_factor: float | None, steps: bool, *, may_lose: bool
) -> Consistency:
    if staleness == 0 and rate_factor is None and not steps:
        return Consistency(All(without_lost=may_lose))
    factor = stale_rate(staleness) if rate_factor is None else rate_factor
    return Consistency(StaleSynchronous(without_lost=True), Lag(staleness), Constant(factor))


def topology_of(tree: str | Tree, block_bytes: int) -> AnyTopology:
    """Return the given topology, or the one that a topology file's network suits best."""
    if isinstance(tree, Tree):
        return tree
    if tree == "star":
        return Sharded()
    try:
        text = read_limited(Path(tree), MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"tree={shown(tree)}: give 'star' or a topology file; {reason}"
        ) from error
    network = read_topology(text, tree)
    model_bytes = TYPICAL_BLOCKS * block_bytes * len(network.servers)
    best = choose_overlay(network, model_bytes, block_bytes).best
    return Sharded() if best.name == "star" else Tree(best.children)


def threshold(delta: Delta) -> float | Drop:
    if not isinstance(delta, str):
        return delta
    share = delta.removesuffix("%")
    try:
        value = float(share)
    except ValueError:
        raise ConfigError(f"delta={delta!r}: give a value, or a share such as '90%'") from None
    if share != delta and not 0 <= value < 100:
        raise ConfigError(f"delta={delta!r}: a share is 0% or more, and below 100%")
    return Drop(value / 100) if share != delta else value


def filter_as(codec: str) -> Filter:
    precisions: dict[str, Precision] = {name: name for name in get_args(Precision)}
    squeezes: dict[str, Squeeze] = {name: name for name in get_args(Squeeze)}
    precision, _, squeeze = codec.partition("+")
    if precision not in precisions or (squeeze and squeeze not in squeezes):
        raise ConfigError(
            f"codec={codec!r}: give {' or '.join(precisions)}, and after a + one of "
            f"{', '.join(squeezes)}, or nothing"
        )
    return Filter(values=precisions[precision], squeeze=squeezes.get(squeeze))
