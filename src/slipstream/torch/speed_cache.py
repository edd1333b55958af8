"""A machine's own speeds, measured once and kept: choices then repeat from run to run.

Links are not kept: they are shared, and change. Deleting the file measures anew.
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
    """Of a worker's machine, without its links."""

    gemm_flops: float
    summing_bytes: float

    @property
    def sane(self) -> bool:
        return all(math.isfinite(s) and s > 0 for s in (self.gemm_flops, self.summing_bytes))


def cache_file(env: Mapping[str, str]) -> Path | None:
    """Where they are kept, by the usual convention for caches.

    None for a user without a home: a place that everybody may write to is no place for them.
    """
    try:
        folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "slipstream" / "speeds.json"


def this_machine() -> str:
    """What the speeds depend on; a home folder may be many machines'."""
    return f"{platform.node()} {cpu()} torch {torch.__version__} {torch.get_num_threads()} threads"


def cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cached(file: Path | None, machine: str, measure: Callable[[], OwnSpeeds]) -> OwnSpeeds:
    """The speeds kept for a machine, or measured now and kept, if the file can be written."""
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
    """Nothing of what another user may have put there."""
    try:
        return msgspec.json.decode(read_own(file, MOST_NBYTES), type=dict[str, OwnSpeeds])
    except (OSError, msgspec.MsgspecError, RecursionError):
        return {}
