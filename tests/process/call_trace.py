"""Calls between functions of one package, by thread, with the stack that each was made from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Stack = tuple[tuple[str, str], ...]  # files and qualified names, the outermost call first


class CallTrace:
    """Records calls while ``recording``; other packages' functions are left out of stacks.

    Args:
        name_of: The name of a source file; None if its functions are left out.

    Attributes:
        stacks: All different stacks, by thread.
    """

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        self._name_of, self._names = name_of, dict[str, str | None]()
        self._active = False
        self.stacks: dict[str, set[Stack]] = {}

    def install(self) -> None:
        """Watch this thread, and threads that start from now on."""
        sys.setprofile(self._called)
        threading.setprofile(self._called)

    def remove(self) -> None:
        """Watch no thread any more, apart from those that have started meanwhile."""
        sys.setprofile(None)
        threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of all watched threads within."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self._active and event == "call" and self._file(frame) is not None:
            stacks = self.stacks.setdefault(threading.current_thread().name, set())
            stacks.add(self._stack(frame))

    def _stack(self, frame: FrameType | None) -> Stack:
        found: list[tuple[str, str]] = []
        while frame is not None:
            file, name = self._file(frame), frame.f_code.co_qualname
            # Newer Pythons have no frames for comprehensions.
            if file is not None and not name.endswith(("comp>", "<genexpr>", "<module>")):
                found.append((file, name))
            frame = frame.f_back
        return tuple(reversed(found))

    def _file(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            self._names[path] = self._name_of(path)
        return self._names[path]
