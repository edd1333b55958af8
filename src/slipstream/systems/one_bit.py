"""1-bit SGD (Seide and others, 2014), as CNTK has it: the baseline of Poseidon (ATC 2017).

- Topology: sharded servers, chunks dealt evenly.
- Consistency: rounds of all n workers.
- What travels: of fp32 weights with two dimensions or more, one bit a value and two means a
  segment, both ways; everything else (biases, norms, buffers, other precisions) dense.
- When: as each layer's backward ends (wait-free backpropagation).
- Update: at the worker. Weights cannot come back in one bit, only gradients can.

What one bit loses is added to the next gradient, at each worker and again at the server:

    aₚᵗ = gₚᵗ + rₚᵗ⁻¹,  rₚᵗ = aₚᵗ − q(aₚᵗ)       at worker p
    āᵗ = (Σₚ q(aₚᵗ)) / n + r̄ᵗ⁻¹,  r̄ᵗ = āᵗ − q(āᵗ)   at the server, summed in rank order
    ḡᵗ = q(āᵗ)                                  what every worker's optimizer gets

q gives each value the mean of all that have its sign, with 0 as the threshold between them.

CNTK takes these means column by column, we over a segment: a tensor's part in one chunk. It
aggregates among the workers themselves, each for its stripe; our stripes are the shards. Residuals
are not part of a checkpoint, so what is owed at that moment is lost when training resumes from it.
"""

from __future__ import annotations

from slipstream.codecs import Dense, OneBit
from slipstream.consistency import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.schedules import WaitFree
from slipstream.strategy import Route, Strategy
from slipstream.topologies import Sharded
from slipstream.types import Cluster, Spec

SMALLEST = 1024  # values; below, the bytes saved are not worth the noise

BITS = Route(Sharded(), push=OneBit(), publish=OneBit())
DENSE = Route(Sharded(), push=Dense(), publish=Dense())


def one_bit(*, chunk_bytes: int = CHUNK_BYTES) -> Strategy:
    """One bit a value of large fp32 weights, over sharded servers."""

    def route(spec: Spec, cluster: Cluster) -> Route:
        return BITS if worth_quantizing(spec) else DENSE

    return Strategy(
        "one_bit",
        route=route,
        consistency=Rounds(),
        schedule=WaitFree(),
        chunk_bytes=chunk_bytes,
    )


def worth_quantizing(spec: Spec) -> bool:
    is_weight = spec.role == "parameter" and len(spec.shape) >= 2
    return is_weight and spec.dtype == "float32" and spec.numel >= SMALLEST
