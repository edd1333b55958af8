"""DiLoCo (Douillard and others, 2023; streaming form 2025): many local steps for one exchange.

- Topology: every worker holds every tensor, and collectives make the rounds. With few bits per
  value every worker holds a share; rounds of the first N use sharded servers.
- Consistency: outer rounds of all n workers; with ``first=N`` of the first N.
- What is sent: worker i's outer gradient, the distance that its weights moved in H steps of the
  user's optimizer.
- When: after every H-th step; in F fragments, one every H / F steps, merged τ steps later.

    Δᵢ = θ − θᵢ;   v ← μ v + mean Δᵢ;   θ ← θ − η (mean Δᵢ + μ v);   θᵢ ← α θᵢ + (1 − α) θ

The inner optimizer's state stays with its worker. Deviations: what a codec has not sent yet waits
in a residual, which is subtracted from θᵢ when it merges, so that no part of a step counts twice.
With ``first=N`` what a late worker sent returns to its residual, and counts in its next round. A
round of workers whose Δᵢ cover sᵢ blocks of H steps is Σ Δᵢ / Σ sᵢ, so that every local step counts
the same.

References:
    Stich: Local SGD Converges Fast and Communicates Little (2019).
    Douillard and others: DiLoCo: Distributed Low-Communication Training of Language Models (2023).
    Douillard and others: Streaming DiLoCo with Overlapping Communication: Towards a Distributed
    Free Lunch (2025).
"""

from __future__ import annotations

from typing import get_args

import msgspec

from slipstream.codecs import Above, Dense, Filter
from slipstream.codecs.filter import Precision
from slipstream.consistency import All, Consistency, FirstOf
from slipstream.methods import Rounds
from slipstream.routes import (
    AnyPolicy,
    ByRole,
    ByTensor,
    Collective,
    Everywhere,
    Large,
    Route,
    Rule,
)
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.systems.allreduce import BUCKET_BYTES
from slipstream.systems.wires import Wire, check_wire, in_few_bits, routes_for, with_levels
from slipstream.topologies import Mesh, PeerSharded, Sharded
from slipstream.updates import LocalSteps, Nesterov, Update


def diloco(
    *,
    every: int = 50,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    overlap_steps: int = 0,
    mix: float | None = None,
    wire: Wire = "same",
    first: int | None = None,
    hierarchical: bool = False,
) -> Strategy:
    """Make local steps, and apply outer gradients with Nesterov momentum.

    The defaults are the paper's, for hundreds of steps between rounds of a long run. With few steps
    (we measured up to 16) and an adaptive inner optimizer they overshoot: an outer step grows from
    η (1 + μ) to η / (1 − μ) = 7 times the mean distance. In that case take ``local_sgd``, or a
    small μ and η = 1 − μ, such as ``lr=0.7, momentum=0.3``.

    Args:
        every: H, the number of local steps between two rounds of a tensor.
        lr: η, the outer learning rate.
        momentum: μ, the outer momentum.
        fragments: F, the number of parts of the model, each with rounds of its own.
        overlap_steps: τ, the steps that a worker makes while its outer gradient is being exchanged.
        mix: α, how much of its own weights a worker keeps when it merges; by default 0.5 if steps
            overlap, else 0.
        wire: The form of outer gradients on the wire: see ``routes_for``; "same" is exact.
        first: N; a round closes with the first N outer gradients. The outer optimizer then runs at
            the servers.
        hierarchical: If several workers share a host, and there are several hosts, the workers of a
            host average their outer gradients first, and one stream per host crosses the network;
            ``first`` then counts hosts.

    Raises:
        ConfigError: A value is invalid.

    >>> diloco(every=100, fragments=4, overlap_steps=5).rounds.update.inner.mix
    0.5
    """
    share = (0.5 if overlap_steps else 0.0) if mix is None else mix
    return Strategy(
        "diloco",
        Rounds(
            outer_routes(wire, first, hierarchical),
            Consistency(All() if first is None else FirstOf(first)),
            Update(
                LocalSteps(every, fragments, overlap_steps, share),
                Nesterov(lr, momentum, at="worker" if first is None else "server"),
            ),
            AfterBackward(),
            chunk_bytes=BUCKET_BYTES,
        ),
    )


def local_sgd(
    *, every: int = 8, wire: Wire = "same", first: int | None = None, hierarchical: bool = False
) -> Strategy:
    """Make local steps, after which all workers continue from the mean of their weights.

    This is the first choice if rounds are few steps apart. With ``wire="int4"``, ``every=2`` sends
    14 times fewer bytes than an all-reduce every step, and ``every=4`` 28 times.

    Args:
        every: H, the number of local steps between two means.
        wire: The form of outer gradients on the wire: see ``routes_for``; "same" is exact.
        first: N; a mean is taken of the first N workers.
        hierarchical: Let workers of one host average first: see ``diloco``.

    Raises:
        ConfigError: A value is invalid.

    >>> local_sgd(every=4).rounds.update.outer
    Nesterov(lr=1.0, momentum=0.0, at='worker')
    """
    strategy = diloco(
        every=every, lr=1.0, momentum=0.0, wire=wire, first=first, hierarchical=hierarchical
    )
    return msgspec.structs.replace(strategy, name="local_sgd")


def outer_routes(wire: Wire, first: int | None, hierarchical: bool) -> AnyPolicy:
    """Return collective routes if values are plain and all workers take part; else links.

    With ``first``, every entry is sent by a codec with a residual, to which it returns if the round
    drops it.
    """
    check_wire(wire, get_args(Wire))
    if first is not None:
        precision: Precision = "bfloat16" if wire == "bfloat16" else "float32"
        servers = with_levels(hierarchical, Sharded())
        everything = Route(servers, up=Filter(Above(0.0, decay="constant"), values=precision))
        rules = [Rule(Large(0), everything)]
        if wire == "int8" or wire == "int4":
            rules.insert(0, in_few_bits(wire, servers, back="dense"))
        return ByTensor(tuple(rules), default=Route(servers))
    if wire == "int8" or wire == "int4":
        return routes_for(wire, with_levels(hierarchical, PeerSharded()), back="same")
    dense = Dense(wire)
    mesh = with_levels(hierarchical, Mesh())
    reduced = Route(mesh, up=dense, down=dense, over=Collective())
    return ByRole(parameter=Everywhere(reduced), buffer=Everywhere(Route(mesh)))
