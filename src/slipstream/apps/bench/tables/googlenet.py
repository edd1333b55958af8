"""GoogLeNet (Szegedy et al., 2015) as Caffe trains it, without the two auxiliary heads.

7.00M parameters with biases. Poseidon's Table 3 says 5M, which no reading of the published layers
gives (5.97M without the classifier; 13.4M with the auxiliary heads). Its classifier of 1000 × 1024
is the one fully connected layer, as in Poseidon's section 5.2. Caffe does 257 images/s at 128.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.apps.bench.tables.layers import Layer, Table, conv, fc, timed

# Name, size, and output channels: 1×1; 3×3 reduce, 3×3; 5×5 reduce, 5×5; pool projection.
MODULES = (
    ("3a", 28, (64, 96, 128, 16, 32, 32)),
    ("3b", 28, (128, 128, 192, 32, 96, 64)),
    ("4a", 14, (192, 96, 208, 16, 48, 64)),
    ("4b", 14, (160, 112, 224, 24, 64, 64)),
    ("4c", 14, (128, 128, 256, 24, 64, 64)),
    ("4d", 14, (112, 144, 288, 32, 64, 64)),
    ("4e", 14, (256, 160, 320, 32, 128, 128)),
    ("5a", 7, (256, 160, 320, 32, 128, 128)),
    ("5b", 7, (384, 192, 384, 48, 128, 128)),
)


def layers() -> Iterator[Layer]:
    yield conv("conv1", 3, 64, 7, 112)
    yield conv("conv2/reduce", 64, 64, 1, 56)
    yield conv("conv2", 64, 192, 3, 56)
    inputs = 192
    for name, size, channels in MODULES:
        one, reduce3, three, reduce5, five, pool = channels
        yield conv(f"{name}/1x1", inputs, one, 1, size)
        yield conv(f"{name}/3x3_reduce", inputs, reduce3, 1, size)
        yield conv(f"{name}/3x3", reduce3, three, 3, size)
        yield conv(f"{name}/5x5_reduce", inputs, reduce5, 1, size)
        yield conv(f"{name}/5x5", reduce5, five, 5, size)
        yield conv(f"{name}/pool", inputs, pool, 1, size)
        inputs = one + three + five + pool
    yield fc("classifier", inputs, 1000)


def googlenet() -> Table:
    return timed(
        "googlenet",
        tuple(layers()),
        batch=128,
        images_per_s=257,
        origin="257 images/s: Poseidon, section 5.1, one Titan X under Caffe",
    )
