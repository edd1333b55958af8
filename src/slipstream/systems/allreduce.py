"""All-reduce: every worker gets the mean gradient, by torch's own collectives.

- Topology: mesh, its fan-out done by ``torch.distributed`` (gloo on CPU, NCCL on GPU). Collectives
  sum plain values; so with few bits (``wire="int8"``, ``"int4"``) every worker holds a share of the
  model instead, sums what comes in full precision, and sends the result to all in few bits.
- Consistency: rounds of all n workers.
- What is sent: dense gradients, 2·(n−1)/n of the model each way. Buffers such as batch-norm
  statistics are sent directly between workers: few bytes, and none while they do not change.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from typing import get_args

from slipstream.codecs import Dense
from slipstream.routes import AnyPolicy, ByRole, Collective, Everywhere, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import Wire, check_wire, routes_for
from slipstream.topologies import Mesh, PeerSharded

# Each call of a collective has a fixed cost, so buckets are larger than a server's chunks.
BUCKET_BYTES = 8 * 1024 * 1024


def allreduce(
    *, overlap: bool = True, wire: Wire = "own", bucket_bytes: int = BUCKET_BYTES
) -> Strategy:
    """Collective all-reduce, wait-free by default.

    Args:
        overlap: Whether a layer's gradient leaves when its backward ends; else after all layers'.
        wire: The form of gradients on the wire, both ways: see ``routes_for``; "own" is exact.
        bucket_bytes: The most of a gradient that one all-reduce sums.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value is invalid.

    >>> allreduce().routes.parameter.route.scheme
    'dense/collective'
    >>> allreduce(wire="int8").routes.rules[0].route.scheme
    'int8/peers'
    """
    return Strategy(
        "allreduce",
        reduced(wire),
        schedule=WaitFree() if overlap else AfterBackward(),
        chunk_bytes=bucket_bytes,
    )


def reduced(wire: Wire) -> AnyPolicy:
    check_wire(wire, get_args(Wire))
    if wire == "int8" or wire == "int4":
        return routes_for(wire, PeerSharded(), back="same")
    summed = Route(Mesh(), up=Dense(wire), down=Dense(wire), over=Collective())
    return ByRole(parameter=Everywhere(summed), buffer=Everywhere(Route(Mesh(), up=Dense())))
