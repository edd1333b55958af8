"""A machine's own speeds, measured once and kept: choices then repeat from run to run.

Links are not kept: they are shared, and change. Deleting the file measures anew.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch


class OwnSpeeds(msgspec.Struct, frozen=True):
    """Of a worker's machine, without its links."""

    gemm_flops: float
    summing_bytes: float

    @property
    def sane(self) -> bool:
        return all(math.isfinite(s) and s > 0 for s in (self.gemm_flops, self.summing_bytes))


def cache_file(env: Mapping[str, str]) -> Path:
    """Where they are kept, by the usual convention for caches."""
    try:
        folder = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        folder = Path(tempfile.gettempdir())
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


def cached(file: Path, machine: str, measure: Callable[[], OwnSpeeds]) -> OwnSpeeds:
    """The speeds kept for a machine, or measured now and kept, if the file can be written."""
    kept = read(file)
    if machine in kept and kept[machine].sane:
        return kept[machine]
    speeds = measure()
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode({**kept, machine: speeds}))
        os.replace(draft, file)
    return speeds


def read(file: Path) -> dict[str, OwnSpeeds]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, OwnSpeeds])
    except (OSError, msgspec.MsgspecError):
        return {}
