"""Bodies as they come: decoded, counted, and the parts of an upload written to a file.

Bounds: 8 parts, 8 headers and 4 KiB of headers a part, 64 KiB of metadata, and the whole body.
The names of parts decide; their order, types and filenames do not matter.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from slipstream.service.data_directory import remove
from slipstream.service.errors import MISSING_METADATA, ApiError, malformed, too_large

PARTS: Final = 8
HEADERS: Final = 8
HEADERS_NBYTES: Final = 4096
METADATA_NBYTES: Final = 64 * 1024
NBYTES_AT_ONCE: Final = 256 * 1024
# What a Node client makes of a string (node-sdk #1010).
WRAPPED: Final = re.compile(rb'\s*\{\s*"(?:data|contentType)"\s*:')


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    data: str
    contentType: str  # noqa: N815 (as the client writes it)


class Upload:
    """The parts of one upload: metadata in memory, training data in a file until ``close()``."""

    def __init__(self, incoming: Path) -> None:
        self.path = incoming / secrets.token_hex(16)
        self.metadata = b""
        self.file = self.path.open("wb")

    def finish(self) -> None:
        """The data is complete: unwrap what a Node client wrapped."""
        self.file.close()
        self.metadata = unwrap(self.metadata)
        with self.path.open("rb") as file:
            wrapped = WRAPPED.match(file.read(64)) is not None
        if wrapped:
            self.path.write_bytes(unwrap(self.path.read_bytes()))

    def sha256(self) -> str:
        """Of metadata and data; boundaries and filenames do not count."""
        digest = hashlib.sha256(hashlib.sha256(self.metadata).digest())
        with self.path.open("rb") as file:
            while block := file.read(NBYTES_AT_ONCE):
                digest.update(block)
        return digest.hexdigest()

    def close(self) -> None:
        """Remove the file, if it was not moved away."""
        self.file.close()
        remove(self.path)


def unwrap(part: bytes) -> bytes:
    """The content of a part that a Node client sent as a string.

    >>> unwrap(b'{"data": "a,b", "contentType": "text/csv"}')
    b'a,b'
    >>> unwrap(b'{"name": "n"}')
    b'{"name": "n"}'
    """
    try:
        return msgspec.json.decode(part, type=_Wrapped).data.encode("utf-8", "surrogatepass")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return part


class PartsParser:
    """Writes the parts of a multipart body into an upload, as bytes arrive."""

    def __init__(self, boundary: bytes, upload: Upload) -> None:
        self._upload = upload
        self._seen: list[str] = []
        self._name = ""
        self._field = bytearray()
        self._value = bytearray()
        self._metadata = bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._header,
                "on_headers_finished": self._headers,
                "on_part_data": self._data,
            },
            max_header_count=HEADERS,
            max_header_size=HEADERS_NBYTES,
        )

    def write(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ApiError: The body is malformed or beyond a bound.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise malformed(f"The multipart body is malformed: {error}.") from None

    def finish(self) -> None:
        """The body has ended.

        Raises:
            ApiError: It ended too early, or a part is missing.
        """
        if self._parser.state != MultipartState.END:
            raise malformed("The multipart body ends before its last boundary.")
        if "training_metadata" not in self._seen:
            raise ApiError(400, "Missing metadata", MISSING_METADATA)
        if "training_data" not in self._seen:
            raise ApiError(400, "Missing training data", "The part training_data is missing.")
        self._upload.metadata = bytes(self._metadata)
        self._upload.finish()

    def _begin(self) -> None:
        self._name = ""
        if len(self._seen) >= PARTS:
            raise malformed(f"The body has more than {PARTS} parts.")
        self._seen.append("")

    def _header(self) -> None:
        if self._field.strip().lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field.clear()
        self._value.clear()

    def _headers(self) -> None:
        if self._name in ("training_metadata", "training_data") and self._name in self._seen:
            raise malformed(f"The part {self._name} was sent twice.")
        self._seen[-1] = self._name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "training_data":
            self._upload.file.write(memoryview(data)[start:end])
        elif self._name == "training_metadata":
            self._metadata += data[start:end]
            if len(self._metadata) > METADATA_NBYTES:
                raise ApiError(
                    400,
                    "Malformed metadata",
                    f"The metadata has more than {METADATA_NBYTES:,} bytes.",
                )


async def receive(request: Request, incoming: Path, limit_nbytes: int) -> Upload:
    """Receive a multipart upload; whoever called closes it.

    Raises:
        ApiError: 400, 413 or 415.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(
            415,
            "Unsupported media type",
            "Send multipart/form-data with a boundary, and the parts training_metadata and "
            "training_data.",
        )
    upload = Upload(incoming)
    try:
        try:
            parser = PartsParser(boundary, upload)
        except FormParserError as error:
            raise malformed(f"The boundary is unusable: {error}.") from None
        async for block in decoded(request, limit_nbytes):
            parser.write(block)
        parser.finish()
    except BaseException:
        upload.close()
        raise
    return upload


async def body(request: Request, limit_nbytes: int) -> bytes:
    """A whole body, decoded.

    Raises:
        ApiError: It is too large, or its encoding is broken or unknown.
    """
    return b"".join([block async for block in decoded(request, limit_nbytes)])


async def decoded(request: Request, limit_nbytes: int) -> AsyncIterator[bytes]:
    """The body in blocks, after gzip; both sides of it are bounded."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ApiError(
            415,
            "Unsupported content encoding",
            f"The encoding {encoding[:40]!r} is not one of gzip, identity.",
            {"Connection": "close"},
        )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit_nbytes:
        raise too_large(limit_nbytes)
    blocks = _counted(request, limit_nbytes)
    async for block in _gunzip(blocks, limit_nbytes) if "gzip" in encoding else blocks:
        yield block


async def _counted(request: Request, limit_nbytes: int) -> AsyncIterator[bytes]:
    received = 0
    async for block in request.stream():
        received += len(block)
        if received > limit_nbytes:
            raise too_large(limit_nbytes)
        yield block


async def _gunzip(blocks: AsyncIterator[bytes], limit_nbytes: int) -> AsyncIterator[bytes]:
    inflate = zlib.decompressobj(wbits=31)
    made = 0
    async for block in blocks:
        rest = block
        while rest and not inflate.eof:
            try:
                out = inflate.decompress(rest, NBYTES_AT_ONCE)
            except zlib.error:
                raise malformed("The body is not what its Content-Encoding gzip says.") from None
            rest = inflate.unconsumed_tail
            made += len(out)
            if made > limit_nbytes:
                raise too_large(limit_nbytes)
            yield out
    if not inflate.eof:
        raise malformed("The gzip body ends too early.")
