"""Models in memory: each file is loaded once, the least recently used go first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

from slipstream.service.answers import Model
from slipstream.service.refusals import Damaged

LOG = logging.getLogger("slipstream.service")
Identity = tuple[int, int, int]


class Models:
    """Loads model files and keeps those used last.

    Args:
        limit_nbytes: How much all of them may have; the one in use may be larger.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._models: OrderedDict[Path, tuple[Identity, Model]] = OrderedDict()
        self._damaged: dict[Path, tuple[Identity, str]] = {}
        self._sound: dict[Path, Identity] = {}

    def get(self, path: Path) -> Model:
        """The model of a file.

        Raises:
            Damaged: The file is damaged, of an unknown format or gone.
        """
        identity = _identity(path)
        if (model := self._known(path, identity)) is not None:
            return model
        with self._loading:
            if (model := self._known(path, identity)) is not None:
                return model
            try:
                model = Model.load(path)
            except Damaged as error:
                LOG.warning("%s: %s", path, error)
                with self._lock:
                    self._damaged[path] = (identity, str(error))
                raise
            except OSError as error:
                raise Damaged(f"it cannot be read: {error.strerror}") from error
            self._keep(path, identity, model)
            return model

    def damage(self, path: Path) -> str | None:
        """Why a file cannot be used, or None; a file that has not changed is not read again."""
        try:
            identity = _identity(path)
            if self._sound.get(path) != identity:
                self.get(path)
        except Damaged as error:
            return str(error)
        return None

    def forget(self, directory: Path) -> None:
        """Drop what was loaded from a directory."""
        with self._lock:
            for kept in (self._models, self._damaged, self._sound):
                for path in [path for path in kept if directory in path.parents]:
                    del kept[path]

    def _known(self, path: Path, identity: Identity) -> Model | None:
        with self._lock:
            damaged = self._damaged.get(path)
            if damaged is not None and damaged[0] == identity:
                raise Damaged(damaged[1])
            found = self._models.get(path)
            if found is None or found[0] != identity:
                return None
            self._models.move_to_end(path)
            return found[1]

    def _keep(self, path: Path, identity: Identity, model: Model) -> None:
        with self._lock:
            self._models[path] = (identity, model)
            self._models.move_to_end(path)
            self._sound[path] = identity
            while len(self._models) > 1 and self._nbytes() > self._limit_nbytes:
                self._models.popitem(last=False)

    def _nbytes(self) -> int:
        return sum(model.nbytes for _, model in self._models.values())


def _identity(path: Path) -> Identity:
    try:
        found = path.stat()
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_size, found.st_mtime_ns
