"""All-reduce: every worker gets the mean gradient, by torch's own collectives.

- Topology: mesh, implemented by ``torch.distributed`` (gloo on CPU, NCCL on GPU); workers of one
  host aggregate first. Collectives sum plain values; so with few bits (``wire="int8"``, ``"int4"``)
  every worker holds a share of the model, sums it in full precision, and sends the result to all.
- Consistency: rounds of all n workers.
- What is sent: dense gradients, 2·(n−1)/n of the model each way. Buffers such as batch-norm
  statistics are sent directly between workers: few bytes, and none while they do not change.
- When: as each layer's backward ends.

References:
    Patarasuk and Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (2009).
"""

from __future__ import annotations

from typing import get_args

from slipstream.codecs import Dense
from slipstream.methods import Rounds
from slipstream.routes import AnyPolicy, ByRole, Collective, Everywhere, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import Wire, check_wire, routes_for, with_levels
from slipstream.topologies import Mesh, PeerSharded

# Each call of a collective has a fixed cost, so buckets are larger than a server's chunks.
BUCKET_BYTES = 8 * 1024 * 1024


def allreduce(
    *,
    overlap: bool = True,
    wire: Wire = "same",
    bucket_bytes: int = BUCKET_BYTES,
    hierarchical: bool = True,
) -> Strategy:
    """Sum gradients by collective all-reduce, wait-free by default.

    Args:
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The format of gradients on the wire, both ways: see ``routes_for``; "same" is exact.
        bucket_bytes: The largest part of a gradient that one all-reduce sums.
        hierarchical: If several workers share a host, and there are several hosts, the workers of a
            host aggregate first, and one of them takes part for all (on GPUs NCCL has levels of its
            own).

    Raises:
        ConfigError: A value is invalid.

    >>> allreduce().rounds.routes.parameter.route.scheme
    'dense/collective'
    >>> allreduce(wire="int8").rounds.routes.rules[0].route.scheme
    'int8/peers'
    """
    return Strategy(
        "allreduce",
        Rounds(
            reduced(wire, hierarchical),
            schedule=WaitFree() if overlap else AfterBackward(),
            chunk_bytes=bucket_bytes,
        ),
    )


def reduced(wire: Wire, hierarchical: bool) -> AnyPolicy:
    check_wire(wire, get_args(Wire))
    if wire == "int8" or wire == "int4":
        return routes_for(wire, with_levels(hierarchical, PeerSharded()), back="same")
    topology = with_levels(hierarchical, Mesh())
    summed = Route(topology, up=Dense(wire), down=Dense(wire), over=Collective())
    return ByRole(parameter=Everywhere(summed), buffer=Everywhere(Route(topology, up=Dense())))
