"""Which tests ``make quick`` takes for a change, on a small project."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import nearest
from nearest import Imports, changed_since, read, select

PROJECT = {
    "src/slipstream/__init__.py": "",
    "src/slipstream/__init__.pyi": "from slipstream.codecs import Dense as Dense",
    "src/slipstream/types.py": "",
    "src/slipstream/codecs/__init__.py": (
        "from slipstream.codecs.dense import Dense\nfrom slipstream.codecs.rows import Rows"
    ),
    "src/slipstream/codecs/dense.py": "from slipstream.types import Spec",
    "src/slipstream/codecs/rows.py": "from slipstream._native import pack",
    "src/slipstream/plan.py": (
        "try:\n    pass\nexcept E:\n    def f():\n        from slipstream.codecs import Dense"
    ),
    "src/slipstream/page.py": "TEXT = read('page.html')",
    "tests/conftest.py": "",
    "tests/samples.py": "import slipstream.plan",
    "tests/unit/conftest.py": "import helpers",
    "tests/unit/helpers.py": "",
    "tests/unit/test_dense.py": "from slipstream.codecs.dense import Dense",
    "tests/unit/test_face.py": "import slipstream\nslipstream.Dense()",
    "tests/unit/test_page.py": "from slipstream import page",
    "tests/unit/test_plan.py": "import samples",
    "tests/unit/test_rows.py": "from slipstream.codecs import Rows as Other",
    "tests/contract/test_codecs.py": "from slipstream.codecs import Dense, Rows",
    "tests/process/test_job.py": "from slipstream.codecs.dense import Dense",
}
NEAR_DENSE = [
    "tests/contract/test_codecs.py",
    "tests/unit/test_dense.py",
    "tests/unit/test_face.py",
]


def chosen(*changed: str, farthest: int = 9) -> list[str]:
    return select(PROJECT, changed, farthest=farthest).nearest


def test_nearest_are_the_importers_of_a_module_and_then_theirs() -> None:
    assert chosen("src/slipstream/codecs/dense.py") == [*NEAR_DENSE, "tests/unit/test_plan.py"]


@pytest.mark.parametrize(("farthest", "number"), [(0, 0), (1, 3), (2, 3), (3, 4)])
def test_distance_is_counted_in_imports(farthest: int, number: int) -> None:
    assert len(chosen("src/slipstream/codecs/dense.py", farthest=farthest)) == number


def test_name_of_a_package_leads_to_the_module_that_has_it() -> None:
    found = chosen("src/slipstream/codecs/rows.py")
    assert found == ["tests/contract/test_codecs.py", "tests/unit/test_rows.py"]


def test_changed_package_is_near_all_that_take_names_from_it() -> None:
    assert "tests/unit/test_rows.py" in chosen("src/slipstream/codecs/__init__.py", farthest=1)
    assert "tests/unit/test_face.py" in chosen("src/slipstream/__init__.pyi", farthest=1)


def test_modules_taken_from_the_package_itself_are_near() -> None:
    assert chosen("src/slipstream/page.py") == ["tests/unit/test_page.py"]


def test_changed_test_comes_first() -> None:
    found = chosen("src/slipstream/codecs/dense.py", "tests/unit/test_plan.py")
    assert found == ["tests/unit/test_plan.py", *NEAR_DENSE]


def test_changed_helper_and_fixtures_reach_tests_of_their_folder() -> None:
    assert chosen("tests/samples.py") == ["tests/unit/test_plan.py"]
    assert len(chosen("tests/unit/helpers.py", farthest=2)) == 5
    assert len(chosen("tests/conftest.py", farthest=1)) == 6


def test_native_code_and_other_files_reach_their_readers() -> None:
    assert chosen("native/rows.cpp") == chosen("src/slipstream/codecs/rows.py")
    assert chosen("src/slipstream/pages/page.html") == ["tests/unit/test_page.py"]
    assert chosen("docs/other.md") == []


def test_changed_test_of_processes_is_named_and_not_run() -> None:
    changed = ["tests/process/test_job.py", "tests/unit/test_page.py"]
    found = select(PROJECT, changed)
    assert found.nearest == ["tests/unit/test_page.py"]
    assert found.other == ["tests/process/test_job.py"]


def test_most_files_leaves_out_the_farthest() -> None:
    found = select(PROJECT, ["src/slipstream/codecs/dense.py"], most_files=3)
    assert found.nearest == NEAR_DENSE
    assert found.further == ["tests/unit/test_plan.py"]


def test_tests_of_every_module_come_with_any_change_of_the_package() -> None:
    always = nearest.OF_EVERY_MODULE[-1]
    files = PROJECT | {always: ""}
    assert select(files, ["src/slipstream/page.py"], most_files=1).nearest == [always]
    assert select(files, ["tests/samples.py"]).nearest == ["tests/unit/test_plan.py"]


# ---- this repository


def test_tests_of_every_module_are_there() -> None:
    assert all((nearest.ROOT / path).exists() for path in nearest.OF_EVERY_MODULE)


def test_repository_has_a_test_near_each_codec() -> None:
    files = read()
    imports = Imports(files)
    for codec in ("dense", "filter", "one_bit", "quantized"):
        distances = imports.distances([f"src/slipstream/codecs/{codec}.py"])
        assert distances["tests/contract/test_codecs.py"] == 1


def test_changed_since_has_uncommitted_and_new_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / ".gitignore").write_text("ignored\n")
    for name in ("kept", "changed", "staged"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_since("HEAD", tmp_path) == []
    for name in ("changed", "staged", "new é", "ignored"):
        (tmp_path / name).write_text("2")
    git("add", "staged")
    assert changed_since("HEAD", tmp_path) == ["changed", "new é", "staged"]
    git("add", ".")
    git("commit", "-m", "second")
    assert changed_since("HEAD~1", tmp_path) == ["changed", "new é", "staged"]
