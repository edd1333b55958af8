"""Runs the unit and contract tests of what differs from a commit: those nearest to it by imports.

A test file is as far from a changed file as there are imports between them: 1 if it imports it
itself, 2 if it imports a module that does. Names that a package has from its modules lead to these
modules, so that a change of one codec is not a change of all.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# The slowest 60 files near a module take about a minute on two idle cores, and less than three
# minutes if others use these, too.
FARTHEST, MOST_FILES = 4, 60
ROOMS = ("tests/unit/", "tests/contract/")  # whose tests are run
# They read all of the package, or run all of its parts together.
OF_EVERY_MODULE = (
    "tests/unit/test_counters.py",
    "tests/unit/test_doctests.py",
    "tests/unit/test_imports.py",
    "tests/unit/test_mutants.py",
    "tests/sim/test_golden_runs.py",
)
SOURCE, NATIVE = "src/slipstream/", "slipstream._native"


class Selection(NamedTuple):
    """Which test files are run.

    Attributes:
        nearest: The nearest first.
        further: Those that would also be run if there were no limit.
        other: Changed test files that this command does not run.
    """

    nearest: list[str]
    further: list[str]
    other: list[str]


class Imports:
    """Which files of a project need which.

    Args:
        files: Texts of Python files and stubs, by their paths from the project's root.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._trees = {path: ast.parse(text) for path, text in files.items()}
        self._texts = files
        self._packages = {path: _exports(tree) for path, tree in self._trees.items()}
        self._needed_by: dict[str, set[str]] = defaultdict(set)
        for path in files:
            for needed in self._needs(path):
                self._needed_by[needed].add(path)

    def distances(self, changed: Collection[str]) -> dict[str, int]:
        """Return how far from the nearest changed file the others are that need one of them."""
        known = dict.fromkeys(changed, 0)
        waiting = sorted(known)
        for path in waiting:
            for other in sorted(self._needed_by[path] | self._naming(path)):
                if other not in known:
                    known[other] = known[path] + 1
                    waiting.append(other)
        return known

    def _naming(self, path: str) -> set[str]:
        """Return the files whose code reads a file that is not Python's: they have its name."""
        name = PurePosixPath(path).name
        if path.startswith("native/"):
            return self._needed_by[NATIVE]
        if path.endswith((".py", ".pyi")):
            return set()
        return {other for other, text in self._texts.items() if name in text}

    def _needs(self, path: str) -> Iterator[str]:
        folder = PurePosixPath(path).parent
        if path.startswith("tests/") and PurePosixPath(path).name.startswith("test_"):
            # Fixtures of the folders above.
            yield from (str(above / "conftest.py") for above in (folder, *folder.parents))
        if path.endswith(("__init__.py", "__init__.pyi")):
            return  # who takes a name from a package needs the module that has it
        for module, name in _imported(self._trees[path]):
            yield from self._places(module, name, folder)

    def _places(self, module: str, name: str, folder: PurePosixPath) -> Iterator[str]:
        """Yield the files that an imported name may be of, and packages on the way."""
        if f"{module}.{name}" == NATIVE or module == NATIVE:
            yield NATIVE
            return
        for base in _bases(module, folder):
            if name and (found := self._file(f"{base}/{name}")):
                yield found
            elif found := self._file(base):
                yield found
                for home, original in self._homes(found, name):
                    yield from self._places(home, original, folder)

    def _file(self, base: str) -> str | None:
        for path in (f"{base}.py", f"{base}/__init__.pyi", f"{base}/__init__.py"):
            if path in self._trees:
                return path
        return None

    def _homes(self, package: str, name: str) -> Iterator[tuple[str, str]]:
        if package.endswith(("__init__.py", "__init__.pyi")) and name in self._packages[package]:
            yield self._packages[package][name]


def _bases(module: str, folder: PurePosixPath) -> Iterator[str]:
    """Yield the paths, without endings, that a module's name may mean in a folder."""
    parts = module.replace(".", "/")
    if module.split(".")[0] == "slipstream":
        yield f"src/{parts}"
    else:
        yield from dict.fromkeys(f"{above}/{parts}" for above in (folder, "tests"))


def _exports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the names that a file has from elsewhere, with module and name there."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield modules and names of theirs; ``slipstream.x`` is a name of the package, too."""
    uses_package = False
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
            uses_package |= any(alias.name == "slipstream" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
    if uses_package:
        attributes = (each for each in ast.walk(tree) if isinstance(each, ast.Attribute))
        yield from (("slipstream", each.attr) for each in attributes if _is_package(each.value))


def _is_package(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "slipstream"


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements within, without looking into expressions, which are far more."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


def select(
    files: Mapping[str, str],
    changed: Collection[str],
    *,
    farthest: int = FARTHEST,
    most_files: int = MOST_FILES,
) -> Selection:
    """Choose test files.

    Args:
        files: As in ``Imports``.
        changed: Paths of changed files, of whatever kind.
        farthest: The most imports between a test file and a changed one.
        most_files: How many test files are run.
    """
    distances = Imports(files).distances(changed)
    for path in OF_EVERY_MODULE:
        if path in files and any(each.startswith(SOURCE) for each in changed):
            distances[path] = 0
    tests = [path for path in files if _is_test(path)]
    mine = [each for each in tests if each.startswith(ROOMS) or each in OF_EVERY_MODULE]
    near = [each for each in mine if distances.get(each, farthest + 1) <= farthest]
    near.sort(key=lambda each: (distances[each], each))
    other = sorted(each for each in changed if each in tests and each not in mine)
    return Selection(near[:most_files], near[most_files:], other)


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


# ---- this repository


def read(root: Path = ROOT) -> dict[str, str]:
    """Read all Python files of the package and of the tests."""
    paths = [path for folder in ("src", "tests") for path in (root / folder).rglob("*.py*")]
    kept = [path for path in paths if path.suffix in (".py", ".pyi")]
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(kept)}


def changed_since(commit: str, root: Path = ROOT) -> list[str]:
    """Return the paths of files that differ from a commit, also of new ones."""
    differing = ["git", "diff", "--name-only", "-z", commit, "--"]
    new = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    told = [
        subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        for command in (differing, new)
    ]
    return sorted(path for path in "".join(told).split("\0") if path)


def run(tests: list[str]) -> int:
    """Run test files, the first ones first."""
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", "-q", *workers, *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="make quick", description=__doc__)
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="by default the last one")
    parser.add_argument("--list", action="store_true", help="only print the test files")
    given = parser.parse_args()
    changed = changed_since(given.since)
    chosen = select(read(), changed)
    if given.list:
        print(*chosen.nearest, sep="\n")
        return 0
    print(f"quick: {len(changed)} files differ from {given.since}; ", end="")
    print(f"{len(chosen.nearest)} test files are near")
    if chosen.further:
        print(f"quick: {len(chosen.further)} more are left to `make test`, which runs all")
    if chosen.other:
        print(f"quick: changed, but not run here: {' '.join(chosen.other)}")
    sys.stdout.flush()
    return run(chosen.nearest) if chosen.nearest else 0


if __name__ == "__main__":
    sys.exit(main())
