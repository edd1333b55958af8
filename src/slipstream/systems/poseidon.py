"""Poseidon (Zhang and others, 2017): each layer by its cheapest route, as its backward ends.

- What is sent: a fully connected layer's sufficient factors (X and dY) from peer to peer where that
  is cheaper than its dense gradient, an embedding's used rows likewise; everything else dense.
- Dense routes: collectives; or sharded servers where dedicated ones make that cheaper, and always
  with the paper's own rule (``choose="bytes"``).
- Chosen for every layer from its shape, the batch, the cluster, and measured speeds of links, GEMM
  and servers; chosen again when the batch changes.
- Consistency: rounds of all n workers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slipstream.codecs import Dense, Factors, Rows
from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.planning.choosing import ByBytes, ByTime
from slipstream.planning.costs import Speeds
from slipstream.routes import ByRole, Cheapest, Collective, Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.topologies import Mesh, Sharded
from slipstream.units import bits_per_second

SHARDS = Route(Sharded(), up=Dense())
COLLECTIVE = Route(Mesh(), up=Dense(), over=Collective())
BETWEEN_WORKERS = Route(Mesh(), up=Dense())


def poseidon(
    *,
    choose: Literal["time", "bytes"] = "time",
    wire: Literal["own", "bfloat16"] = "own",
    rate: str | float | None = None,
    gemm_gflops: float = 50.0,
    server_gbytes: float = 5.0,
    dense: Sequence[str] = (),
) -> Strategy:
    """Hybrid communication: the cheapest route for every layer.

    Args:
        choose: By predicted "time", or by "bytes" as in the paper.
        wire: The precision of factors and rows on the wire; "own" is the tensor's.
        rate: Of a link, such as "10gbit". If given, nothing is measured when the job starts.
        gemm_gflops: A worker's speed of matrix products; used with ``rate``.
        server_gbytes: A server's speed of summing, in GB/s; used with ``rate``.
        dense: Names of layers that are always sent dense.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value is invalid.

    >>> poseidon(choose="bytes").routes.parameter.by
    ByBytes()
    """
    if choose not in ("time", "bytes"):
        raise ConfigError(f"choose={choose!r}: choose by 'time' or by 'bytes'")
    compact = (Route(Mesh(), up=Factors(wire)), Route(Mesh(), up=Rows(wire)))
    if choose == "bytes":
        routes = Cheapest((*compact, SHARDS), ByBytes(), tuple(dense))
        return Strategy("poseidon", ByRole(routes, Everywhere(SHARDS)))
    routes = Cheapest(
        (*compact, COLLECTIVE, SHARDS),
        ByTime(given_speeds(rate, gemm_gflops, server_gbytes)),
        tuple(dense),
    )
    return Strategy("poseidon", ByRole(routes, Everywhere(BETWEEN_WORKERS)))


def given_speeds(
    rate: str | float | None, gemm_gflops: float, server_gbytes: float
) -> Speeds | None:
    """The speeds that were given; None if they are to be measured."""
    if rate is None:
        return None
    if gemm_gflops <= 0 or server_gbytes <= 0:
        raise UnknownStrategy("poseidon: gemm_gflops and server_gbytes must be above 0")
    return Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)
