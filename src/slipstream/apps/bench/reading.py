"""Input files: read as a whole; errors give the file, the line and the fix."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from slipstream.errors import ConfigError
from slipstream.input_files import opened, read_rest
from slipstream.printable import printable

MOST_BYTES = 1 << 30  # of a file, unpacked, since all of it is held in memory


def refused(path: Path, line: int | None, problem: str, way_out: str) -> ConfigError:
    """Return the error to raise about a file; ``line`` counts from 1."""
    where = str(path) if line is None else f"{path}, line {line}"
    return ConfigError(printable(f"{where}: {problem}; {way_out}"))


def read_bytes(path: Path, way_out: str, most_nbytes: int = MOST_BYTES) -> bytes:
    """Return the file's bytes, unpacked if its name ends in ``.gz``."""
    try:
        with opened(path, most_nbytes) as file:
            if path.suffix != ".gz":
                return read_rest(file, most_nbytes)
            with gzip.GzipFile(fileobj=file) as unpacked:
                return read_rest(cast(BinaryIO, unpacked), most_nbytes)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refused(path, None, f"cannot be unpacked ({error})", "fetch it again") from error
    except OSError as error:
        raise refused(path, None, f"cannot be read ({error.strerror})", way_out) from error


def read_text(path: Path, way_out: str, most_nbytes: int = MOST_BYTES) -> str:
    """Read text as UTF-8 if valid, else as Latin-1, which older corpora use without saying so."""
    content = read_bytes(path, way_out, most_nbytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def lines_of(text: str) -> list[str]:
    """Split at newlines only: ``str.splitlines`` also splits at control characters in a text."""
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise refused(path, error.lineno, f"not JSON ({error.msg})", "mend it there") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits
        raise refused(path, None, "holds too deep lists or too long numbers", "mend it") from error


def columns_of(path: Path, reader: csv.DictReader[str]) -> Sequence[str]:
    """Return a CSV file's first line."""
    try:
        return reader.fieldnames or ()
    except csv.Error as error:
        raise refused(path, 1, f"not CSV ({error})", "mend it there") from error


def rows_of(path: Path, reader: csv.DictReader[str]) -> Iterator[dict[str, str]]:
    """Yield the following lines."""
    try:
        yield from reader
    except csv.Error as error:
        raise refused(path, reader.line_num, f"not CSV ({error})", "mend it there") from error
