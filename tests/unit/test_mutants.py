"""What ``make mutants`` does, on a repository of two files; and the list it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mutants.breaks import Break, BreakError, load
from mutants.results import Results, enough, score
from mutants.source import edit
from mutants.tree import Tree, snapshot
from mutants.trial import Result, TestRun, Trials, judge, run_tests

ROOT = Path(__file__).parents[2]
LIST = load(ROOT / "tests/mutants.toml")

MODULE = """
from functools import cache

LIMIT = 3


class Counter:
    def __init__(self) -> None:
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value  # é

    def add(self, by: int) -> int:
        self._count += by
        return self._count


if LIMIT:

    @cache
    def limited(by: int) -> int:
        return min(by, LIMIT)


def unlimited(by: int) -> int:
    return by
"""
CPP = r"""
int Box::size() const noexcept { return count_; }
Box::Box(int count) : count_(count) { check('}', "}"); }  // }
bool Box::has_room() {
    if (used < size()) { return true; }
    return Box::size() > 0;
}
int size() { return 1'000; }
"""
TESTS = """
from package.counter import Counter, limited


def test_counter():
    assert Counter().add(2) == 2


def test_limited():
    limited(2)


def test_red():
    assert limited(9) == 9
"""


class Here:
    """This environment, with the worktree first on its path."""

    def __init__(self, root: Path) -> None:
        self._root, self.python = root, Path(sys.executable)

    def variables(self) -> dict[str, str]:
        quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return {**os.environ, "PYTHONPATH": str(self._root / "src"), **quick}

    def build(self, root: Path) -> None:
        """There is nothing to compile."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    files = {
        "src/package/__init__.py": "",
        "src/package/counter.py": MODULE,
        "native/box.cpp": CPP,
        "tests/test_counter.py": TESTS,
        "pytest.ini": "[pytest]\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init"], ["add", "."], [*author, "commit", "-m", "all"]):
        subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)
    return root


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Tree:
    root = tmp_path / "tree"
    return Tree(repository, root, snapshot(repository), Here(root))


def a_break(of: str, pattern: str, replacement: str = "", test: str = "") -> Break:
    return Break("it", of, pattern, replacement, (f"tests/test_counter.py{test}",))


# ---- the list


