"""All-reduce: every worker gets the mean gradient, by torch's own collectives.

- Topology: mesh, implemented by ``torch.distributed`` (gloo on CPU, NCCL on GPU); workers of one
  host aggregate first. Collectives sum plain values; so with few bits (``wire="int8"``, ``"int4"``)
  every worker holds a share of the model, sums it in full precision, and sends the result to all.
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
from slipstream.systems.wires import Hosts, Wire, check_wire, routes_for, with_hosts
from slipstream.topologies import Mesh, PeerSharded

# Each call of a collective has a fixed cost, so buckets are larger than a server's chunks.
BUCKET_BYTES = 8 * 1024 * 1024


def allreduce(
    *,
    overlap: bool = True,
    wire: Wire = "own",
    bucket_bytes: int = BUCKET_BYTES,
    hosts: Hosts = "first",
) -> Strategy:
    """Collective all-reduce, wait-free by default.

    Args:
        overlap: Whether a layer's gradient leaves when its backward ends; else after all layers'.
        wire: The format of gradients on the wire, both ways: see ``routes_for``; "own" is exact.
        bucket_bytes: The largest part of a gradient that one all-reduce sums.
        hosts: "first": where several workers share a host, and there are several hosts, the workers
            of a host aggregate first, and one of them takes part for all (on GPUs NCCL has levels
            of its own); "flat": every worker takes part by itself.

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
        reduced(wire, hosts),
        schedule=WaitFree() if overlap else AfterBackward(),
        chunk_bytes=bucket_bytes,
    )


def reduced(wire: Wire, hosts: Hosts) -> AnyPolicy:
    check_wire(wire, get_args(Wire))
    if wire == "int8" or wire == "int4":
        return routes_for(wire, with_hosts(hosts, PeerSharded()), back="same")
    topology = with_hosts(hosts, Mesh())
    summed = Route(topology, up=Dense(wire), down=Dense(wire), over=Collective())
    return ByRole(parameter=Everywhere(summed), buffer=Everywhere(Route(topology, up=Dense())))
