"""A machine's own speeds, measured once and cached, so that runs make the same choices.

Speeds of links are not cached: links are shared, and change. Delete the file to measure again.
"""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from slipstream.runtime.files.whole_files import read_own, replace_file

MOST_NBYTES = 1 << 20


class OwnSpeeds(msgspec.Struct, frozen=True):
    """Speeds of a worker's machine, without its links."""

    gemm_flops: float
    summing_bytes: float

    @property
    def sane(self) -> bool:
        return all(math.isfinite(s) and s > 0 for s in (self.gemm_flops, self.summing_bytes))


def cache_file(env: Mapping[str, str]) -> Path | None:
    """The path of the cache, by the usual convention.

    None for a user without a home directory: no directory that others may write to is safe.
    """
    try:
        folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "slipstream" / "speeds.json"


def this_machine() -> str:
    """What the speeds depend on; several machines may share a home directory."""
    return f"{platform.node()} {cpu()} torch {torch.__version__} {torch.get_num_threads()} threads"


def cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cached(file: Path | None, machine: str, measure: Callable[[], OwnSpeeds]) -> OwnSpeeds:
    """A machine's cached speeds; else measure now, and cache them if the file can be written."""
    if file is None:
        return measure()
    kept = read(file)
    if machine in kept and kept[machine].sane:
        return kept[machine]
    speeds = measure()
    with contextlib.suppress(OSError):
        replace_file(file, [msgspec.json.encode({**kept, machine: speeds})])
    return speeds


def read(file: Path) -> dict[str, OwnSpeeds]:
    """The content of the cache; a file that belongs to another user is ignored."""
    try:
        return msgspec.json.decode(read_own(file, MOST_NBYTES), type=dict[str, OwnSpeeds])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}
