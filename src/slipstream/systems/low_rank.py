"""PowerSGD (Vogels, Karimireddy and Jaggi, 2019): gradients of low rank, by power iteration.

- Topology: sharded servers, tensors dealt evenly; or every worker to every other.
- Consistency: rounds of all n workers.
- What is sent: of fp32 weights with two dimensions or more, the product with r vectors that all
  workers know; the mean of the products back. Everything else (biases, norms, buffers, other
  precisions, matrices that would not become smaller) is dense.
- When: as each layer's backward ends (wait-free backpropagation).
- Update: at the worker, by any optimizer, whose state never sees the compression.

With Mₚ worker p's gradient as a matrix a × b, Rₚ its residual, and Q (b × r) and P (a × r)
orthonormal, in every second step

    Aₚ = Mₚ + Rₚ,  P' = (Σₚ Aₚ Q) / n,  Rₚ ← Aₚ − Aₚ Q Qᵀ,  M̂ = P' Qᵀ,  P ← orth(P')

and in the steps between

    Aₚ = Mₚ + Rₚ,  Q' = (Σₚ Aₚᵀ P) / n,  Rₚ ← Aₚ − P (Aₚᵀ P)ᵀ,  M̂ = P Q'ᵀ,  Q ← orth(Q')

Deviations: PowerSGD does both halves in every step, which takes two exchanges, one after the other;
this takes one, of half the bytes, as ACP-SGD does. At equal rank it keeps less of a gradient, since
the basis is that of the last one; compare at equal bytes, r here with r/2 there. As in the paper, a
worker's residual is what its own product does not contain, so that sent plus kept is the gradient
of that worker. The paper adds momentum to M̂ itself; here the user's optimizer gets M̂ as the
gradient. The basis starts anew when a gradient was not finite, and when training resumes from a
checkpoint.

References:
    Vogels, Karimireddy and Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization (2019).
    Zhang, Zhang, Shi, Chu and Li: Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning (2023), for ACP-SGD.
"""

from __future__ import annotations

from slipstream.codecs import Dense, LowRank
from slipstream.errors import ConfigError
from slipstream.methods import Rounds
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.routes import ByTensor, Large, Prefer, Route, Rule
from slipstream.strategy import Strategy
from slipstream.topologies import Mesh, Sharded

SMALLEST = 1024  # values; below, the saved bytes are not worth the error


def low_rank(
    *, rank: int = 4, peers: bool = False, seed: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Strategy:
    """Send large fp32 weights as products of rank r, with error feedback, in one exchange a step.

    Args:
        rank: r. A higher rank is closer to the gradient, and needs r times as many bytes.
        peers: Every worker sends to every other, and there are no servers.
        seed: The seed of the first basis.
        chunk_bytes: The largest part of a tensor that is sent as one message.

    Raises:
        ConfigError: A value is invalid.

    >>> [route.scheme for route in low_rank(rank=2).rounds.routes.routes()]
    ['rank-2/sharded', 'dense/sharded', 'dense/sharded']
    """
    if not isinstance(peers, bool):
        raise ConfigError(f"peers={peers!r}: choose True or False")
    codec = LowRank(rank, seed)
    # On a mesh every worker computes the result for itself, and nothing is sent back.
    route = Route(Mesh(), codec) if peers else Route(Sharded(), up=codec, down=codec)
    dense = Route(route.topology, up=Dense())
    large = Rule(Large(SMALLEST, dims=2), Prefer((route, dense)))
    return Strategy("low_rank", Rounds(ByTensor((large,), default=dense), chunk_bytes=chunk_bytes))
