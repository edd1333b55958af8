"""ResNet-152 (He et al., 2016), batch normalisation counted with its convolution.

60.19M parameters; Poseidon's Table 3 gives 60.2M and a batch of 32, but no single-node speed.
TensorFlow's own benchmarks (May 2017, batch 32, one P100) have 82.7 images/s for it and 128 for
Inception-V3; 82.7/128 of Poseidon's 43.2 for Inception-V3 is 27.9 images/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.apps.bench.tables.layers import Layer, Table, conv, fc, timed

# Blocks of each stage, their inner channels, and the size of their output.
STAGES = ((3, 64, 56), (8, 128, 28), (36, 256, 14), (3, 512, 7))
EXPANSION = 4


def block(name: str, inputs: int, inner: int, size: int, *, project: bool) -> Iterator[Layer]:
    """Yield a bottleneck's layers; as in the paper, the first convolution has the stride."""
    yield conv(f"{name}/conv1", inputs, inner, 1, size, norm=True)
    yield conv(f"{name}/conv2", inner, inner, 3, size, norm=True)
    yield conv(f"{name}/conv3", inner, inner * EXPANSION, 1, size, norm=True)
    if project:
        yield conv(f"{name}/shortcut", inputs, inner * EXPANSION, 1, size, norm=True)


def layers() -> Iterator[Layer]:
    yield conv("conv1", 3, 64, 7, 112, norm=True)
    inputs = 64
    for stage, (count, inner, size) in enumerate(STAGES, start=2):
        for index in range(1, count + 1):
            yield from block(f"conv{stage}_{index}", inputs, inner, size, project=index == 1)
            inputs = inner * EXPANSION
    yield fc("fc", inputs, 1000)


def resnet152() -> Table:
    return timed(
        "resnet-152",
        tuple(layers()),
        batch=32,
        images_per_s=43.2 * 82.7 / 128,
        origin="27.9 images/s: derived; Poseidon's 43.2 for Inception-V3 times 82.7/128, the "
        "two nets' ratio in TensorFlow's benchmarks of May 2017",
    )
