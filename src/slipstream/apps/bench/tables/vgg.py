"""VGG19 (Simonyan and Zisserman, 2015, configuration E), and Poseidon's 21,841-way version of it.

143.67M parameters, and 229.05M. Poseidon's Table 3 gives 143M, 229M and batches of 32; its
single-node Caffe does 35.5 and 34.2 images/s.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.apps.bench.tables.layers import Layer, Table, conv, fc, timed

# Output channels and size of each block, and how many convolutions it has.
BLOCKS = ((64, 224, 2), (128, 112, 2), (256, 56, 4), (512, 28, 4), (512, 14, 4))


def layers(classes: int) -> Iterator[Layer]:
    inputs = 3
    for block, (channels, size, count) in enumerate(BLOCKS, start=1):
        for index in range(1, count + 1):
            yield conv(f"conv{block}_{index}", inputs, channels, 3, size)
            inputs = channels
    yield fc("fc6", 512 * 7 * 7, 4096)
    yield fc("fc7", 4096, 4096)
    yield fc("fc8", 4096, classes)


def vgg19() -> Table:
    return timed(
        "vgg19",
        tuple(layers(1000)),
        batch=32,
        images_per_s=35.5,
        origin="35.5 images/s: Poseidon, section 5.1, one Titan X under Caffe",
    )


def vgg19_22k() -> Table:
    return timed(
        "vgg19-22k",
        tuple(layers(21841)),
        batch=32,
        images_per_s=34.2,
        origin="34.2 images/s: Poseidon, section 5.1, one Titan X under Caffe",
    )
