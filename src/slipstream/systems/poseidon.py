"""Poseidon (Zhang and others, 2017): each layer by its cheapest road, as its backward ends.

- What travels: a fully connected layer's sufficient factors (X and dY) from peer to peer where that
  is cheaper than its dense gradient, an embedding's touched rows likewise; everything else dense.
- Dense roads: collectives; or sharded servers where dedicated ones make that cheaper, and wherever
  the paper's own rule (``choose="bytes"``) is asked for.
- Chosen for every layer from its shape, the batch, the cluster, and measured speeds of links, GEMM
  and servers; chosen again when the batch changes.
- Consistency: rounds of all n workers. Those of one host aggregate first: their rows are stacked.
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
from slipstream.systems.wires import Hosts, with_hosts
from slipstream.topologies import Mesh, Sharded
from slipstream.units import bits_per_second


def poseidon(
    *,
    choose: Literal["time", "bytes"] = "time",
    wire: Literal["own", "bfloat16"] = "own",
    rate: str | float | None = None,
    gemm_gflops: float = 50.0,
    server_gbytes: float = 5.0,
    dense: Sequence[str] = (),
    hosts: Hosts = "first",
) -> Strategy:
    """Hybrid communication: every layer by its cheapest route.

    Args:
        choose: By predicted "time", or by "bytes" as in the paper.
        wire: The precision of factors and rows on the wire; "own" is the tensor's.
        rate: Of a link, such as "10gbit". With it, nothing is measured when the job starts.
        gemm_gflops: A worker's speed at matrix products, where ``rate`` is given.
        server_gbytes: A server's speed at summing, in GB/s, where ``rate`` is given.
        dense: Names of layers that are always sent dense.
        hosts: "first": where several workers share a host, and there are several hosts, the workers
            of a host aggregate first: their rows travel once, stacked; "flat": every worker takes
            part by itself.

    Returns:
        The strategy.

    Raises:
        ConfigError: A value makes no sense.

    >>> poseidon(choose="bytes").routes.parameter.by
    ByBytes()
    """
    if choose not in ("time", "bytes"):
        raise ConfigError(f"choose={choose!r}: choose by 'time' or by 'bytes'")
    mesh, sharded = with_hosts(hosts, Mesh()), with_hosts(hosts, Sharded())
    shards = Route(sharded, up=Dense())
    compact = (Route(mesh, up=Factors(wire)), Route(mesh, up=Rows(wire)))
    if choose == "bytes":
        routes = Cheapest((*compact, shards), ByBytes(), tuple(dense))
        return Strategy("poseidon", ByRole(routes, Everywhere(shards)))
    routes = Cheapest(
        (*compact, Route(mesh, up=Dense(), over=Collective()), shards),
        ByTime(given_speeds(rate, gemm_gflops, server_gbytes)),
        tuple(dense),
    )
    return Strategy("poseidon", ByRole(routes, Everywhere(Route(mesh, up=Dense()))))


def given_speeds(
    rate: str | float | None, gemm_gflops: float, server_gbytes: float
) -> Speeds | None:
    """None: they are measured."""
    if rate is None:
        return None
    if gemm_gflops <= 0 or server_gbytes <= 0:
        raise UnknownStrategy("poseidon: gemm_gflops and server_gbytes must be above 0")
    return Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)
