"""Models in memory: each file is loaded once, the least recently used go first."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

from slipstream.apps.service.answers import Model
from slipstream.apps.service.errors import Damaged
from slipstream.apps.service.serve_options import MIB

LOG = logging.getLogger("slipstream.apps.service")
File = tuple[Path, int, int, int]  # a changed file is another one


class Models:
    """Loads model files, keeps up to ``limit_nbytes`` of them, and remembers which are sound."""

    def __init__(self, limit_nbytes: int = 512 * MIB) -> None:
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._models: OrderedDict[File, Model] = OrderedDict()
        self._checked: dict[File, str | None] = {}  # what is wrong with it

    def get(self, path: Path) -> Model:
        """The model of a file; raises Damaged if it is damaged, of an unknown format or gone."""
        file = _identify(path)
        if (model := self._kept(file)) is not None:
            return model
        with self._loading:  # others may use the models that are kept meanwhile
            return self._kept(file) or self._load(file)

    def damage(self, path: Path) -> str | None:
        """Why a file cannot be used, or None; a file that has not changed is not read again."""
        try:
            if self._checked.get(_identify(path), "unknown") is not None:
                self.get(path)
        except Damaged as error:
            return str(error)
        return None

    def forget(self, directory: Path) -> None:
        """Drop what was loaded from a directory."""
        with self._lock:
            self._drop([file for file in self._checked if directory in file[0].parents])

    def _drop(self, files: list[File]) -> None:
        for file in files:
            del self._checked[file]
            self._models.pop(file, None)

    def _kept(self, file: File) -> Model | None:
        with self._lock:
            if (reason := self._checked.get(file)) is not None:
                raise Damaged(reason)
            if file in self._models:
                self._models.move_to_end(file)
            return self._models.get(file)

    def _load(self, file: File) -> Model:
        try:
            model = Model.load(file[0])
        except Damaged as error:
            LOG.warning("%s: %s", file[0], error)
            if not isinstance(error.__cause__, OSError):  # what cannot be read now may be later
                with self._lock:
                    self._checked[file] = str(error)
            raise
        with self._lock:
            self._drop([kept for kept in self._checked if not kept[0].exists()])
            if not file[0].exists():  # deleted while it was loaded
                return model
            self._models[file] = model
            self._checked[file] = None
            total = sum(kept.nbytes for kept in self._models.values())
            while len(self._models) > 1 and total > self._limit_nbytes:
                total -= self._models.popitem(last=False)[1].nbytes
        return model


def _identify(path: Path) -> File:
    try:
        found = path.stat()
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from error
    return path, found.st_ino, found.st_size, found.st_mtime_ns
