"""What a codec says that a tensor takes on the wire, against messages that it packed."""

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream._native import mean_into
from slipstream.codecs import (
    Above,
    AnyCodec,
    Codec,
    Dense,
    Drop,
    Factors,
    Filter,
    LayerCodec,
    LowRank,
    OneBit,
    Quantized,
    Rows,
    TopK,
)
from slipstream.codecs.matrices import HEADER, Matrix, matrix_nbytes, quantize, to_frames
from slipstream.codecs.partition import PeerAccumulators, Rotation, packed
from slipstream.codecs.quantized import FEW_BITS
from slipstream.methods import PartialExchange
from slipstream.types import ITEM_BYTES, Buffer, EncodeContext, Spec, Values

ODD = 12_347  # values that fill no block, and no byte of bits
FIXED: dict[str, Codec] = {
    **{f"dense-{wire}": Dense(wire) for wire in ("same", "float32", "bfloat16", "float16")},
    "one-bit": OneBit(),
    "int8": Quantized(8),
    "int4": Quantized(4, block=32),
}


def size(frames: tuple[Buffer, ...]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def spec(*shape: int, dtype: str = "float32", **more: Any) -> Spec:
    return Spec("w", shape, dtype, 0, **more)


def normal(numel: int, dtype: str = "float32", seed: int = 0) -> Values:
    out = Values.empty(numel, dtype)
    numbers = np.random.default_rng(seed).normal(size=numel)
    mean_into(out.data, [numbers], "float64", 1.0, out_dtype=dtype)
    return out


def packed_bytes(codec: Codec, values: Values) -> int:
    residual = codec.init(values.numel, values.dtype)
    return size(codec.encode(values, residual, EncodeContext()))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("numel", [0, 1, 63, ODD])
def test_wire_bytes_of_codecs_of_fixed_size_are_exact(name: str, dtype: str, numel: int) -> None:
    codec, tensor = FIXED[name], spec(numel, dtype=dtype)
    if not codec.obstacle(tensor):
        assert codec.wire_bytes(tensor, 4) == packed_bytes(codec, normal(numel, dtype))


def test_wire_bytes_of_low_rank_are_the_mean_of_its_two_sides() -> None:
    codec, tensor = LowRank(rank=3), spec(70, 4, 9)
    bases, residual, values = codec.agree(tensor.shape), codec.init(70 * 36, ""), normal(70 * 36)
    sizes = []
    for round_ in range(2):
        frames = bases.at(round_).encode(values, residual, EncodeContext())
        bases.learn(round_, bases.at(round_).merge([frames], divisor=1.0))
        sizes.append(size(frames))
    assert sizes[0] != sizes[1]
    assert codec.wire_bytes(tensor, 4) == sum(sizes) / 2


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 1.0])
def test_wire_bytes_of_top_k_are_at_most_a_quarter_too_many(values: Any, share: float) -> None:
    """Gaps between entries depend on values: those that are said are the longest possible."""
    codec = Filter(TopK(share), values)
    said, sent = codec.wire_bytes(spec(ODD), 4), packed_bytes(codec, normal(ODD))
    assert 0.75 * said <= sent <= said


@given(
    numel=st.integers(1, 3000),
    share=st.floats(0.001, 1),
    crowd=st.floats(0, 1),
    values=st.sampled_from(["float32", "bfloat16", "int8", "int4"]),
)
def test_wire_bytes_of_top_k_are_the_most_wherever_entries_are(
    numel: int, share: float, crowd: float, values: Any
) -> None:
    codec, content = Filter(TopK(share), values), normal(numel, seed=numel)
    content.data.view(np.float32)[: int(crowd * numel)] *= 100
    assert packed_bytes(codec, content) <= codec.wire_bytes(spec(numel), 4)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.85, 0.99])
def test_wire_bytes_of_a_share_to_drop_are_within_two_points(ratio: float) -> None:
    """The bound is estimated from a sample, so that the share is nearly exact."""
    codec = Filter(Above(Drop(ratio)))
    said, sent = codec.wire_bytes(spec(8 * ODD), 4), packed_bytes(codec, normal(8 * ODD))
    assert abs(said - sent) <= 0.02 * 5 * 8 * ODD


@pytest.mark.parametrize("bound", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "int4"])
def test_wire_bytes_of_a_bound_are_those_of_all_entries(bound: float, values: Any) -> None:
    codec = Filter(Above(bound, decay="constant"), values)
    said, sent = codec.wire_bytes(spec(ODD), 4), packed_bytes(codec, normal(ODD))
    assert sent <= said
    if bound == 0.0:
        assert sent >= said - 2 * ODD / 8, "positions, where the form without them is longer"


@pytest.mark.parametrize("above", [None, Above(Drop(0.9))])
def test_wire_bytes_of_a_rotation_are_those_of_one_partition(above: Above | None) -> None:
    turns = PeerAccumulators(Rotation(4), sender=0, peers=[1], numel=ODD)
    (accumulator,) = turns.accumulators
    turns.add(normal(ODD).data.view(np.float32))
    sizes = []
    for _ in range(4):
        _, values = turns.take(accumulator, above)
        sizes.append(values.nbytes if above is None else size((packed(values),)))
    said = PartialExchange(4, held_back=above).wire_bytes(spec(ODD), 9)
    assert said == np.mean(sizes) if above is None else said == pytest.approx(np.mean(sizes), 0.2)
    default = PartialExchange().wire_bytes(spec(ODD), 5)
    assert default == 4 * ODD / 4, "as many partitions as peers"


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("wire", ["same", "float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", [Factors, Rows])
@pytest.mark.parametrize("transposed", [False, True])
def test_wire_bytes_of_layers_are_exact_but_for_headers(
    kind: type[LayerCodec], wire: Any, dtype: str, transposed: bool
) -> None:
    rows, (outputs, inputs), codec = 37, (61, 43), kind(wire)
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    form = "factors" if kind is Factors else "rows"
    weight = spec(*shape, dtype=dtype, layer="fc", form=form, transposed=transposed)
    first = (inputs, dtype) if kind is Factors else (1, "int64")
    second = (outputs, dtype) if kind is Factors else (inputs, dtype)
    sent = 0
    for place, (width, own) in enumerate((first, second)):
        travels_as = codec.wire_dtype(own, place)
        content = np.empty(matrix_nbytes(rows * width, travels_as), np.uint8)
        if travels_as in FEW_BITS:
            quantize(content, normal(rows * width).data, travels_as, seed=1)
        sent += size(to_frames(Matrix(rows, content, travels_as)))
    assert codec.wire_bytes(weight, 4, rows) == sent - 2 * HEADER.size
    assert codec.wire_bytes(spec(outputs, layer="fc", form=form), 4, rows) == 0, "the bias"


def test_every_codec_says_its_bytes() -> None:
    """A new codec needs a test here."""
    tested = {*map(type, FIXED.values()), LowRank, Filter, Factors, Rows}
    assert tested == set(get_args(AnyCodec))
