"""Checkpoints of shared weights: the files of ``job.save``, written without torch.

A directory keeps the last two, each written whole or not at all. If the newest does not match its
checksum, the one before is read. I/O errors are raised: skipping a file for one would delete a good
checkpoint later.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream._native import largest
from slipstream.errors import CheckpointError, DamagedCheckpoint
from slipstream.runtime.files import checkpoint_format
from slipstream.runtime.files.checkpoint_format import FORMAT, SHORT, Piece, crc
from slipstream.runtime.files.whole_files import write_whole
from slipstream.types import ITEM_BYTES

KEPT = 2
NAME = re.compile(r"weights-(\d{15})\.safetensors")


@dataclass(slots=True)
class Snapshot:
    """What a file holds."""

    pieces: dict[str, Piece] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The number of updates that it contains."""
        return int(self.facts["step"])

    def write(self, path: Path, accepted: Collection[str] = ()) -> None:
        """Write a draft in the same directory, then rename it: a reader sees the old or the new
        file.

        Args:
            accepted: Names of tensors that were loaded as they are, although not finite.
        """
        refuse_to_lose(path, self.without(accepted), lambda: pieces_at(path))
        facts = json.dumps({"format": FORMAT, "random": [], **self.facts})
        about = {"slipstream": facts, "pairs": "[]", "crc": str(crc(facts, self.pieces))}
        entries: dict[str, Any] = {"__metadata__": about}
        end = 0
        for name, piece in self.pieces.items():
            begin, end = end, end + len(piece.data)
            entries[name] = {
                "dtype": SHORT[piece.dtype],
                "shape": piece.shape,
                "data_offsets": [begin, end],
            }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        whole = [len(header).to_bytes(8, "little"), header]
        write_whole(path, [*whole, *(piece.data for piece in self.pieces.values())])

    def without(self, accepted: Collection[str]) -> dict[str, Piece]:
        """The other tensors."""
        return {name: piece for name, piece in self.pieces.items() if name not in accepted}

    @classmethod
    def read(cls, path: Path) -> Snapshot:
        """Read and check a file; raises CheckpointError."""
        content = checkpoint_format.read(path)
        return cls(content.pieces, content.facts)


def refuse_to_lose(
    where: Path, pieces: Mapping[str, Piece], before: Callable[[], Mapping[str, Piece]]
) -> None:
    """Raise CheckpointError if a tensor is not finite, but was finite in ``before()``.

    A tensor that was not finite before is accepted: a mask with infinities, for example.
    """
    broken = [name for name, piece in pieces.items() if not is_finite(piece)]
    there = before() if broken else {}
    for name in broken:
        if name in there and is_finite(there[name]):
            raise CheckpointError(
                f"no checkpoint is written to {where}: {name} is not finite, and it is in the one "
                "that is there (to keep this one too, save it under another name)"
            )


def refuse_nonfinite(
    path: Path, pieces: Mapping[str, Piece], *, untrained: Collection[str] = ()
) -> None:
    """Refuse to load a checkpoint of a training that has diverged.

    Args:
        untrained: Names of tensors that may be infinite on purpose: buffers, frozen parameters.

    Raises:
        CheckpointError: A weight, or something of the optimizer's state, is NaN or infinite.
    """
    for name in nonfinite_in(pieces):
        if name not in untrained:
            raise CheckpointError(
                f"{path}: {name} has values that are not finite, so nothing was loaded: load an "
                "earlier checkpoint, or take this one as it is with "
                "job.load(..., nonfinite='pass')"
            )


def nonfinite_in(pieces: Mapping[str, Piece]) -> list[str]:
    """Names of tensors with NaN or infinity, a model's first."""
    found = [name for name, piece in pieces.items() if not is_finite(piece)]
    return sorted(found, key=lambda name: "model/" not in name)


def is_finite(piece: Piece) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    dtype = {"complex64": "float32", "complex128": "float64"}.get(piece.dtype, piece.dtype)
    return dtype not in ITEM_BYTES or math.isfinite(largest(piece.data, dtype))


def pieces_at(path: Path) -> Mapping[str, Piece]:
    """The tensors of a checkpoint; empty if there is no readable one."""
    try:
        return Snapshot.read(path).pieces
    except CheckpointError:
        return {}


def kept_in(directory: Path) -> list[Path]:
    """The checkpoints of a directory, the newest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look into {directory}: {error.strerror}") from error
    return [directory / name for name in sorted(filter(NAME.fullmatch, names), reverse=True)]


def keep(directory: Path, snapshot: Snapshot, accepted: Collection[str] = ()) -> None:
    """Write one more checkpoint, and delete the oldest ones; ``accepted``: see Snapshot.write."""
    path = directory / f"weights-{snapshot.version:015d}.safetensors"
    found = (pieces for each in kept_in(directory) if (pieces := pieces_at(each)))
    refuse_to_lose(directory, snapshot.without(accepted), lambda: next(found, {}))
    snapshot.write(path, accepted)
    for old in older_than_needed(kept_in(directory), path):
        with contextlib.suppress(OSError):
            old.unlink()


def older_than_needed(paths: Sequence[Path], newest: Path) -> list[Path]:
    """All but the newest and the one before; one with a higher number is from an earlier run."""
    older = [path for path in paths if path.name < newest.name]
    later = [path for path in paths if path.name > newest.name]
    return [*later, *older[KEPT - 1 :]]


def newest_in(directory: Path) -> tuple[Snapshot | None, list[str]]:
    """The last valid checkpoint, and what is wrong with those after it."""
    wrong: list[str] = []
    for path in kept_in(directory):
        try:
            return Snapshot.read(path), wrong
        except DamagedCheckpoint as error:
            wrong.append(str(error))
    if wrong:
        raise CheckpointError(
            f"no checkpoint in {directory} is whole ({wrong[0]}): to begin anew, move them away"
        )
    return None, wrong
