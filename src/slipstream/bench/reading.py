"""Files from outside: read whole, and refused with the file, the line and the way out."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from slipstream.errors import ConfigError


def refused(path: Path, line: int | None, problem: str, way_out: str) -> ConfigError:
    """The error to raise about a file; ``line`` counts from 1."""
    where = str(path) if line is None else f"{path}, line {line}"
    return ConfigError(f"{where}: {problem}; {way_out}")


def read_bytes(path: Path, way_out: str) -> bytes:
    """The file's bytes, unpacked if its name ends in ``.gz``."""
    try:
        packed = path.read_bytes()
        return gzip.decompress(packed) if path.suffix == ".gz" else packed
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refused(path, None, f"cannot be unpacked ({error})", "fetch it again") from error
    except OSError as error:
        raise refused(path, None, f"cannot be read ({error.strerror})", way_out) from error


def read_text(path: Path, way_out: str) -> str:
    """UTF-8 where it is that, Latin-1 otherwise: older corpora are, and do not say so."""
    content = read_bytes(path, way_out)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


def lines_of(text: str) -> list[str]:
    """Split at newlines alone: ``str.splitlines`` also splits at control characters in a text."""
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
