"""Inception-V3 (Szegedy et al., 2016) with its auxiliary head, batch normalisation counted with
its convolution.

27.16M parameters, as Poseidon's Table 3 has it (27M); 23.83M without the auxiliary head. Layers
are in torchvision's order. TensorFlow does 43.2 images/s at a batch of 32.
"""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.apps.bench.tables.layers import Layer, Table, conv, fc, timed

Step = tuple[str, int, int | tuple[int, int], int]  # name, output channels, kernel, output size
ROW, COLUMN = (1, 7), (7, 1)
FLAT, TALL = (1, 3), (3, 1)


def chain(module: str, inputs: int, *steps: Step) -> Iterator[Layer]:
    """Yield convolutions one after the other."""
    for name, outputs, kernel, size in steps:
        yield conv(f"{module}/{name}", inputs, outputs, kernel, size, norm=True)
        inputs = outputs


def grid35(module: str, inputs: int, pool: int) -> Iterator[Layer]:
    yield from chain(module, inputs, ("1x1", 64, 1, 35))
    yield from chain(module, inputs, ("5x5_1", 48, 1, 35), ("5x5_2", 64, 5, 35))
    double = (("3x3dbl_1", 64, 1, 35), ("3x3dbl_2", 96, 3, 35), ("3x3dbl_3", 96, 3, 35))
    yield from chain(module, inputs, *double)
    yield from chain(module, inputs, ("pool", pool, 1, 35))


def reduce35(module: str, inputs: int) -> Iterator[Layer]:
    yield from chain(module, inputs, ("3x3", 384, 3, 17))
    double = (("3x3dbl_1", 64, 1, 35), ("3x3dbl_2", 96, 3, 35), ("3x3dbl_3", 96, 3, 17))
    yield from chain(module, inputs, *double)


def grid17(module: str, inner: int) -> Iterator[Layer]:
    yield from chain(module, 768, ("1x1", 192, 1, 17))
    single = (("7x7_1", inner, 1, 17), ("7x7_2", inner, ROW, 17), ("7x7_3", 192, COLUMN, 17))
    yield from chain(module, 768, *single)
    double = (
        ("7x7dbl_1", inner, 1, 17),
        ("7x7dbl_2", inner, COLUMN, 17),
        ("7x7dbl_3", inner, ROW, 17),
        ("7x7dbl_4", inner, COLUMN, 17),
        ("7x7dbl_5", 192, ROW, 17),
    )
    yield from chain(module, 768, *double)
    yield from chain(module, 768, ("pool", 192, 1, 17))


def auxiliary() -> Iterator[Layer]:
    yield from chain("aux", 768, ("conv0", 128, 1, 5), ("conv1", 768, 5, 1))
    yield fc("aux/fc", 768, 1000)


def reduce17(module: str) -> Iterator[Layer]:
    yield from chain(module, 768, ("3x3_1", 192, 1, 17), ("3x3_2", 320, 3, 8))
    seven = (
        ("7x7x3_1", 192, 1, 17),
        ("7x7x3_2", 192, ROW, 17),
        ("7x7x3_3", 192, COLUMN, 17),
        ("7x7x3_4", 192, 3, 8),
    )
    yield from chain(module, 768, *seven)


def grid8(module: str, inputs: int) -> Iterator[Layer]:
    """Yield a module whose branches split twice: the last two convolutions have the same input."""
    yield from chain(module, inputs, ("1x1", 320, 1, 8))
    yield from chain(module, inputs, ("3x3_1", 384, 1, 8))
    for name, kernel in (("3x3_2a", FLAT), ("3x3_2b", TALL)):
        yield from chain(module, 384, (name, 384, kernel, 8))
    yield from chain(module, inputs, ("3x3dbl_1", 448, 1, 8), ("3x3dbl_2", 384, 3, 8))
    for name, kernel in (("3x3dbl_3a", FLAT), ("3x3dbl_3b", TALL)):
        yield from chain(module, 384, (name, 384, kernel, 8))
    yield from chain(module, inputs, ("pool", 192, 1, 8))


def layers() -> Iterator[Layer]:
    stem = (("1a", 32, 3, 149), ("2a", 32, 3, 147), ("2b", 64, 3, 147))
    yield from chain("conv", 3, *stem, ("3b", 80, 1, 73), ("4a", 192, 3, 71))
    for name, inputs, pool in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        yield from grid35(f"mixed_{name}", inputs, pool)
    yield from reduce35("mixed_6a", 288)
    for name, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        yield from grid17(f"mixed_{name}", inner)
    yield from auxiliary()
    yield from reduce17("mixed_7a")
    yield from grid8("mixed_7b", 1280)
    yield from grid8("mixed_7c", 2048)
    yield fc("fc", 2048, 1000)


def inception_v3() -> Table:
    return timed(
        "inception-v3",
        tuple(layers()),
        batch=32,
        images_per_s=43.2,
        origin="43.2 images/s: Poseidon, section 5.1, one Titan X under TensorFlow",
    )
