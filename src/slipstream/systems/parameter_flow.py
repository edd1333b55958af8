"""Parameter Flow (Huawei): only updates travel, small ones wait, trees spread them.

- Topology: sharded servers; what they publish goes to every worker directly (a star) or along one
  tree a shard, in which workers pass blocks on as they come.
- Consistency: rounds of all n workers (UCC-BSP); with ``staleness`` s, whoever begins clock c has
  everybody's updates up to clock c − s − 1, and Uᵗ also holds what faster workers have pushed
  since (UCC-SSP). All workers apply the same sequence of U.
- What travels: of fp32 weights the entries above a bound δᵗ, both ways (DVF); everything else
  dense. The rest waits in a residual, one a link, and is never lost.
- When: as each layer's backward ends; with ``travels="steps"`` after the optimizer's own step.
- Update: at the worker. Weights do not travel after the start.

    a = u + r;  sent = a where not |a| ≤ δᵗ, else 0;  r ← a − sent      at worker p, towards a shard
    ā = (Σₚ sentₚ) / n + r̄;  U = ā where not |ā| ≤ δ̄ᵗ, else 0;  r̄ ← ā − U      at the shard
    W ← F(W, U)                                                    at every worker, F its optimizer

Where we deviate: U is the mean, not the sum, so that learning rates mean what they do elsewhere.
δᵗ = δ·lrₜ/lr₀, since the paper's δ/√t lets traffic grow several times over a run for little gain
(``decay="root"`` has it). A shard's δ̄ is δ/√n: the mean of n updates is that much smaller, and the
same bound both ways would hold back most of what workers found worth sending. Servers keep no
copy of the weights: whoever applies every U has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from slipstream.codecs import Bounded, Dense, Drop
from slipstream.codecs.bounded import Decay, Precision, Squeeze
from slipstream.consistency import BoundedStaleness, Consistency, Rounds
from slipstream.errors import ConfigError
from slipstream.input_files import read_limited
from slipstream.planning.learning_rates import stale_rate
from slipstream.planning.overlays import choose_overlay, read_topology
from slipstream.planning.overlays.topology_file import MOST_BYTES
from slipstream.printable import shown
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Route, Strategy, Travels
from slipstream.topologies import Sharded, Topology, Tree
from slipstream.types import Cluster, Spec
from slipstream.units import bits_per_second

Delta = float | str | Drop
SMALLEST = 1024  # values; below, there is nothing to gain
BLOCK_BYTES = 512 * 1024  # of a chunk before it is filtered: a relay passes on whole ones
TYPICAL_BLOCKS = 32  # of a shard: how much the filling of a pipeline matters
DENSE = Dense()


def parameter_flow(
    *,
    delta: Delta | Mapping[str, Delta] = "85%",
    decay: Decay = "rate",
    staleness: int = 0,
    tree: str | Tree = "star",
    codec: str = "float32",
    broadcast_delta: Delta | None = None,
    narrow_delta: Delta | None = None,
    narrow_below: str | float | None = None,
    travels: Travels = "gradients",
    rate_factor: float | None = None,
    overlap: bool = True,
    chunk_bytes: int = BLOCK_BYTES,
) -> Strategy:
    """Filtered updates up, filtered means down.

    ``delta`` is a value, the share to hold back ("90%"), or either by tensor name
    ({"fc*": "95%", "*": 1e-4}; whatever no pattern fits travels dense). ``narrow_delta`` replaces
    it on links with less than ``narrow_below`` ("50mbit") to spare. ``codec`` is float32 or
    bfloat16, and "+snappy", "+lz4" or "+zstd" if bytes are scarcer than time. ``tree`` is "star",
    a topology file (see ``slipstream plan-tree``) or a ``Tree``. Learning rates are multiplied by
    ``rate_factor``; by default by less the more ``staleness`` there is.
    """
    topology = topology_of(tree, chunk_bytes)
    bounded = bounded_by(codec, decay)
    narrow = None if narrow_delta is None else threshold(narrow_delta)
    if (narrow_delta is None) != (narrow_below is None):
        raise ConfigError("parameter_flow: narrow_delta and narrow_below belong together")

    def route(spec: Spec, cluster: Cluster) -> Route:
        bound = bound_of(spec, delta)
        if bound is None:
            return Route(topology, push=DENSE, publish=DENSE)
        back = threshold(broadcast_delta) if broadcast_delta is not None else bound
        back_narrow = narrow
        if broadcast_delta is None:
            back, back_narrow = scaled(back, cluster), narrow and scaled(narrow, cluster)
        return Route(
            topology,
            push=replace(bounded, delta=bound, narrow=narrow),
            publish=replace(bounded, delta=back, narrow=back_narrow),
        )

    return Strategy(
        "parameter_flow",
        route=route,
        consistency=consistency_for(staleness, rate_factor, travels),
        schedule=WaitFree() if overlap and travels == "gradients" else AfterBackward(),
        chunk_bytes=chunk_bytes,
        travels=travels,
        outlives_workers=True,
        narrow_below=None if narrow_below is None else bits_per_second(narrow_below) / 8,
    )


def consistency_for(staleness: int, rate_factor: float | None, travels: Travels) -> Consistency:
    if staleness == 0 and rate_factor is None and travels == "gradients":
        return Rounds()
    factor = stale_rate(staleness) if rate_factor is None else rate_factor
    return BoundedStaleness(staleness, factor)


def topology_of(tree: str | Tree, block_bytes: int) -> Topology:
    """What was given; or what is predicted to be soonest on the network that a file describes."""
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


def bound_of(spec: Spec, delta: Delta | Mapping[str, Delta]) -> float | Drop | None:
    """The bound on what a tensor holds back; None: it travels dense."""
    if spec.role != "parameter" or spec.dtype != "float32" or spec.numel < SMALLEST:
        return None
    if not isinstance(delta, Mapping):
        return threshold(delta)
    fitting = [value for pattern, value in delta.items() if fnmatchcase(spec.name, pattern)]
    return threshold(fitting[0]) if fitting else None


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


def scaled(delta: float | Drop, cluster: Cluster) -> float | Drop:
    """For the mean of all workers' updates; a share needs no scale."""
    return delta if isinstance(delta, Drop) else delta / math.sqrt(cluster.workers)


def bounded_by(codec: str, decay: Decay) -> Bounded:
    precisions: dict[str, Precision] = {name: name for name in get_args(Precision)}
    squeezes: dict[str, Squeeze] = {name: name for name in get_args(Squeeze)}
    precision, _, squeeze = codec.partition("+")
    if precision not in precisions or (squeeze and squeeze not in squeezes):
        raise ConfigError(
            f"codec={codec!r}: give {' or '.join(precisions)}, and after a + one of "
            f"{', '.join(squeezes)}, or nothing"
        )
    return Bounded(0.0, decay=decay, values=precisions[precision], squeeze=squeezes.get(squeeze))
