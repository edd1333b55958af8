"""Dense against torch's own conversions, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.errors import ConfigError, FrameRefused
from slipstream.types import ITEM_BYTES, Spec, Values

DTYPES = tuple(ITEM_BYTES)
WIRES: tuple[Wire, ...] = ("same", "float32", "bfloat16", "float16")
# Small enough to stay finite in float16; of 32 bits, because torch rounds 64 to 16 bits twice.
NUMBERS = st.lists(st.floats(-60000, 60000, width=32), max_size=70)


def tensor(numbers: list[float], dtype: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(getattr(torch, dtype))


def values(content: torch.Tensor) -> Values:
    raw = content.contiguous().view(torch.uint8).numpy()
    return Values(raw, str(content.dtype).removeprefix("torch."))


def numbers_of(frame: object, dtype: str) -> torch.Tensor:
    raw = bytearray(memoryview(frame))  # type: ignore[arg-type]
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)


def expected_wire(wire: Wire, dtype: str) -> str:
    return wire if wire != "same" and ITEM_BYTES[wire] < ITEM_BYTES[dtype] else dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
@given(numbers=NUMBERS)
def test_the_frame_holds_torchs_rounding_to_the_wire_format(
    wire: Wire, dtype: str, numbers: list[float]
) -> None:
    content = tensor(numbers, dtype)
    (frame,) = Dense(wire).encode(values(content))
    short = expected_wire(wire, dtype)
    assert memoryview(frame).nbytes == len(numbers) * ITEM_BYTES[short]
    assert torch.equal(numbers_of(frame, short), content.to(getattr(torch, short)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", WIRES)
@given(numbers=NUMBERS)
def test_decoding_is_exact(wire: Wire, dtype: str, numbers: list[float]) -> None:
    content = tensor(numbers, dtype)
    out = Values.empty(len(numbers), dtype)
    Dense(wire).decode_into(Dense(wire).encode(values(content)), out)
    short = getattr(torch, expected_wire(wire, dtype))
    assert torch.equal(numbers_of(out.data, dtype), content.to(short).to(content.dtype))


@pytest.mark.parametrize("wide", ["float32", "bfloat16", "float16"])
def test_a_wire_wider_than_the_tensor_keeps_the_tensors_own(wide: Wire) -> None:
    for dtype in ("bfloat16", "float16"):
        assert Dense(wide).wire_dtype(dtype) == dtype
    assert Dense("float32").wire_dtype("float64") == "float32"
    content = tensor([1.0, 2.5], "bfloat16")
    (frame,) = Dense("float32").encode(values(content))
    assert memoryview(frame).nbytes == 4


def test_own_precision_travels_without_a_copy() -> None:
    content = values(tensor([1.0, 2.0], "float32"))
    (frame,) = Dense().encode(content)
    assert frame is content.data


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contributions", [1, 2, 3, 5])
def test_the_mean_is_summed_in_the_order_given_and_rounded_once(
    wire: Wire, dtype: str, contributions: int
) -> None:
    generator = torch.Generator().manual_seed(contributions)
    tensors = [
        torch.randn(301, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        for _ in range(contributions)
    ]
    codec = Dense(wire)
    out = Values.empty(301, dtype)
    codec.combine([codec.encode(values(t)) for t in tensors], out, divisor=contributions)
    wide = torch.float64 if dtype == "float64" else torch.float32
    short = getattr(torch, codec.wire_dtype(dtype))
    total = tensors[0].to(short).to(wide)
    for term in tensors[1:]:
        total = total + term.to(short).to(wide)
    assert torch.equal(numbers_of(out.data, dtype), (total / contributions).to(tensors[0].dtype))


def test_order_matters_so_it_is_kept() -> None:
    codec = Dense()
    terms = [values(tensor([x], "float32")) for x in (1e8, 1.0, -1e8)]
    out = Values.empty(1, "float32")
    codec.combine([codec.encode(t) for t in terms], out, divisor=1)
    assert numbers_of(out.data, "float32").item() == 0.0
    codec.combine([codec.encode(terms[i]) for i in (0, 2, 1)], out, divisor=1)
    assert numbers_of(out.data, "float32").item() == 1.0


@pytest.mark.parametrize("wire", WIRES)
@given(st.sampled_from(DTYPES), st.integers(0, 50), st.integers(0, 500))
def test_only_the_announced_size_passes(wire: Wire, dtype: str, numel: int, nbytes: int) -> None:
    right = numel * ITEM_BYTES[expected_wire(wire, dtype)]
    Dense(wire).examine([bytes(right)], numel, dtype)
    if nbytes != right:
        with pytest.raises(FrameRefused, match=f"{nbytes} bytes where {numel} values take {right}"):
            Dense(wire).examine([bytes(nbytes)], numel, dtype)


def test_sizes_are_counted_in_bytes_whatever_the_buffer_is_made_of() -> None:
    Dense().examine([np.zeros(5, np.float32)], 5, "float32")
    with pytest.raises(FrameRefused):
        Dense().examine([np.zeros(20, np.float32)], 5, "float32")


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_refused_before_start(dtype: str) -> None:
    told = Dense().obstacle(Spec("w", (2,), dtype, 0))
    assert told.startswith(f"it is {dtype}; slipstream exchanges float32, ")
    assert "requires_grad_(False)" in told


def test_names_tell_wire_formats_apart() -> None:
    assert [Dense(wire).name for wire in WIRES] == [
        "dense",
        "dense-float32",
        "dense-bfloat16",
        "dense-float16",
    ]


@pytest.mark.parametrize("wire", ["int3", "fp16", "", None, ["same"]])
def test_an_unknown_wire_format_lists_those_there_are(wire: Wire) -> None:
    with pytest.raises(ConfigError, match=r"wire=.*same, float32, bfloat16, float16"):
        Dense(wire)
