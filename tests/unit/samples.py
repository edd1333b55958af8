"""Specs, routes and plans for tests, drawn or made to measure."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from slipstream.codecs import Dense, SegmentCodec
from slipstream.methods import Rounds
from slipstream.plan import Plan
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.topologies import AnyTopology, Mesh, Sharded
from slipstream.transports.wire import Push, checksum
from slipstream.types import ITEM_BYTES, Buffer, Chunk, Cluster, Spec, Values
from slipstream.updates import Ema, Update, UserOptimizer

DTYPES = tuple(ITEM_BYTES)
SHAPES = st.lists(st.integers(0, 15), max_size=3).map(tuple)
# More than 32 bits can count; nothing of this size is ever allocated.
HUGE_SHAPES = st.sampled_from([(2**31 + 5,), (3, 2**31), (2**20, 2**13)])


def spec_lists(
    *,
    shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[str] = DTYPES,
    min_size: int = 0,
    max_size: int = 12,
) -> st.SearchStrategy[list[Spec]]:
    """Tensors in any order of declaration; ``order`` is a permutation, as a model's is."""
    tensor = st.tuples(shapes, st.sampled_from(dtypes), st.sampled_from(["parameter", "buffer"]))

    @st.composite
    def draw_specs(draw: st.DrawFn) -> list[Spec]:
        drawn = draw(st.lists(tensor, min_size=min_size, max_size=max_size))
        orders = draw(st.permutations(range(len(drawn))))
        return [
            Spec(f"t{i}", shape, dtype, order, "parameter" if role == "parameter" else "buffer")
            for i, ((shape, dtype, role), order) in enumerate(zip(drawn, orders, strict=True))
        ]

    return draw_specs()


def vector(
    name: str, numel: int, *, order: int = 0, dtype: str = "float32", role: str = "parameter"
) -> Spec:
    return Spec(name, (numel,), dtype, order, "parameter" if role == "parameter" else "buffer")


def make_plan(
    specs: Sequence[Spec],
    *,
    workers: int = 2,
    servers: int = 1,
    topology: AnyTopology | None = None,
    codec: SegmentCodec | None = None,
    at_holder: bool = False,
    average: Ema | None = None,
    chunk_bytes: int = 1 << 21,
) -> Plan:
    """A plan of one dense route; without servers a mesh."""
    where = topology or (Sharded() if servers else Mesh())
    what = codec or Dense()
    strategy = Strategy(
        "sample",
        Rounds(
            Everywhere(Route(where, up=what, down=what)),
            update=Update(
                outer=UserOptimizer("server" if at_holder else "worker"), average=average
            ),
            chunk_bytes=chunk_bytes,
        ),
    )
    return strategy.plan(specs, Cluster(workers, servers))


def floats(*numbers: float) -> Values:
    return values(np.array(numbers, dtype=np.float32))


def values(array: np.ndarray) -> Values:
    return Values(array.view(np.uint8), array.dtype.name)


def push(
    chunk: Chunk,
    segments: Sequence[Values | None],
    *,
    round_: int = 0,
    step: int = 0,
) -> tuple[Push, list[Buffer]]:
    """A worker's message for one chunk, in the tensors' own precision.

    Where all travels dense, units have the numbers of their chunks.
    """
    frames: list[Buffer] = [v.data for v in segments if v is not None]
    counts = [int(v is not None) for v in segments]
    return Push(chunk.index, round_, step, counts, checksum(frames)), frames
