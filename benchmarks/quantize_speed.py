"""How fast values are quantised and summed on one thread, beside tensor operations.

python benchmarks/quantize_speed.py --json quantize_speed.json

Speeds are GB/s of fp32: of the gradient where it is packed, of all contributions where they are
unpacked and added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from filter_speed import Figure, best_s, report

from slipstream import _native

BLOCKS = {8: 256, 4: 128}
CONTRIBUTIONS = 4
KERNELS = {
    "dispatched": (_native.quantize_pack, _native.quantize_unpack),
    "portable": (_native.quantize_pack_portable, _native.quantize_unpack_portable),
}


def measure(numel: int, budget_s: float) -> Iterator[Figure]:
    def speed(task: Callable[[], object], arrays: int = 1) -> float:
        return 4 * numel * arrays / best_s(task, budget_s) / 1e9

    gradient = np.random.default_rng(0).normal(size=numel).astype(np.float32)
    residual, out = np.zeros(numel, np.float32), np.empty(numel, np.float32)
    for bits, block in BLOCKS.items():
        frame = np.empty(_native.quantized_nbytes(numel, bits, block), np.uint8)
        frames = [frame] * CONTRIBUTIONS
        for kernel, (pack, unpack) in KERNELS.items():
            for rounding, seed in (("nearest", None), ("stochastic", 1)):
                rate = speed(lambda: pack(frame, gradient, residual, bits, block, seed))  # noqa: B023
                how = f"{kernel}, {bits} bits, {rounding}"
                yield Figure(numel, "pack", how, rate, 4 * numel / frame.size)
            rate = speed(lambda: unpack(out, frames, bits, block, 4.0), CONTRIBUTIONS)  # noqa: B023
            yield Figure(numel, "unpack and add", f"{kernel}, {bits} bits", rate)
    yield Figure(numel, "pack", "tensor operations, 8 bits, nearest", speed(in_torch(gradient)))


def in_torch(gradient: np.ndarray) -> Callable[[], object]:
    """Scales, codes and what they leave, by torch."""
    values, residual = torch.from_numpy(gradient).view(-1, BLOCKS[8]), torch.zeros(gradient.size)
    kept = residual.view(-1, BLOCKS[8])

    def packing() -> object:
        acc = values + kept
        scales = acc.abs().amax(dim=1, keepdim=True) / 127
        codes = torch.round(acc / scales)
        torch.sub(acc, codes * scales, out=kept)
        return scales, codes.to(torch.int8)

    return packing


if __name__ == "__main__":
    report(__doc__.splitlines()[0], measure)
