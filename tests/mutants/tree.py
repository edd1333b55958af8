"""A git worktree in which code is broken, one break at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path

from mutants.environment import Environment, run
from mutants.source import Edit


def snapshot(repository: Path) -> str:
    """Return a commit of the repository as it is: with uncommitted changes of tracked files."""
    return run("git", "stash", "create", cwd=repository) or run(
        "git", "rev-parse", "HEAD", cwd=repository
    )


class Tree:
    """A worktree of one commit.

    Args:
        repository: The tree from which the worktree is made.
        root: Where the worktree is; kept between runs.
        commit: What is checked out.
        environment: What runs the worktree's code.
    """

    def __init__(self, repository: Path, root: Path, commit: str, environment: Environment) -> None:
        self.root, self.environment = root, environment
        self._check_out(repository, commit)
        self.blobs = blobs(root, commit)

    def _check_out(self, repository: Path, commit: str) -> None:
        run("git", "worktree", "prune", cwd=repository)
        if (self.root / ".git").exists():
            run("git", "checkout", "--quiet", "--force", "--detach", commit, cwd=self.root)
        else:
            run("git", "worktree", "add", "--detach", self.root, commit, cwd=repository)

    @contextmanager
    def broken(self, change: Edit) -> Iterator[None]:
        """Apply a change inside the block."""
        self._write(change, change.broken)
        try:
            yield
        finally:
            self._write(change, change.intact)

    def _write(self, change: Edit, text: str) -> None:
        path = self.root / change.path
        path.write_text(text)
        # Compiled code is told by its source's size and second, which may be the same.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def lint(self, path: Path) -> str | None:
        """Return the first name of a file that is not defined, or syntax error; None: neither."""
        options = ("--isolated", "--select", "F821", "--output-format", "concise", "--no-cache")
        command: list[str | Path] = [sys.executable, "-m", "ruff", "check", *options, path]
        done = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        return done.stdout.splitlines()[0] if done.returncode else None


def blobs(root: Path, commit: str) -> dict[str, str]:
    """Return the id of every file's content."""
    rows = run("git", "ls-tree", "-r", "-z", commit, cwd=root).split("\0")
    return {row.partition("\t")[2]: row.partition("\t")[0].split()[2] for row in rows if row}
