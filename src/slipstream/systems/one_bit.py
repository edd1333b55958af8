"""1-bit SGD (Seide and others, 2014), as in CNTK: the baseline of Poseidon (ATC 2017).

- Topology: sharded servers, chunks dealt evenly.
- Consistency: rounds of all n workers.
- What is sent: of fp32 weights with two dimensions or more, one bit per value and two means per
  segment, both ways; everything else (biases, norms, buffers, other precisions) dense.
- When: as each layer's backward ends (wait-free backpropagation).
- Update: at the worker. Gradients can be sent back in one bit, weights cannot.

The quantisation error is added to the next gradient, at each worker and again at the server:

    aₚᵗ = gₚᵗ + rₚᵗ⁻¹,  rₚᵗ = aₚᵗ − q(aₚᵗ)       at worker p
    āᵗ = (Σₚ q(aₚᵗ)) / n + r̄ᵗ⁻¹,  r̄ᵗ = āᵗ − q(āᵗ)   at the server, summed in rank order
    ḡᵗ = q(āᵗ)                                  what every worker's optimizer gets

q gives each value the mean of all values with its sign, with 0 as the threshold between them.

Deviations: CNTK takes these means column by column, we over a segment: a tensor's part in one
chunk. It aggregates among the workers themselves, each for its stripe; our stripes are the shards.
Checkpoints contain the residuals.

References:
    Seide, Fu, Droppo, Li and Yu: 1-bit Stochastic Gradient Descent and its Application to
    Data-parallel Distributed Training of Speech DNNs (2014).
"""

from __future__ import annotations

from slipstream.codecs import Dense, OneBit
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.routes import ByTensor, Large, Route, Rule
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded

SMALLEST = 1024  # values; below, the saved bytes are not worth the noise


def one_bit(*, chunk_bytes: int = CHUNK_BYTES) -> Strategy:
    """Send one bit per value of large fp32 weights, over sharded servers.

    Args:
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: ``chunk_bytes`` is invalid.

    >>> [route.scheme for route in one_bit().rounds.routes.routes()]
    ['one-bit/sharded', 'dense/sharded']
    """
    bits = Route(Sharded(), up=OneBit(), down=OneBit())
    large = Rule(Large(SMALLEST, dims=2), bits)
    return Strategy(
        "one_bit",
        Rounds(ByTensor((large,), default=Route(Sharded(), up=Dense())), chunk_bytes=chunk_bytes),
    )
