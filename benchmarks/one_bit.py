"""How fast the one-bit kernels are on one core, with AVX2 (where there is any) and without.

python benchmarks/one_bit.py --json one_bit.json

Speeds are GB/s of fp32: of the gradient where it is packed, of the result where it is unpacked.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipstream import _native
from slipstream.apps.bench.comparison import machine_facts

KERNELS = {
    "dispatched": (_native.one_bit_pack, _native.one_bit_unpack),
    "portable": (_native.one_bit_pack_portable, _native.one_bit_unpack_portable),
}
SIZES_MIB = (2, 8, 64)


def tasks(kernel: str, mib: int, inputs: int) -> dict[str, Callable[[], None]]:
    """What a worker and a server do with a segment of this size."""
    pack, unpack = KERNELS[kernel]
    gradient = np.random.default_rng(0).normal(size=mib << 18).astype(np.float32)
    residual, out = np.zeros_like(gradient), np.zeros_like(gradient)
    packed = np.zeros(8 + gradient.size // 8, np.uint8)
    return {
        "pack": lambda: pack(packed, gradient, residual),
        "unpack": lambda: unpack(out, [packed]),
        f"mean of {inputs}": lambda: unpack(out, [packed] * inputs, inputs),
    }


def best_s(task: Callable[[], None], budget_s: float) -> float:
    """The shortest of as many runs as fit: whatever else the machine does only adds to it."""
    task()
    best, end = float("inf"), time.perf_counter() + budget_s
    while (begun := time.perf_counter()) < end:
        task()
        best = min(best, time.perf_counter() - begun)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=0.5, help="for each figure")
    parser.add_argument("--inputs", type=int, default=4, help="of the mean")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = machine_facts()
    speeds = []
    for kernel in KERNELS:
        for mib in SIZES_MIB:
            told = []
            for task, run in tasks(kernel, mib, args.inputs).items():
                gbytes = mib * 2**20 / best_s(run, args.budget_s) / 1e9
                told.append(f"{task} {gbytes:5.1f} GB/s")
                speeds.append({"kernel": kernel, "mib": mib, "task": task, "gbytes_per_s": gbytes})
            print(f"{kernel:10} {mib:3} MiB: {', '.join(told)}")
    if args.json:
        report = {"machine": machine, "speeds": speeds}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
