"""The filter codec: some entries are sent, the others wait in a residual until selected."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from slipstream._native import (
    bounded_add,
    bounded_check,
    bounded_nbytes,
    bounded_pack,
    bounded_write,
    mean_into,
)
from slipstream.codecs.protocol import Form
from slipstream.codecs.quantized import FEW_BITS, SCALE_BYTES
from slipstream.codecs.residual import Residual, obstacle_to_residual
from slipstream.codecs.select import Above, AnySelector
from slipstream.errors import ConfigError, FrameRefused
from slipstream.parts import Facts, Part, facts
from slipstream.types import ITEM_BYTES, Buffer, EncodeContext, Spec, Values

Precision = Literal["float32", "bfloat16", "int8", "int4"]
Squeeze = Literal["snappy", "lz4", "zstd"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# As in native/bounded.h: form, values, compression, number of values, bytes before compression.
HEADER = struct.Struct("<BBBxII")
SQUEEZE_PLACE = 2
VALUES_CODES = {"float32": 1, "bfloat16": 2, "int8": 3, "int4": 4}
SQUEEZE_CODES = {"snappy": 1, "lz4": 2, "zstd": 3}
FEW_BITS_BLOCK = 64  # values of few bits that share a scale
ZSTD_LEVEL = 1  # the exponents compress, the rest hardly; higher levels gain nothing


class Filter(Part, frozen=True):
    """Send the entries that ``select`` picks; add the others to the next values.

    With a the values plus the residual r of the last step:

        aᵢ is sent and rᵢ ← 0 where i is selected; elsewhere rᵢ ← aᵢ

    so that what was sent plus what is kept is a, bit for bit. A NaN or an infinity is sent and is
    not kept.

    Args:
        select: Chooses the entries to send: those ``Above`` a bound, or the largest (``TopK``).
        values: The precision on the wire. With "bfloat16", rᵢ ← aᵢ minus its rounded value; with
            "int8" and "int4" too: 64 entries that are sent share a scale, as in ``Quantized``.
        squeeze: The compression of the frame, used where it makes the frame shorter.

    Raises:
        ConfigError: ``values`` or ``squeeze`` is unknown.

    >>> codec, gradient = Filter(Above(0.5, decay="constant")), np.float32([0.25, -2])
    >>> residual = codec.init(2, "float32")
    >>> _ = codec.encode(Values(gradient.view(np.uint8), "float32"), residual, EncodeContext())
    >>> residual.values.tolist()
    [0.25, 0.0]
    """

    select: AnySelector = Above()
    values: Precision = "float32"
    squeeze: Squeeze | None = None

    form: ClassVar[Form] = "dense"
    lossy: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("values", self.values, get_args(Precision)),
            ("squeeze", self.squeeze, (*get_args(Squeeze), None)),
        ):
            if value not in choices:
                known = ", ".join(map(str, choices))
                raise ConfigError(f"{name}={value!r}: choose one of {known}")

    @property
    def name(self) -> str:
        precision = "" if self.values == "float32" else f"-{self.values}"
        return "filter" + precision + (f"-{self.squeeze}" if self.squeeze else "")

    def facts(self) -> Facts:
        shorter = self.values != "float32" or self.squeeze is not None
        known = facts("up: shorter values") if shorter else facts()
        return self.select.facts() | facts("up: dense", "up: error feedback") | known

    def obstacle(self, spec: Spec) -> str:
        if trouble := obstacle_to_residual(spec):
            return trouble
        if self.squeeze is not None and find_spec("cramjam") is None:
            return (
                f"squeeze={self.squeeze!r} needs cramjam, which is not installed: "
                "pip install cramjam, or choose squeeze=None"
            )
        return ""

    def wire_bytes(self, spec: Spec, workers: int, rows: int = 0) -> float:
        """Return the bytes of the entries sent; of all entries if values decide which are sent.

        Sizes are those before ``squeeze``, which depends on values.
        """
        return self.select.wire_bytes(spec.numel, workers, self._packed_bytes)

    def _packed_bytes(self, numel: int, sent: int) -> float:
        """Return the most bytes of a frame that sends ``sent`` of ``numel`` values (bounded.h)."""
        if (few := FEW_BITS.get(self.values)) is not None:
            values = math.ceil(sent * few.bits / 8) + math.ceil(sent / FEW_BITS_BLOCK) * SCALE_BYTES
            dense = math.inf
        else:
            size = ITEM_BYTES[self.values]
            values, dense = sent * size, numel * size
        # Gaps between entries that are sent are LEB128: a byte each, and one more for every 7 bits.
        skipped = numel - sent
        gaps = sent + sum(min(sent, skipped >> bits) for bits in (7, 14, 21, 28))
        return HEADER.size + min(dense, values + min(math.ceil(numel / 8), gaps))

    def init(self, numel: int, dtype: str) -> Residual:
        return Residual.zeros(numel)

    def encode(self, values: Values, residual: Residual, ctx: EncodeContext) -> tuple[Buffer, ...]:
        above, ties = self.select.bound(values, residual.values, ctx)
        out = np.empty(bounded_nbytes(values.numel, self.values), dtype=np.uint8)
        size = bounded_pack(out, values.data, residual.values, above, self.values, ties)
        frame = out[:size]
        return (frame if self.squeeze is None else _compress(frame, self.squeeze),)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        frame = self._decompressed(frames[0], numel)
        try:
            bounded_check(frame, numel)
        except ValueError as error:
            raise FrameRefused(str(error)) from error

    def combine(
        self, contributions: Sequence[Sequence[Buffer]], out: Values, *, divisor: float
    ) -> None:
        first, *others = contributions
        self.decode_into(first, out)
        for frames in others:
            bounded_add(out.data, self._decompressed(frames[0], out.numel))
        if divisor != 1:
            mean_into(out.data, [out.data], out.dtype, divisor)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        bounded_write(out.data, self._decompressed(frames[0], out.numel))

    def _decompressed(self, frame: Buffer, numel: int) -> Buffer:
        """Return the frame uncompressed, as the kernels read it; refuse an invalid one."""
        content = np.frombuffer(frame, dtype=np.uint8)
        if content.size < HEADER.size:
            raise FrameRefused(f"{content.size} bytes where a header alone takes {HEADER.size}")
        _, values, squeeze, _, body_bytes = HEADER.unpack_from(content)
        if values != VALUES_CODES[self.values]:
            raise FrameRefused(f"values of type code {values}: expected {self.values}")
        if squeeze == 0:
            return content
        if self.squeeze is None or squeeze != SQUEEZE_CODES[self.squeeze]:
            raise FrameRefused(f"squeezed by method {squeeze} where {self.squeeze} was announced")
        most = bounded_nbytes(numel, self.values) - HEADER.size
        if body_bytes > most:
            raise FrameRefused(f"unsqueezes to {body_bytes} bytes; {numel} values take {most}")
        return _decompress(content, self.squeeze, body_bytes)


def _compress(frame: Bytes, method: Squeeze) -> Bytes:
    """Return the frame with its body compressed, or the same frame if that is no shorter."""
    library: Any = import_module("cramjam")
    body = frame[HEADER.size :]
    match method:
        case "snappy":
            shorter = library.snappy.compress_raw(body)
        case "lz4":
            shorter = library.lz4.compress_block(body)
        case "zstd":
            shorter = library.zstd.compress(body, level=ZSTD_LEVEL)
    if len(shorter) >= body.size:
        return frame
    header = frame[: HEADER.size].copy()
    header[SQUEEZE_PLACE] = SQUEEZE_CODES[method]
    return np.concatenate([header, np.frombuffer(shorter, dtype=np.uint8)])


def _decompress(frame: Bytes, method: Squeeze, body_bytes: int) -> Bytes:
    """Return the frame with its body decompressed to exactly ``body_bytes``, never to more."""
    library: Any = import_module("cramjam")
    whole = np.empty(HEADER.size + body_bytes, dtype=np.uint8)
    whole[: HEADER.size] = frame[: HEADER.size]
    whole[SQUEEZE_PLACE] = 0
    unsqueeze = {
        "snappy": library.snappy.decompress_raw_into,
        "lz4": library.lz4.decompress_block_into,
        "zstd": library.zstd.decompress_into,
    }[method]
    try:
        written = unsqueeze(frame[HEADER.size :], whole[HEADER.size :])
    except library.DecompressionError as error:
        raise FrameRefused(f"cannot be unsqueezed by {method}: {error}") from error
    if written != body_bytes:
        raise FrameRefused(f"unsqueezes to {written} bytes where it says {body_bytes}")
    return whole
