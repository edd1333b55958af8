"""Which epoch a job that was killed continues from, before its processes have read anything."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.apps.service.progress import FILE, Progress
from slipstream.apps.service.settings import NET_FORM
from slipstream.errors import CheckpointError
from slipstream.runtime.shared_memory.checkpoints import NAME, kept_in


def checkpoints_of(folder: Path) -> Path:
    """Where a version's directory has its checkpoints, and what belongs to them."""
    return folder / "checkpoints" / f"net{NET_FORM}"


def resumed_epoch(folder: Path) -> int | None:
    """The epochs that the newest checkpoint of a version has made; None if there is none.

    The name of a checkpoint has its updates. The first line of progress, from before any early
    stop, has the updates and the epochs of a whole training, and so the updates of an epoch. The
    learners say it again when they have loaded a checkpoint, which may be an older one.
    """
    try:
        newest = next((path.name for path in kept_in(checkpoints_of(folder))), "")
        with (folder / FILE).open("rb") as file:
            first = msgspec.json.decode(file.readline(), type=Progress)
    except (OSError, CheckpointError, msgspec.DecodeError):
        return None
    known = NAME.fullmatch(newest)
    updates = int(known[1]) if known else 0
    return min(updates * first.epochs // max(first.total, 1), first.epochs) if updates else None
