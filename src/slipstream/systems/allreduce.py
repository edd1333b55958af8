"""All-reduce: every worker gets the mean gradient, by torch's own collectives.

- Topology: mesh, implemented by ``torch.distributed`` (gloo on CPU, NCCL on GPU).
- Consistency: rounds of all n workers.
- What is sent: dense gradients, 2·(n−1)/n of the model each way. Buffers such as batch-norm
  statistics are sent directly between workers: few bytes, and none while they do not change.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.errors import ConfigError
from slipstream.routes import ByRole, Collective, Everywhere, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems.wires import QUANTIZED
from slipstream.topologies import Mesh

# Each call of a collective has a fixed cost, so buckets are larger than a server's chunks.
BUCKET_BYTES = 8 * 1024 * 1024


def allreduce(
    *, overlap: bool = True, wire: Wire = "own", bucket_bytes: int = BUCKET_BYTES
) -> Strategy:
    """Collective all-reduce, wait-free by default.

    Args:
        overlap: Send a layer's gradient when its backward ends; False: after the backward pass.
        wire: The precision of gradients on the wire; "own" is the tensor's.
        bucket_bytes: The largest size of one all-reduce.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value is invalid.

    >>> allreduce().routes.parameter.route.scheme
    'dense/collective'
    """
    if wire in QUANTIZED:
        raise ConfigError(
            f"allreduce(wire={wire!r}): collectives sum plain values; use push_pull(wire={wire!r})"
        )
    reduced = Route(Mesh(), up=Dense(wire), down=Dense(wire), over=Collective())
    return Strategy(
        "allreduce",
        ByRole(parameter=Everywhere(reduced), buffer=Everywhere(Route(Mesh(), up=Dense()))),
        schedule=WaitFree() if overlap else AfterBackward(),
        chunk_bytes=bucket_bytes,
    )
