"""All-reduce: every worker ends with the mean gradient, by torch's own collectives.

- Topology: mesh, its fan-out done by ``torch.distributed`` (gloo on CPU, NCCL on GPU); workers of
  one host aggregate first.
- Consistency: rounds of all n workers.
- What travels: dense gradients, 2·(n−1)/n of the model each way. Buffers such as batch-norm
  statistics travel straight between the workers: few bytes, and none while they do not change.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.errors import ConfigError
from slipstream.routes import ByRole, Collective, Everywhere, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import QUANTIZED, Hosts, with_hosts
from slipstream.topologies import Mesh

# A collective has a cost a call; larger buckets than a server's chunks pay.
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
        wire: The precision of gradients on the wire; "own" is the tensor's.
        bucket_bytes: The most that one all-reduce sums.
        hosts: "first": where several workers share a host, and there are several hosts, the workers
            of a host aggregate first, and one of them takes part for all (on GPUs NCCL has levels
            of its own); "flat": every worker takes part by itself.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> allreduce().routes.parameter.route.scheme
    'dense/collective'
    """
    if wire in QUANTIZED:
        raise ConfigError(
            f"allreduce(wire={wire!r}): collectives sum plain values; use push_pull(wire={wire!r})"
        )
    topology = with_hosts(hosts, Mesh())
    reduced = Route(topology, up=Dense(wire), down=Dense(wire), over=Collective())
    return Strategy(
        "allreduce",
        ByRole(parameter=Everywhere(reduced), buffer=Everywhere(Route(topology, up=Dense()))),
        schedule=WaitFree() if overlap else AfterBackward(),
        chunk_bytes=bucket_bytes,
    )
