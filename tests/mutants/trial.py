"""One break is applied in the tree, and the tests that must see it run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from mutants.breaks import Break, BreakError
from mutants.environment import CommandFailed
from mutants.source import Edit, edit
from mutants.tree import Tree

NO_CACHE = {"PYTHONDONTWRITEBYTECODE": "1"}  # broken code leaves no compiled copy behind
Outcome = Literal["killed", "survived", "timeout", "invalid"]


@dataclass(frozen=True)
class Result:
    """What became of a break.

    ``killed``: a test failed. ``survived``: all passed. ``timeout``: the tests did not end in
    time. ``invalid``: nothing can be said, for the reason in ``detail``.
    """

    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class TestRun:
    __test__ = False

    status: int | None  # as pytest ends; None: not in time
    num_passed: int
    failed: tuple[str, ...]
    output: str
    seconds: float


class Trials:
    """Tries breaks, one after the other, in one tree.

    Args:
        tree: The tree that is broken and restored.
        limit_s: The longest time that the tests of a break may take.
    """

    def __init__(self, tree: Tree, limit_s: float) -> None:
        self._tree = tree
        self._limit_s = limit_s
        self._intact: dict[tuple[str, ...], str] = {}  # why tests cannot be used; empty: they can

    def run(self, each: Break) -> Result:
        try:
            change = edit(self._tree.root, each)
        except BreakError as error:
            return Result("invalid", str(error))
        if each.tests not in self._intact:
            self._intact[each.tests] = self._unusable_reason(each.tests)
        if reason := self._intact[each.tests]:
            return Result("invalid", reason)
        with self._tree.broken(change):
            return self._judge_broken(change, each.tests)

    def _unusable_reason(self, tests: tuple[str, ...]) -> str:
        """Run tests without a break."""
        self._tree.environment.build(self._tree.root)
        run = run_tests(self._tree, tests, self._limit_s)
        if run.status is None:
            return f"without the break, the tests do not end within {self._limit_s:g} s"
        if run.status != 0:
            where = ", ".join(run.failed) or last_line(run.output)
            return f"without the break, the tests fail: {where}"
        if run.num_passed == 0:
            return f"no test ran: {last_line(run.output)}"
        return ""

    def _judge_broken(self, change: Edit, tests: tuple[str, ...]) -> Result:
        try:
            self._tree.environment.build(self._tree.root)
        except CommandFailed as error:
            return Result("invalid", f"does not compile: {last_line(str(error))}")
        if reason := self._import_error(change):
            return Result("invalid", reason)
        run = run_tests(self._tree, tests, self._limit_s, "-x", keep_compiled=False)
        return judge(run, tests)

    def _import_error(self, change: Edit) -> str:
        """Return why broken code cannot even be imported: a test that fails then proves nothing."""
        if change.is_native:
            return ""
        if (undefined := self._tree.lint(change.path)) is not None:
            return f"names or syntax are wrong: {undefined}"
        done = subprocess.run(
            [self._tree.environment.python, "-c", f"import {change.module}"],
            cwd=self._tree.root,
            env=self._tree.environment.variables() | NO_CACHE,
            capture_output=True,
            text=True,
        )
        return f"cannot be imported: {last_line(done.stderr)}" if done.returncode else ""


def judge(run: TestRun, tests: Sequence[str]) -> Result:
    """Return what tests that have passed without a break say with it."""
    match run.status:
        case None:
            return Result("timeout", "the tests did not end in time", run.seconds)
        case 0:
            return Result("survived", ", ".join(tests), run.seconds)
        case 1:
            return Result("killed", ", ".join(run.failed), run.seconds)
    reason = f"pytest ended with status {run.status}: {last_line(run.output)}"
    return Result("invalid", reason, run.seconds)


def run_tests(
    tree: Tree, tests: Sequence[str], limit_s: float, *options: str, keep_compiled: bool = True
) -> TestRun:
    """Run tests in a session of their own, so that all that they start can be ended."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = Path(folder, "report.xml"), Path(folder, "log")
        variables = tree.environment.variables() | ({} if keep_compiled else NO_CACHE)
        command: list[str | Path] = [tree.environment.python, "-m", "pytest", "-q", *options]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        start = time.monotonic()
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                cwd=tree.root,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = wait_or_end(process, limit_s)
        seconds = time.monotonic() - start
        num_passed, failed = read_report(report)
        return TestRun(status, num_passed, failed, log.read_text(errors="replace"), seconds)


def wait_or_end(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    status = None
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if status is None:  # or the user has interrupted us
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status


def read_report(path: Path) -> tuple[int, tuple[str, ...]]:
    if not path.exists():
        return 0, ()
    num_passed, failed = 0, []
    for case in ElementTree.parse(path).iter("testcase"):
        marks = {child.tag for child in case}
        num_passed += not marks & {"failure", "error", "skipped"}
        if marks & {"failure", "error"}:
            failed.append(case.get("name", ""))
    return num_passed, tuple(failed)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
