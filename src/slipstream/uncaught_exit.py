"""Notes a ``sys.exit`` that nobody catches: Python does not tell exit handlers of it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn


class _Exit(SystemExit):
    """Calls ``note`` when the interpreter drops it, if no code has caught it.

    The interpreter drops an uncaught exit when all code has ended. One that was caught is dropped
    while the code that caught it runs. One that is still held by an object (a task of asyncio, say)
    is not noted.
    """

    def __init__(self, args: tuple[Any, ...], note: Callable[[SystemExit], None]) -> None:
        super().__init__(*args)
        self._note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            self._note(SystemExit(*self.args).with_traceback(self.__traceback__))


class UncaughtExit:
    """The ``sys.exit`` that ends this process, noted between ``watch`` and ``close``.

    Attributes:
        failure: that exit, if its code is not 0.
    """

    def __init__(self) -> None:
        self.failure: SystemExit | None = None
        self._before, self._own = sys.exit, sys.exit

    def watch(self) -> None:
        """Replace ``sys.exit``, which still raises a SystemExit."""
        self._before = before = sys.exit

        @functools.wraps(before)
        def exit_noted(code: Any = None, /) -> NoReturn:
            if threading.current_thread() is not threading.main_thread():
                before(code)  # it ends the thread alone
            caller = sys._getframe(1)
            # The interpreter does not keep the traceback of an exit that nobody catches.
            place = TracebackType(None, caller, caller.f_lasti, caller.f_lineno)
            raise _Exit(arguments_of(code), self._note).with_traceback(place)

        self._own = sys.exit = exit_noted

    def _note(self, exit_: SystemExit) -> None:
        self.failure = exit_ if exit_.code else None

    def close(self) -> None:
        """Put ``sys.exit`` back, unless other code has replaced it since."""
        if sys.exit is self._own:
            sys.exit = self._before


def arguments_of(code: Any) -> tuple[Any, ...]:
    """The arguments of the SystemExit that the built-in ``sys.exit(code)`` raises.

    >>> arguments_of(3), arguments_of(None), arguments_of((1, 2)), arguments_of(SystemExit(4))
    ((3,), (), (1, 2), (4,))
    """
    if isinstance(code, SystemExit):
        return code.args
    if isinstance(code, tuple):
        return code
    return () if code is None else (code,)
