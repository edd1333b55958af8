"""Small entries wait until they have grown, the others travel (Parameter Flow's DVF)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
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
from slipstream.errors import ConfigError, FrameRefused, IncompatibleRoute
from slipstream.types import Buffer, Hop, Spec, Values

Decay = Literal["rate", "root", "constant"]
Precision = Literal["float32", "bfloat16"]
Squeeze = Literal["snappy", "lz4", "zstd"]
Residual = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# As native/bounded.h has it: form, values, squeeze, values held, bytes of the body unsqueezed.
HEADER = struct.Struct("<BBBxII")
SQUEEZE_PLACE = 2
VALUES_CODES = {"float32": 1, "bfloat16": 2}
SQUEEZE_CODES = {"snappy": 1, "lz4": 2, "zstd": 3}
ZSTD_LEVEL = 1  # what is left to find is mostly in the exponents, and higher ones find no more
SAMPLES = 4096  # a share of them is within two points of the same share of all, nearly always


@dataclass(frozen=True, slots=True)
class Drop:
    """Hold back this share of the entries; the bound is found anew each time, in a sample.

    It is the largest that holds back no more than the share, among equals none: entries that were
    all alike would else wait for ever. Where more than the share are zero, the rest all travel.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not (isinstance(self.ratio, int | float) and 0 <= self.ratio < 1):
            raise ConfigError(
                f"Drop(ratio={self.ratio!r}): give the share of entries to hold back, "
                "at least 0 and less than 1"
            )

    def bound(self, values: Values, memory: Residual, clock: int) -> float:
        """Of every so many entries one is looked at, the next time another."""
        # Odd, lest it falls in step with rows of a matrix.
        stride = max(1, values.numel // SAMPLES) | 1
        taken = slice(clock % stride, None, stride)
        with np.errstate(over="ignore", invalid="ignore"):
            acc = np.abs(values.data.view(np.float32)[taken] + memory[taken])
        acc = np.sort(acc[np.isfinite(acc)])
        if acc.size == 0:
            return 0.0
        least_to_travel = acc[int(self.ratio * acc.size)]
        held_back = int(np.searchsorted(acc, least_to_travel))
        return float(acc[held_back - 1]) if held_back else 0.0


@dataclass(frozen=True, slots=True)
class Bounded:
    """Entries within the bound δᵗ stay behind and are added to those of the next time.

    With a the values plus the residual r of the last time:

        aᵢ travels and rᵢ ← 0 unless |aᵢ| ≤ δᵗ; elsewhere rᵢ ← aᵢ

    so that ‖r‖₂ ≤ δᵗ·√d, and what was sent plus what is owed is a, bit for bit. As ``bfloat16``,
    rᵢ ← aᵢ minus what it was rounded to. A NaN or an infinity travels and does not stay.

    ``delta`` is δ, or the share of entries to ``Drop``; ``narrow`` takes its place on a link that
    lacks bandwidth (the paper's δ_up). ``decay`` makes δᵗ of δ: ``rate`` δ·lrₜ/lr₀, ``root`` δ/√t
    (the paper's), ``constant`` δ. ``squeeze`` compresses what travels, where that gains anything.
    """

    delta: float | Drop
    decay: Decay = "rate"
    narrow: float | Drop | None = None
    values: Precision = "float32"
    squeeze: Squeeze | None = None

    splits: ClassVar[bool] = True
    frames: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check_bound("delta", self.delta)
        if self.narrow is not None:
            _check_bound("narrow", self.narrow)
        for name, value, choices in (
            ("decay", self.decay, get_args(Decay)),
            ("values", self.values, get_args(Precision)),
            ("squeeze", self.squeeze, (*get_args(Squeeze), None)),
        ):
            if value not in choices:
                known = ", ".join(map(str, choices))
                raise ConfigError(f"{name}={value!r}: choose one of {known}")

    @property
    def name(self) -> str:
        precision = "" if self.values == "float32" else f"-{self.values}"
        return "bounded" + precision + (f"-{self.squeeze}" if self.squeeze else "")

    def check(self, spec: Spec) -> None:
        if spec.dtype != "float32":
            raise IncompatibleRoute(
                f"{spec.name!r} is {spec.dtype}; bounds are for float32, in which the residual is "
                "kept: route it to Dense()"
            )
        if self.squeeze is not None and find_spec("cramjam") is None:
            raise ConfigError(
                f"squeeze={self.squeeze!r} needs cramjam, which is not installed: "
                "pip install cramjam, or choose squeeze=None"
            )

    def init(self, numel: int, dtype: str) -> Residual:
        """The residual: nothing is owed at the start."""
        return np.zeros(numel, dtype=np.float32)

    def threshold(self, values: Values, memory: Residual, hop: Hop) -> float:
        """δᵗ, which a share to drop gives as it stands: it is steady by itself."""
        wanted = self.narrow if hop.narrow and self.narrow is not None else self.delta
        if isinstance(wanted, Drop):
            return wanted.bound(values, memory, hop.clock)
        if self.decay == "rate":
            return wanted * hop.rate
        return wanted / math.sqrt(hop.clock) if self.decay == "root" else wanted

    def encode(self, values: Values, memory: Residual, hop: Hop) -> tuple[Buffer, ...]:
        delta = self.threshold(values, memory, hop)
        out = np.empty(bounded_nbytes(values.numel, self.values), dtype=np.uint8)
        frame = out[: bounded_pack(out, values.data, memory, delta, self.values)]
        return (frame if self.squeeze is None else _squeezed(frame, self.squeeze),)

    def examine(self, frames: Sequence[Buffer], numel: int, dtype: str) -> None:
        frame = self._opened(frames[0], numel)
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
            bounded_add(out.data, self._opened(frames[0], out.numel))
        if divisor != 1:
            mean_into(out.data, [out.data], out.dtype, divisor)

    def decode_into(self, frames: Sequence[Buffer], out: Values) -> None:
        bounded_write(out.data, self._opened(frames[0], out.numel))

    def _opened(self, frame: Buffer, numel: int) -> Buffer:
        """The frame as the kernels read it: not squeezed."""
        content = np.frombuffer(frame, dtype=np.uint8)
        if content.size < HEADER.size:
            raise FrameRefused(f"{content.size} bytes where a header alone takes {HEADER.size}")
        _, values, squeeze, _, body_bytes = HEADER.unpack_from(content)
        if values != VALUES_CODES[self.values]:
            raise FrameRefused(f"values of type {values} where {self.values} were announced")
        if squeeze == 0:
            return content
        if self.squeeze is None or squeeze != SQUEEZE_CODES[self.squeeze]:
            raise FrameRefused(f"squeezed by method {squeeze} where {self.squeeze} was announced")
        most = bounded_nbytes(numel, self.values) - HEADER.size
        if body_bytes > most:
            raise FrameRefused(f"unsqueezes to {body_bytes} bytes; {numel} values take {most}")
        return _unsqueezed(content, self.squeeze, body_bytes)


def _check_bound(name: str, bound: object) -> None:
    if isinstance(bound, Drop):
        return
    if not (isinstance(bound, int | float) and math.isfinite(bound) and bound >= 0):
        raise ConfigError(
            f"{name}={bound!r}: give a bound on what may stay behind, finite and not negative, "
            "or the share of entries to hold back, as Drop(0.8)"
        )


def _squeezed(frame: Bytes, method: Squeeze) -> Bytes:
    """With a shorter body; the same frame if it would be no shorter."""
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


def _unsqueezed(frame: Bytes, method: Squeeze, body_bytes: int) -> Bytes:
    """Into so many bytes and no more, whatever the frame would unsqueeze to."""
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
