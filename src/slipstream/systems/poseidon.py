"""Poseidon (Zhang and others, 2017): each layer by its cheapest route, as its backward ends.

- What is sent: a fully connected layer's sufficient factors (X and dY) from peer to peer if that is
  cheaper than its dense gradient, and an embedding's used rows likewise; everything else dense.
- Dense routes: collectives; or sharded servers if dedicated ones make that cheaper, and whenever
  the paper's own rule (``choose="bytes"``) is used. With few bits (``wire="int8"``, ``"int4"``)
  workers that hold shares replace collectives, which sum plain values.
- The choice for every layer follows from its shape, the batch, the cluster, and measured speeds of
  links, GEMM and servers; it is made again when the batch changes.
- Consistency: rounds of all n workers. Those of one host aggregate first: their rows are stacked.
- When: as each layer's backward ends.

References:
    Zhang, Zheng, Xu and others: Poseidon: An Efficient Communication Architecture for Distributed
    Deep Learning on GPU Clusters (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from slipstream.codecs import Factors, Rows
from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.methods import Rounds
from slipstream.planning.choosing import ByBytes, ByTime
from slipstream.planning.costs import Speeds
from slipstream.routes import ByRole, Cheapest, Collective, Everywhere, Route, Rule
from slipstream.strategy import Strategy
from slipstream.systems.wires import check_wire, in_few_bits, with_levels
from slipstream.topologies import AnyTopology, Mesh, PeerSharded, Sharded
from slipstream.units import bits_per_second

PoseidonWire = Literal["same", "bfloat16", "int8", "int4"]


def poseidon(
    *,
    choose: Literal["time", "bytes"] = "time",
    wire: PoseidonWire = "same",
    rate: str | float | None = None,
    gemm_gflops: float = 50.0,
    server_gbytes: float = 5.0,
    dense: Sequence[str] = (),
    hierarchical: bool = True,
) -> Strategy:
    """Give every layer its cheapest route: factors or rows, or a dense gradient.

    Args:
        choose: The rule: by predicted "time", or by "bytes" as in the paper.
        wire: The precision of factors and rows on the wire; "same" is the tensor's. "int8" and
            "int4" are also that of dense gradients: these have error feedback, while factors and
            rows are rounded at random.
        rate: The rate of a link, such as "10gbit". With it, nothing is measured when the job
            starts.
        gemm_gflops: A worker's speed at matrix products, used if ``rate`` is given.
        server_gbytes: A server's speed at summing, in GB/s, used if ``rate`` is given.
        dense: Names of layers that are always sent dense, or patterns of them such as "D.*".
        hierarchical: If several workers share a host, and there are several hosts, the workers
            of a host aggregate first: their rows are sent once, stacked.

    Raises:
        ConfigError: A value is invalid.

    >>> poseidon(choose="bytes").rounds.routes.parameter.by
    ByBytes()
    """
    if choose not in ("time", "bytes"):
        raise ConfigError(f"choose={choose!r}: choose by 'time' or by 'bytes'")
    check_wire(wire, get_args(PoseidonWire))
    mesh, sharded = with_levels(hierarchical, Mesh()), with_levels(hierarchical, Sharded())
    peers, shards = with_levels(hierarchical, PeerSharded()), Route(sharded)
    compact = (Route(mesh, up=Factors(wire)), Route(mesh, up=Rows(wire)))
    in_shards: tuple[Route | Rule, ...] = (*few_bits_first(wire, sharded), shards)
    if choose == "bytes":
        routes = Cheapest((*compact, *in_shards), ByBytes(), tuple(dense))
        return Strategy("poseidon", Rounds(ByRole(routes, Everywhere(shards))))
    few_bits = wire in ("int8", "int4")
    summed = Route(peers) if few_bits else Route(mesh, over=Collective())
    routes_by_cost: tuple[Route | Rule, ...]
    routes_by_cost = (*compact, *few_bits_first(wire, peers), summed, *in_shards)
    routes = Cheapest(
        routes_by_cost, ByTime(given_speeds(rate, gemm_gflops, server_gbytes)), tuple(dense)
    )
    return Strategy("poseidon", Rounds(ByRole(routes, Everywhere(Route(mesh)))))


def few_bits_first(wire: PoseidonWire, topology: AnyTopology) -> tuple[Rule, ...]:
    """Return the route of tensors that are worth quantising, which is tried first."""
    if wire == "int8" or wire == "int4":
        return (in_few_bits(wire, topology, back="same"),)
    return ()


def given_speeds(
    rate: str | float | None, gemm_gflops: float, server_gbytes: float
) -> Speeds | None:
    """Return the given speeds; None if they are to be measured."""
    if rate is None:
        return None
    if gemm_gflops <= 0 or server_gbytes <= 0:
        raise UnknownStrategy("poseidon: gemm_gflops and server_gbytes must be above 0")
    return Speeds(bits_per_second(rate), gemm_gflops * 1e9, server_gbytes * 1e9)
