"""The end of a job in one of its processes: of its ``with`` block, or of the process itself."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from slipstream.job_figures import JobFigures, warn_of
from slipstream.runtime.environment import Environment
from slipstream.runtime.error_reporting import describe_error
from slipstream.runtime.event_log import log_event
from slipstream.runtime.launch.presence import Presence
from slipstream.sessions.default_group import DefaultGroup
from slipstream.sessions.protocol import Session, Training

logger = logging.getLogger("slipstream.job")
_open: list[JobEnd] = []  # jobs of this process, which ends them if their scripts do not


class ExitCalls:
    """Notes calls of ``sys.exit``: exit handlers are not told why the process ends.

    Args:
        steps: how many steps this worker has made.
    """

    def __init__(self, steps: Callable[[], int]) -> None:
        self._steps, self._last = steps, (SystemExit(), -1)
        self._exit = sys.exit
        sys.exit = self

    def __call__(self, code: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():
            self._last = SystemExit(code), self._steps()
        self._exit(code)

    def failure(self) -> SystemExit | None:
        """The last call, if its code is not 0 and no step was made after it: nobody caught it."""
        error, steps = self._last
        return error if error.code and steps == self._steps() else None

    def close(self) -> None:
        """Note no more."""
        if sys.exit is self:
            sys.exit = self._exit


class JobEnd:
    """Ends a job once, whether its script has a ``with`` block or not.

    Args:
        group: torch's default group, if the job has made one.
        finish: ends the training after a loop without error: last weights, summary, outputs.
        steps: how many steps this worker has made.
    """

    def __init__(
        self,
        env: Environment,
        session: Session,
        presence: Presence,
        figures: JobFigures,
        group: DefaultGroup,
        finish: Callable[[], None],
        steps: Callable[[], int],
    ) -> None:
        self._env, self._session, self._presence = env, session, presence
        self._figures, self._group, self._finish = figures, group, finish
        self._process, self._over = os.getpid(), False
        self._exits = ExitCalls(steps)
        atexit.register(self.at_exit)
        _open.append(self)

    def end(self, error: BaseException | None) -> None:
        """Leave the job, or send the others the error that ends this process."""
        if self._over:
            return
        self._over = True
        atexit.unregister(self.at_exit)
        self._exits.close()
        _open.remove(self)
        try:
            if error is None:
                self._finish()
                self._presence.leave()
        except BaseException as late:
            error = late
            raise
        finally:
            said = None if error is None else describe_error(error)
            if error is not None:
                self._session.abort(error)  # before outputs, which may take long to close
            self._figures.close(said)
            self._group.close()
            self._session.close()
            log_event(logger, "left", level=logging.INFO, rank=self._env.rank, error=said)

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that joined."""
        return os.getpid() != self._process

    def at_exit(self) -> None:
        """The process ends, and the job's ``with`` block has not: there is none."""
        if self.is_forked:
            return
        try:
            # An error that nobody caught.
            self.end(getattr(sys, "last_value", None) or self._exits.failure())
        except BaseException as error:
            end_process(error)


def end_open_jobs(error: BaseException | None = None) -> None:
    """End jobs without a ``with`` block in a process that outlives its script, as Ray's do.

    Args:
        error: what has ended the script.
    """
    for job in [job for job in _open if not job.is_forked]:
        job.end(error)


def finish(
    env: Environment, session: Session, training: Training, figures: JobFigures, *, dealt: bool
) -> dict[str, Any] | None:
    """End a training whose loop is over; returns the summary of all workers on rank 0.

    Args:
        dealt: whether the loop's batches came from ``job.sampler``.
    """
    training.wait()
    if not training.pairs and env.world_size > 1 and env.rank == 0:
        warnings.warn(
            "job.distribute was never called: every worker trained on its own", stacklevel=5
        )
    training.finish()
    summary = session.leave(figures.of_worker(training))
    if summary is not None:
        if training.pairs:
            warn_of(summary, training.plan, dealt=dealt)
        figures.publish(summary)
    return summary


def end_process(error: BaseException) -> None:
    """Report an error and exit with a code; Python ignores errors of exit handlers."""
    code: object = 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as exit_:
        code = exit_.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
