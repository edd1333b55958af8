"""How fast the value-bounded filter is on one thread, beside tensor operations and squeezing.

python benchmarks/filter_speed.py --json filter_speed.json

Speeds are GB/s of fp32: of the gradient where it is filtered and packed, of the destination where a
frame is added to it. Four of five entries stay behind, as in the paper's figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from slipstream import _native
from slipstream.apps.bench.comparison import machine_facts
from slipstream.codecs import Above, Drop, Filter
from slipstream.types import EncodeContext, Values

NUMELS = (4 << 20, 512 << 10)
DELTA = 1.2815515655446004  # four fifths of a normal distribution are within
METHODS = ("snappy", "lz4", "zstd")
KERNELS = {
    "dispatched": (_native.bounded_pack, _native.bounded_add),
    "portable": (_native.bounded_pack_portable, _native.bounded_add_portable),
}
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """``times_smaller`` is dense bytes over bytes sent, where anything is sent."""

    numel: int
    what: str
    how: str
    gbytes_per_s: float
    times_smaller: float | None = None


def best_s(task: Callable[[], object], budget_s: float) -> float:
    """The shortest of as many runs as fit: whatever else the machine does only adds to it."""
    task()
    best, end = float("inf"), time.perf_counter() + budget_s
    while (begun := time.perf_counter()) < end:
        task()
        best = min(best, time.perf_counter() - begun)
    return best


def gradients(numel: int) -> Iterator[Array]:
    """One and its opposite, in turns: so what stays cancels, and four fifths stay every time."""
    gradient = np.random.default_rng(0).normal(size=numel).astype(np.float32)
    return itertools.cycle([gradient, -gradient])


def measure(numel: int, budget_s: float) -> Iterator[Figure]:
    def speed(task: Callable[[], object]) -> float:
        return 4 * numel / best_s(task, budget_s) / 1e9

    for kernel, (pack, add) in KERNELS.items():
        for values in ("float32", "bfloat16"):
            turns, residual = gradients(numel), np.zeros(numel, np.float32)
            room = np.zeros(_native.bounded_nbytes(numel, values), np.uint8)

            def filtering(pack=pack, room=room, turns=turns, kept=residual, values=values) -> int:
                return pack(room, next(turns), kept, DELTA, values)

            how = f"{kernel}, {values}"
            frame = room[: filtering()].copy()
            yield Figure(numel, "filter", how, speed(filtering), 4 * numel / frame.size)
            out = np.zeros(numel, np.float32)
            yield Figure(numel, "add", how, speed(lambda add=add, o=out, f=frame: add(o, f)))
    yield from tensor_operations(numel, speed)
    for codec in codecs():
        yield from whole_codec(codec, numel, speed)
    if find_spec("cramjam") is not None:
        yield from zeros_squeezed(numel, speed)


def tensor_operations(
    numel: int, speed: Callable[[Callable[[], object]], float]
) -> Iterator[Figure]:
    """The same in torch: a mask (a byte an entry), the entries it selects, and the others kept."""
    turns = map(torch.from_numpy, gradients(numel))
    residual, zero = torch.zeros(numel), torch.zeros(())

    def filtering() -> tuple[torch.Tensor, torch.Tensor]:
        acc = next(turns) + residual
        travels = acc.abs() > DELTA
        chosen = acc[travels]
        torch.where(travels, zero, acc, out=residual)
        return travels, chosen

    yield Figure(numel, "filter", "tensor operations", speed(filtering))
    travels, chosen = filtering()
    out = torch.zeros(numel)

    def adding() -> None:
        out[travels] += chosen

    yield Figure(numel, "add", "tensor operations", speed(adding))


def codecs() -> Iterator[Filter]:
    yield Filter(Above(DELTA))
    yield Filter(Above(Drop(0.8)))
    if find_spec("cramjam") is not None:
        yield from (Filter(Above(DELTA), squeeze=method) for method in METHODS)


def whole_codec(
    codec: Filter, numel: int, speed: Callable[[Callable[[], object]], float]
) -> Iterator[Figure]:
    """As training uses it, with the memory that a frame takes."""
    turns, memory = gradients(numel), codec.init(numel, "float32")
    clocks = itertools.count(1)

    def encoding() -> Any:
        values = Values(next(turns).view(np.uint8), "float32")
        return codec.encode(values, memory, EncodeContext(next(clocks)))

    frames = encoding()
    smaller = 4 * numel / memoryview(frames[0]).nbytes
    how = f"codec, {codec.name}" + (" (share)" if isinstance(codec.select.delta, Drop) else "")
    yield Figure(numel, "filter", how, speed(encoding), smaller)
    out = Values.empty(numel, "float32")
    yield Figure(numel, "write", how, speed(lambda: codec.decode_into(frames, out)))


def zeros_squeezed(numel: int, speed: Callable[[Callable[[], object]], float]) -> Iterator[Figure]:
    """No bitmap: zeros in place of what stays, left to the compressor."""
    library: Any = import_module("cramjam")
    gradient = next(gradients(numel))
    content = np.where(np.abs(gradient) > DELTA, gradient, np.float32(0)).view(np.uint8)
    for method, compress in (
        ("snappy", library.snappy.compress_raw),
        ("lz4", library.lz4.compress_block),
        ("zstd", lambda data: library.zstd.compress(data, level=1)),
    ):
        smaller = 4 * numel / len(compress(content))
        rate = speed(lambda compress=compress: compress(content))
        yield Figure(numel, "squeeze", f"zeros, {method}", rate, smaller)


def report(what: str, measure: Callable[[int, float], Iterator[Figure]]) -> None:
    """Read the command line, measure, and print and write the figures."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--budget-s", type=float, default=1.0, help="for each figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = machine_facts()
    table = Table("entries", "what", "how", "GB/s", "times smaller")
    figures = []
    for numel in NUMELS:
        for figure in measure(numel, args.budget_s):
            figures.append(figure)
            smaller = f"{figure.times_smaller:.2f}" if figure.times_smaller else ""
            speed = f"{figure.gbytes_per_s:.2f}"
            table.add_row(f"{numel >> 10} Ki", figure.what, figure.how, speed, smaller)
    Console().print(table)
    if args.json:
        found = {"machine": machine, "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    report(__doc__.splitlines()[0], measure)