@pytest.mark.parametrize("each", LIST, ids=lambda each: each.name)
def test_list_entry_fits_the_source(each: Break) -> None:
    change = edit(ROOT, each)
    if not change.is_native:
        compile(change.broken, change.path, "exec")
    assert [file for file in each.test_files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("name = 'a'\nof = 'b'\nreplace = 'c'\nwith = 'd'", "a: 'tests' must be a list"),
        ("name = 'a'\nof = 'b'\nreplace = 'c'\nwith = 'd'\ntests = []", "a: 'tests' and 'replace'"),
        ("name = 'a'\nof = 'b'\nreplace = 'c'\nwith = 'c'\ntests = ['d']", "a: 'with' is the same"),
        (
            "name = 'a'\nof = 'b'\nreplace = 'c'\nwith = 'd'\ntests = ['e']\nx = 1",
            "a: unknown key x",
        ),
    ],
)
def test_list_with_wrong_entry_is_refused_by_name(tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "mutants.toml"
    file.write_text(f"[[break]]\n{entry}\n")
    with pytest.raises(BreakError, match=message):
        load(file)


def test_list_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mutants.toml"
    entry = "[[break]]\nname = 'a'\nof = 'b'\nreplace = 'c'\nwith = 'd'\ntests = ['e']\n"
    file.write_text(entry * 2)
    with pytest.raises(BreakError, match="more than one break is named a"):
        load(file)


# ---- finding the pattern


@pytest.mark.parametrize(
    ("of", "pattern", "line"),
    [
        ("package.counter", "return by", "return by"),
        ("package.counter.LIMIT", "3", "LIMIT = 3"),
        ("package.counter.Counter.add", "self._count += by", "self._count += by"),
        ("package.counter.Counter.count", "self._count = value", "self._count = value  # é"),
        ("package.counter.Counter.count", "return self._count", "return self._count"),
        ("package.counter.limited", "@cache", "@cache"),
        ("package.counter.unlimited", "return by", "return by"),
        ("native/box.cpp", "Box::size() > 0", "return Box::size() > 0;"),
        ("native/box.cpp:Box::has_room", "size() > 0", "return Box::size() > 0;"),
        ("native/box.cpp:Box::Box", "check", "Box::Box(int count)"),
        ("native/box.cpp:size", "1'000", "int size()"),
    ],
)
def test_edit_changes_one_place(repository: Path, of: str, pattern: str, line: str) -> None:
    change = edit(repository, a_break(of, pattern, "BROKEN"))
    before, after = change.intact.splitlines(), change.broken.splitlines()
    (differs,) = [a for a, b in zip(before, after, strict=True) if a != b]
    assert line in differs
    assert change.broken.count("BROKEN") == 1


@pytest.mark.parametrize(
    ("of", "pattern", "message"),
    [
        ("package.counter.Counter.add", "self._count -= by", "it: .* 0 times .*Counter.add"),
        ("package.counter.Counter.add", "self._count", "it: .* 2 times"),
        ("package.counter.Counter.subtract", "by", "it: .*counter.py has no Counter.subtract"),
        ("elsewhere.counter", "by", "it: there is no file of elsewhere.counter"),
        ("native/box.cpp:Box::empty", "count_", "it: native/box.cpp has no Box::empty"),
        ("native/bag.cpp:Bag::size", "count_", "it: there is no file of native/bag.cpp"),
    ],
)
def test_edit_with_stale_entry_names_it(
    repository: Path, of: str, pattern: str, message: str
) -> None:
    with pytest.raises(BreakError, match=message):
        edit(repository, a_break(of, pattern))


# ---- trying breaks


def test_trials_tell_outcomes_apart_and_restore(tree: Tree) -> None:
    trials = Trials(tree, limit_s=300.0)
    add, limited = "package.counter.Counter.add", "package.counter.limited"
    green = "::test_counter"
    cases = [
        ("killed", a_break(add, "+=", "-=", green)),
        ("survived", a_break(limited, "min", "max", green)),
        ("invalid", a_break(add, "+=", "+= (", green)),
        ("invalid", a_break(add, "+= by", "+= bye", green)),
        ("invalid", a_break(add, "def add", "raise KeyError\n\n    def add", green)),
        ("invalid", a_break(add, "*=", "-=", green)),
        ("invalid", a_break(add, "+=", "-=", "::test_red")),
    ]
    results = [trials.run(each) for _, each in cases]
    assert [result.outcome for result in results] == [expected for expected, _ in cases]
    details = "\n".join(result.detail for result in results)
    for reason in ("test_counter", "bye", "KeyError", "0 times", "without the break"):
        assert reason in details
    assert (tree.root / "src/package/counter.py").read_text() == MODULE


def test_judge_without_end_is_a_timeout_and_with_collection_error_invalid() -> None:
    def outcome(status: int | None) -> str:
        return judge(TestRun(status, 0, (), "", 1.0), ["tests"]).outcome

    expected = ["timeout", "survived", "killed", "invalid", "invalid", "invalid", "invalid"]
    assert [outcome(status) for status in (None, 0, 1, 2, 3, 4, 5)] == expected


def test_run_tests_that_do_not_end_are_ended(tree: Tree) -> None:
    waits = tree.root / "tests/test_waits.py"
    waits.write_text("def test_waits():\n    __import__('threading').Event().wait()\n")
    assert run_tests(tree, ["tests/test_waits.py"], 1.0).status is None


def test_snapshot_has_uncommitted_changes(repository: Path, tree: Tree) -> None:
    (repository / "src/package/counter.py").write_text("changed = 1\n")
    again = Tree(repository, tree.root, snapshot(repository), Here(tree.root))
    assert (tree.root / "src/package/counter.py").read_text() == "changed = 1\n"
    assert again.blobs != tree.blobs


# ---- results


def test_results_are_kept_until_a_file_or_the_break_changes(tmp_path: Path) -> None:
    each, source = a_break("package.counter.Counter.add", "+=", "-="), Path("src/counter.py")
    blobs = {"src/counter.py": "1", "tests/test_counter.py": "2", "README.md": "3"}
    results = Results(tmp_path / "results.json")
    results.put(Results.key(each, source, blobs), Result("survived", "x", 1.0))
    again = Results(tmp_path / "results.json")

    def kept(each: Break, **changed: str) -> bool:
        return again.get(Results.key(each, source, blobs | changed)) is not None

    assert kept(each)
    assert kept(each, **{"README.md": "4"})
    assert not kept(each, **{"src/counter.py": "4"})
    assert not kept(each, **{"tests/test_counter.py": "4"})
    assert not kept(a_break("package.counter.Counter.add", "+=", "*="))


@pytest.mark.parametrize("outcome", ["timeout", "invalid"])
def test_results_without_verdict_are_not_kept(tmp_path: Path, outcome: str) -> None:
    results = Results(tmp_path / "results.json")
    results.put("key", Result(outcome))
    assert results.get("key") is None


def test_score_counts_only_the_killed() -> None:
    outcomes = [("a", Result("killed"))] * 3 + [("b", Result("survived")), ("b", Result("timeout"))]
    assert [line.split() for line in score(outcomes)] == [
        ["a", "3", "of", "3", "100%"],
        ["b", "0", "of", "2", "0%"],
        ["all", "3", "of", "5", "60%"],
    ]


@pytest.mark.parametrize(
    ("killed", "others", "passes"),
    [
        (19, ["survived"], True),
        (18, ["survived"], False),
        (18, ["timeout"], False),
        (99, ["invalid"], False),
        (1, [], True),
    ],
)
def test_enough_is_95_percent_and_no_invalid_entry(
    killed: int, others: list[Any], passes: bool
) -> None:
    results = [Result("killed")] * killed + [Result(other) for other in others]
    assert enough([("a", result) for result in results]) == passes
