"""Bodies as they come: decoded, counted, and the parts of an upload written to a file.

Bounds: 8 parts, 8 headers and 4 KiB of headers a part, 64 KiB of metadata, and the whole body.
The names of parts decide; their order, types and filenames do not matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from slipstream.apps.service.context import Call
from slipstream.apps.service.data_directory import remove
from slipstream.apps.service.errors import MISSING_METADATA, ApiError

PARTS: Final = 8
HEADERS: Final = 8
HEADERS_NBYTES: Final = 4096
METADATA_NBYTES: Final = 64 * 1024
JSON_NBYTES: Final = 512 * 1024
BLOCK_NBYTES: Final = 256 * 1024
WRAPPED_NBYTES: Final = 32 * 1024 * 1024  # it is unwrapped in memory
BOM: Final = b"\xef\xbb\xbf"
OTHER_UTF: Final = re.compile(r"utf[-_]?(16|32)")
# What a Node client makes of a string (node-sdk #1010).
WRAPPED: Final = re.compile(rb'\s*\{\s*"(?:data|contentType)"\s*:')


class Metadata(msgspec.Struct, frozen=True):
    """What is known of training data."""

    name: str | None = None
    language: str = "en"


class TrainingParts(msgspec.Struct, frozen=True):
    """The parts of an upload."""

    training_metadata: Metadata
    training_data: Annotated[str, msgspec.Meta(extra_json_schema={"contentMediaType": "text/csv"})]


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    data: str
    contentType: str  # noqa: N815 (as the client writes it)


def malformed(description: str) -> ApiError:
    """400: the body has not the form it should have."""
    return ApiError("Malformed body", description)


class Upload:
    """The parts of a multipart body: metadata in memory, data in a directory until ``close()``."""

    def __init__(self, incoming: Path, boundary: bytes) -> None:
        self.metadata = b""
        self.placed: Path | None = None  # where the directory was moved to
        self._seen: list[str] = []
        self._header = (bytearray(), bytearray())
        name, value = self._header
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_part_data": self._add,
            },
            max_header_count=HEADERS,
            max_header_size=HEADERS_NBYTES,
        )
        self.directory = incoming / secrets.token_hex(16)
        self.directory.mkdir(mode=0o700)
        self.path = self.directory / "data.csv"
        try:
            self._file = self.path.open("wb")
        except OSError:
            remove(self.directory)
            raise

    def finish(self) -> None:
        """The body has ended: check that it is whole, and unwrap what a Node client wrapped."""
        self._file.close()
        if self.parser.state != MultipartState.END:
            raise malformed("The multipart body ends before its last boundary.")
        if "training_metadata" not in self._seen:
            raise ApiError("Missing metadata", MISSING_METADATA)
        if "training_data" not in self._seen:
            raise ApiError("Missing training data", "The part training_data is missing.")
        self.metadata = unwrap(self.metadata)
        if WRAPPED.match(next(self.blocks(), b"")[:64]):
            if self.path.stat().st_size > WRAPPED_NBYTES:
                most = f"more than {WRAPPED_NBYTES >> 20} MiB as a JSON string"
                reason = f"The training data has {most}; send a file, a stream or a Buffer."
                raise ApiError("Malformed data", reason)
            self.path.write_bytes(unwrap(self.path.read_bytes()))

    def blocks(self) -> Iterator[bytes]:
        """The training data."""
        with self.path.open("rb") as file:
            while block := file.read(BLOCK_NBYTES):
                yield block

    def sha256(self) -> str:
        """Of metadata and data; boundaries and filenames do not count."""
        digest = hashlib.sha256(hashlib.sha256(self.metadata).digest())
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()

    def close(self) -> None:
        """Remove the directory, if it was not moved away."""
        with contextlib.suppress(OSError):  # on a full disk, closing fails as writing did
            self._file.close()
        # Under another name first: while a request is cancelled, a thread may still move it into
        # place, and of two renames only one succeeds.
        unused = self.directory.with_suffix(".unused")
        with contextlib.suppress(FileNotFoundError):
            self.directory.rename(unused)
        remove(unused)

    def _begin(self) -> None:
        if len(self._seen) >= PARTS:
            raise malformed(f"The body has more than {PARTS} parts.")
        self._seen.append("")

    def _end_header(self) -> None:
        field, value = self._header
        if field.strip().lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            name = options.get(b"name", b"").decode("utf-8", "replace")
            if name.startswith("training_") and name in self._seen[:-1]:
                raise malformed(f"The part {name[:40]} was sent twice.")
            self._seen[-1] = name
        field.clear()
        value.clear()

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._seen[-1] == "training_data":
            self._file.write(memoryview(data)[start:end])
        elif self._seen[-1] == "training_metadata":
            self.metadata += data[start:end]
            if len(self.metadata) > METADATA_NBYTES:
                reason = f"The metadata has more than {METADATA_NBYTES:,} bytes."
                raise ApiError("Malformed metadata", reason)


def unwrap(part: bytes) -> bytes:
    """The content of a part that a Node client sent as a string.

    >>> unwrap(b'{"data": "a,b", "contentType": "text/csv"}'), unwrap(b'{"name": "n"}')
    (b'a,b', b'{"name": "n"}')
    """
    try:
        return msgspec.json.decode(part, type=_Wrapped).data.encode("utf-8", "surrogatepass")
    except ValueError:
        return part


@contextlib.asynccontextmanager
async def received(call: Call) -> AsyncIterator[Upload]:
    """Receive a multipart upload; it is gone at the end of the block."""
    kind, options = parse_options_header(call.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        parts = "the parts training_metadata and training_data"
        reason = f"Send multipart/form-data with a boundary, and {parts}."
        raise ApiError("Unsupported media type", reason)
    try:
        incoming, limit_nbytes = call.service.directory.incoming, call.service.options.max_body
        with contextlib.closing(Upload(incoming, options[b"boundary"])) as upload:
            async for block in decoded(call, limit_nbytes):
                upload.parser.write(block)
            await asyncio.to_thread(upload.finish)
            yield upload
    except FormParserError as error:
        raise malformed(f"The multipart body is malformed: {error}.") from None


async def read_body(request: Request, limit_nbytes: int = JSON_NBYTES) -> bytes:
    """A whole body of JSON or a form, decoded."""
    return b"".join([block async for block in decoded(request, limit_nbytes)])


async def read_json(request: Request, limit_nbytes: int = JSON_NBYTES) -> dict[str, object]:
    """The JSON object in a body."""
    kind, _, charset = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json" or OTHER_UTF.search(charset):
        raise ApiError("Unsupported media type", "Send application/json in UTF-8.")
    try:
        value = msgspec.json.decode((await read_body(request, limit_nbytes)).removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise malformed(f"The body is not JSON in UTF-8: {error}.") from None
    if not isinstance(value, dict):
        raise malformed("The body is not a JSON object.")
    return value


async def decoded(request: Request, limit_nbytes: int) -> AsyncIterator[bytes]:
    """The body in blocks, after gzip; both sides of it are bounded."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        reason = f"The encoding {encoding[:40]!r} is not one of gzip, identity."
        raise ApiError("Unsupported content encoding", reason, Connection="close")
    too_large = ApiError(
        "Request too large", f"The body has more than the permitted {limit_nbytes:,} bytes."
    )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit_nbytes:
        raise too_large
    received = made = 0
    inflate = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
    async for block in request.stream():
        received += len(block)
        if received > limit_nbytes:
            raise too_large
        for out in [block] if inflate is None else _inflated(inflate, block):
            made += len(out)
            if made > limit_nbytes:
                raise too_large
            yield out
    if inflate is not None and not inflate.eof:
        raise malformed("The gzip body ends too early.")


def _inflated(inflate: zlib._Decompress, block: bytes) -> Iterator[bytes]:
    while block:
        if inflate.eof:
            raise malformed("The gzip body goes on after its end.")
        try:
            yield inflate.decompress(block, BLOCK_NBYTES)
        except zlib.error:
            raise malformed("The body is not what its Content-Encoding gzip says.") from None
        block = inflate.unconsumed_tail or inflate.unused_data
