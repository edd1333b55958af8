"""Strategies composed of exported parts, which no named system is."""

from __future__ import annotations

from slipstream.codecs import (
    Above,
    Dense,
    Drop,
    Factors,
    Filter,
    LowRank,
    OneBit,
    Quantized,
    Rows,
    TopK,
)
from slipstream.consistency import All, Consistency, FirstOf, Lag, StaleSynchronous
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Prefer, Route
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.systems import ako, poseidon, push_pull
from slipstream.topologies import Mesh, PeerSharded, Sharded, TwoLevel
from slipstream.updates import ClipNorm, Ema, Update, UserOptimizer

WHOLE = Sharded(whole_layers=True)
HOLDER = Update(outer=UserOptimizer(at="server"))
SMALL = 4096  # bytes: several chunks even of small models
CRUMBS = 512  # so many that workers' shares of them are even


def compact(topology: Mesh | Sharded | TwoLevel) -> Prefer:
    """Layers as factors or rows, everything else dense."""
    ups = (Factors(), Rows(), Dense())
    return Prefer(tuple(Route(topology, up=up) for up in ups))


FILTERED = Prefer((Route(Sharded(), up=Filter(Above(Drop(0.8)))), Route(Sharded())))

RANK = LowRank(4)


def low(route: Route) -> Prefer:
    """Matrices by this route, biases dense."""
    return Prefer((route, Route(route.topology)))


MIXES = {
    "factors, first hosts": Strategy(
        "factors_hosts", Rounds(compact(TwoLevel(WHOLE)), Consistency(FirstOf(2)), HOLDER)
    ),
    "factors of 8 bits, hosts first": Strategy(
        "factors_int8_hosts",
        Rounds(Prefer((Route(TwoLevel(Mesh()), up=Factors("int8")), Route(TwoLevel(Mesh()))))),
    ),
    "poseidon in 8 bits, hosts first": poseidon(wire="int8", rate="200mbit"),
    "low rank, hosts first": Strategy("rank_hosts", Rounds(low(Route(TwoLevel(), RANK, RANK)))),
    "shares of hosts, 8 bits": Strategy(
        "shares_hosts",
        Rounds(
            Everywhere(Route(TwoLevel(PeerSharded()), Quantized(8, 64), Quantized(8, 64))),
            chunk_bytes=CRUMBS,
        ),
    ),
    "low rank both ways": Strategy(
        "rank_sharded", Rounds(low(Route(Sharded(), RANK, RANK)), chunk_bytes=SMALL)
    ),
    "low rank on a mesh": Strategy("rank_mesh", Rounds(low(Route(Mesh(), RANK)))),
    "low rank, staleness": Strategy(
        "rank_lag", Rounds(low(Route(Sharded(), RANK, RANK)), Consistency(All(), Lag(1)))
    ),
    "low rank, backup workers": Strategy(
        "rank_backup",
        Rounds(
            Prefer((Route(Sharded(), RANK), Route(Sharded(), Quantized(8, block=64)))),
            Consistency(FirstOf(2)),
            HOLDER,
            chunk_bytes=SMALL // 4,
        ),
    ),
    "factors, backup workers": Strategy(
        "factors_backup", Rounds(compact(WHOLE), Consistency(FirstOf(2)), HOLDER)
    ),
    "factors, all workers": Strategy(
        "factors_all", Rounds(compact(WHOLE), Consistency(FirstOf(3)), HOLDER)
    ),
    "factors on a mesh, staleness": Strategy(
        "factors_lag", Rounds(compact(Mesh()), Consistency(All(), Lag(2)))
    ),
    "factors at servers, staleness": Strategy(
        "factors_fold", Rounds(compact(WHOLE), Consistency(StaleSynchronous(), Lag(2)))
    ),
    "filter, backup workers": Strategy(
        "filter_backup", Rounds(FILTERED, Consistency(FirstOf(2)), HOLDER, chunk_bytes=SMALL)
    ),
    "4 bits of the largest, backup workers": Strategy(
        "largest_backup",
        Rounds(
            Everywhere(Route(Sharded(), up=Filter(TopK(0.1), values="int4"))),
            Consistency(FirstOf(2)),
            HOLDER,
            chunk_bytes=SMALL,
        ),
    ),
    "4 bits of the largest, shares of workers": Strategy(
        "largest_peers",
        Rounds(
            Everywhere(
                Route(
                    PeerSharded(),
                    up=Filter(TopK(0.3), values="int4"),
                    down=Filter(TopK(0.3), values="int8"),
                )
            )
        ),
    ),
    "one bit on a mesh": Strategy("one_bit_mesh", Rounds(Everywhere(Route(Mesh(), up=OneBit())))),
    "one bit, backup workers": Strategy(
        "one_bit_backup",
        Rounds(Everywhere(Route(Sharded(), up=OneBit())), Consistency(FirstOf(2)), HOLDER),
    ),
    "8 bits, backup workers": Strategy(
        "int8_backup",
        Rounds(
            Everywhere(Route(Sharded(), up=Quantized(8, block=64))), Consistency(FirstOf(2)), HOLDER
        ),
    ),
    "8 bits both ways": Strategy(
        "int8",
        Rounds(
            Everywhere(Route(Sharded(), up=Quantized(8, block=64), down=Quantized(8, block=64)))
        ),
    ),
    "4 bits by chance, on a mesh": Strategy(
        "int4_mesh",
        Rounds(Everywhere(Route(Mesh(), up=Quantized(4, 32, rounding="stochastic", seed=5)))),
    ),
    "8 bits, hosts first": Strategy(
        "int8_hosts",
        Rounds(
            Everywhere(Route(TwoLevel(), up=Quantized(8, block=64), down=Quantized(8, block=64)))
        ),
    ),
    "filter, hosts first": Strategy(
        "filter_hosts",
        Rounds(Everywhere(Route(TwoLevel(), up=Filter(Above(Drop(0.8))))), chunk_bytes=SMALL),
    ),
    "bf16 on a mesh": Strategy(
        "bf16_mesh", Rounds(Everywhere(Route(Mesh(), up=Dense("bfloat16"))))
    ),
    "shares of workers": Strategy(
        "peers", Rounds(Everywhere(Route(PeerSharded())), chunk_bytes=CRUMBS)
    ),
    "shares of workers, 8 bits up, 4 down": Strategy(
        "int8_peers",
        Rounds(
            Everywhere(Route(PeerSharded(), up=Quantized(8, 64), down=Quantized(4, 32))),
            chunk_bytes=CRUMBS,
        ),
    ),
    "shares of workers, 8 bits, staleness": Strategy(
        "int8_peers_lag",
        Rounds(
            Everywhere(Route(PeerSharded(), up=Quantized(8, 64), down=Quantized(8, 64))),
            Consistency(All(), Lag(2)),
            chunk_bytes=CRUMBS,
        ),
    ),
    "factors of 8 bits on a mesh": Strategy(
        "int8_factors",
        Rounds(Prefer((Route(Mesh(), up=Factors("int8", seed=3)), Route(Mesh())))),
    ),
    "filtered slices": ako(partitions=2, staleness=1, rate="1gbit", delta=1e-4),
    "averaged at workers": push_pull(averaged=0.8),
    "clipped at workers": push_pull(clip_norm=0.05),
    "clipped, stale, at workers": Strategy(
        "clipped_stale",
        Rounds(
            Everywhere(Route(Sharded())),
            Consistency(StaleSynchronous(), Lag(1)),
            Update(before=(ClipNorm(0.05),), average=Ema(0.8)),
            AfterBackward(),
        ),
    ),
}
