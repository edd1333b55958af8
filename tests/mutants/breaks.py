"""The list of breaks: ``tests/mutants.toml``, one ``[[break]]`` table for each."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEYS = {"name": str, "of": str, "replace": str, "with": str, "tests": list}


class BreakError(ValueError):
    """An entry of the list that cannot be used; the message names it."""


@dataclass(frozen=True)
class Break:
    """One deliberate break of one function, class or variable.

    Args:
        name: Its name in the list, the only one of that name.
        of: What is broken: ``slipstream.package.module.Class.method``, or for C++
            ``native/file.cpp:Class::function``. A module or a file alone is possible, too.
        pattern: Text inside it, exactly once.
        replacement: What stands there instead.
        tests: Tests for pytest, by path or id, of which at least one must fail.
    """

    name: str
    of: str
    pattern: str
    replacement: str
    tests: tuple[str, ...]

    @property
    def test_files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})

    def fields(self) -> dict[str, Any]:
        """Return what identifies the break; its name may change."""
        return {key: value for key, value in asdict(self).items() if key != "name"}


def load(path: Path) -> list[Break]:
    """Return the breaks of a list.

    Raises:
        BreakError: If an entry lacks a key, has an unknown one, or two have one name.
    """
    tables = tomllib.loads(path.read_text()).get("break", [])
    breaks = [from_table(table, number) for number, table in enumerate(tables, 1)]
    names = [each.name for each in breaks]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise BreakError(f"{path.name}: more than one break is named {', '.join(doubles)}")
    return breaks


def from_table(table: dict[str, Any], number: int) -> Break:
    name = table.get("name", f"break {number}")
    for key, kind in KEYS.items():
        if not isinstance(table.get(key), kind):
            raise BreakError(f"{name}: {key!r} must be a {kind.__name__}")
    if unknown := sorted(set(table) - set(KEYS)):
        raise BreakError(f"{name}: unknown key {', '.join(unknown)}; there are {', '.join(KEYS)}")
    if not table["tests"] or not table["replace"].strip():
        raise BreakError(f"{name}: 'tests' and 'replace' must not be empty")
    if table["replace"] == table["with"]:
        raise BreakError(f"{name}: 'with' is the same as 'replace'")
    return Break(name, table["of"], table["replace"], table["with"], tuple(table["tests"]))
