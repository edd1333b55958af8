"""The end of a job in one of its processes: of its ``with`` block, or of the process itself."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from slipstream.job_figures import JobFigures, warn_of
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import describe_error
from slipstream.runtime.process.event_log import log_event
from slipstream.sessions.default_group import DefaultGroup
from slipstream.sessions.protocol import Session
from slipstream.torch.capture.late_steps import watch_late_steps
from slipstream.torch.distribute.training import Training
from slipstream.uncaught_exit import UncaughtExit

logger = logging.getLogger("slipstream.job")
_open: list[JobEnd] = []  # jobs of this process, which ends them if their scripts do not
_exit = UncaughtExit()  # watched while a job is open


class JobEnd:
    """Ends a job once, whether its script has a ``with`` block or not.

    Args:
        group: torch's default group, if the job has made one.
        finish: ends the training after a loop without error: last weights, summary, outputs.
    """

    def __init__(
        self,
        env: Environment,
        session: Session,
        presence: Presence,
        figures: JobFigures,
        group: DefaultGroup,
        finish: Callable[[], None],
    ) -> None:
        self._env, self._session, self._presence = env, session, presence
        self._figures, self._group, self._finish = figures, group, finish
        self._process, self._over = os.getpid(), False
        atexit.register(self.at_exit)
        if not _open:
            _exit.watch()
        _open.append(self)

    def end(self, error: BaseException | None) -> None:
        """Leave the job, or send the others the error that ends this process."""
        if self._over:
            return
        self._over = True
        atexit.unregister(self.at_exit)
        _open.remove(self)
        if not _open:
            _exit.close()
        try:
            if error is None:
                self._finish()
                self._presence.leave()
        except BaseException as late:
            error = late
            raise
        finally:
            said = None if error is None else describe_error(error)
            with ExitStack() as last:  # in reverse order, each whether others fail or not
                last.callback(self._session.close)
                last.callback(self._group.close)
                last.callback(self._figures.close, said)
                if error is not None:
                    self._session.abort(error)  # before outputs, which may take long to close
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
            self.end(getattr(sys, "last_value", None) or _exit.failure)
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
    training.mode.wait()
    if not training.mode.pairs and env.world_size > 1 and env.rank == 0:
        warnings.warn(
            "job.distribute was never called: every worker trained on its own", stacklevel=5
        )
    training.mode.finish()
    if env.world_size > 1:
        for pair in training.mode.pairs:
            watch_late_steps(pair.optimizer, lambda: not _open, warns=env.rank == 0)
    summary = session.leave(figures.of_worker(training))
    if summary is not None:
        if training.mode.pairs:
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
