"""Poseidon (Zhang and others, 2017): each layer by its cheapest route, as its backward ends.

- What travels: a fully connected layer's sufficient factors (X and dY) from peer to peer where that
  is cheaper than its dense gradient, an embedding's touched rows likewise; everything else dense.
- Dense roads: collectives; or sharded servers where dedicated ones make that cheaper, and wherever
  the paper's own rule (``choose="bytes"``) is asked for. With few bits (``wire="int8"``,
  ``"int4"``) workers that hold shares take the place of collectives, which sum plain values.
- Chosen for every layer from its shape, the batch, the cluster, and measured speeds of links, GEMM
  and servers; chosen again when the batch changes.
- Consistency: rounds of all n workers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from slipstream.codecs import Dense, Factors, Rows
from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.planning.choosing import ByBytes, ByTime
from slipstream.planning.costs import Speeds
from slipstream.routes import ByRole, Cheapest, Collective, Everywhere, Route, Rule
from slipstream.strategy import Strategy
from slipstream.systems.wires import check_wire, in_few_bits
from slipstream.topologies import Mesh, PeerSharded, Sharded
from slipstream.units import bits_per_second

PoseidonWire = Literal["own", "bfloat16", "int8", "int4"]
SHARDS = Route(Sharded(), up=Dense())
COLLECTIVE = Route(Mesh(), up=Dense(), over=Collective())
SHARES = Route(PeerSharded(), up=Dense())
BETWEEN_WORKERS = Route(Mesh(), up=Dense())


def poseidon(
    *,
    choose: Literal["time", "bytes"] = "time",
    wire: PoseidonWire = "own",
    rate: str | float | None = None,
    gemm_gflops: float = 50.0,
    server_gbytes: float = 5.0,
    dense: Sequence[str] = (),
) -> Strategy:
    """Hybrid communication: the cheapest route for every layer.

    Args:
        choose: By predicted "time", or by "bytes" as in the paper.
        wire: The precision of factors and rows on the wire; "own" is the tensor's. "int8" and
            "int4" are that of dense gradients, too: with error feedback, while factors and rows
            are rounded by chance.
        rate: Of a link, such as "10gbit". With it, nothing is measured when the job starts.
        gemm_gflops: A worker's speed at matrix products, where ``rate`` is given.
        server_gbytes: A server's speed at summing, in GB/s, where ``rate`` is given.
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
    check_wire(wire, get_args(PoseidonWire))
    compact = (Route(Mesh(), up=Factors(wire)), Route(Mesh(), up=Rows(wire)))
    roads = (*compact, *dense_roads(choose, wire))
    if choose == "bytes":
        return Strategy(
            "poseidon", ByRole(Cheapest(roads, ByBytes(), tuple(dense)), Everywhere(SHARDS))
        )
    speeds = given_speeds(rate, gemm_gflops, server_gbytes)
    routes = Cheapest(roads, ByTime(speeds), tuple(dense))
    return Strategy("poseidon", ByRole(routes, Everywhere(BETWEEN_WORKERS)))


def dense_roads(choose: Literal["time", "bytes"], wire: PoseidonWire) -> tuple[Route | Rule, ...]:
    """Of those that cost the same, in few bits first; tensors that are not worth it go as ever."""
    if wire == "int8" or wire == "int4":
        shards = in_few_bits(wire, Sharded(), back="same"), SHARDS
        shares = in_few_bits(wire, PeerSharded(), back="same"), SHARES
        return shards if choose == "bytes" else (*shares, *shards)
    return (SHARDS,) if choose == "bytes" else (COLLECTIVE, SHARDS)


def given_speeds(
    rate: str | float | None, gemm_gflops: float, server_gbytes: float
) -> Speeds | None:
    """The speeds that were given; None if they are to be measured."""
    if rate is None:
        return None
    if gemm_gflops <= 0 or server_gbytes <= 0:
        raise UnknownStrategy("poseidon: gemm_gflops and server_gbytes must be above 0")
    return Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)
