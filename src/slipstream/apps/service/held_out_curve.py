"""The curve of held-out accuracy in a file: rank 0 adds points, every learner reads them.

It is beside gadei's checkpoints, and is removed with them: a job that begins anew has a new curve.
One that continues from a checkpoint keeps all points, also later ones. So what was decided by them
stays decided, for every learner and after every restart.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.apps.service.resume import checkpoints_of
from slipstream.apps.service.schedule import Point
from slipstream.runtime.files.whole_files import write_whole


class HeldOutCurve:
    """The points in the file of a version's directory, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.path = checkpoints_of(folder) / "curve.json"
        self._points: list[Point] = []
        self._known: tuple[int, int] | None = None  # the file that they were read from

    def points(self) -> list[Point]:
        """The points so far, in order; the file is read only if it has changed."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return self._points
        # Each point makes a new file.
        if (file := (found.st_ino, found.st_mtime_ns)) != self._known:
            self._points = msgspec.json.decode(self.path.read_bytes(), type=list[Point])
            self._known = file
        return self._points

    def add(self, update: int, accuracy: float) -> None:
        """Add a point; it is on disk when this returns."""
        points = [*self.points(), Point(update, accuracy)]
        write_whole(self.path, [msgspec.json.encode(points)])
