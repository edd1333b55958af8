"""AlexNet with one tower (Krizhevsky, 2014): no groups, so that every weight is one matrix.

61.10M parameters; Poseidon and GaDei give 61.5M and 61.1M. Poseidon, section 2.2: a batch of 256
takes 0.25 s on a Titan X.
"""

from __future__ import annotations

from slipstream.apps.bench.tables.layers import Table, conv, fc, timed


def alexnet() -> Table:
    layers = (
        conv("conv1", 3, 64, 11, 55),
        conv("conv2", 64, 192, 5, 27),
        conv("conv3", 192, 384, 3, 13),
        conv("conv4", 384, 256, 3, 13),
        conv("conv5", 256, 256, 3, 13),
        fc("fc6", 256 * 6 * 6, 4096),
        fc("fc7", 4096, 4096),
        fc("fc8", 4096, 1000),
    )
    return timed(
        "alexnet",
        layers,
        batch=256,
        images_per_s=256 / 0.25,
        origin="1024 images/s: Poseidon, section 2.2, 0.25 s for 256 images on one Titan X",
    )
