"""Text from outside, as messages and tables show it."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slipstream import printable as module
from slipstream.apps.bench.comparison import Bounds, Outcome
from slipstream.apps.bench.report import table
from slipstream.apps.cli.summary import summary_table
from slipstream.planning.table import Row, as_text
from slipstream.printable import MOST_SHOWN, printable, printable_lines, shown
from slipstream.runtime.servers.accounts import staleness_text


def test_the_example() -> None:
    assert doctest.testmod(module).failed == 0


@given(st.text())
def test_whatever_it_was_it_can_be_printed_on_one_line(text: str) -> None:
    assert printable(text).isprintable()
    printable(text).encode()
    assert printable(text) == text or not text.isprintable()
    assert printable_lines(text).replace("\n", "").replace("\t", "").isprintable()


def deep(levels: int) -> list[object]:
    nested: list[object] = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "value",
    ["a" * 10**6, 10**5000, 1 << 10**6, deep(100_000), {"a": deep(10)}, list(range(10**5))],
    ids=["text", "number", "large number", "deep", "deeper", "list"],
)
def test_values_are_quoted_shortly(value: object) -> None:
    assert len(shown(value)) <= MOST_SHOWN + 1
    assert shown(value).isprintable()


def test_small_values_are_quoted_as_they_are() -> None:
    for value in ("fast", 3, -1.5, [1], True, None, {"a": 1}, "Zürich"):
        assert shown(value) == repr(value)


EVIL = "x[/]\x1b[2J"
SHOWN = "x[/]\\x1b[2J"


def rendered(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_names_in_a_plan_and_in_accounts() -> None:
    assert SHOWN in as_text([Row(EVIL, (1,), "dense", 1.0, None, 1.0, None, "")])
    ages = dict.fromkeys(("min", "mean", "median", "max", "std", "count"), 1.0)
    assert SHOWN in staleness_text({EVIL: ages})


def test_names_in_a_summary() -> None:
    summary = {
        "strategy": EVIL,
        "workers": 1,
        "servers": 0,
        "samples_per_s": 1.0,
        "bytes": {"by_scheme": {EVIL: 1}},
        "wait_s": 0.0,
        "wall_s": 1.0,
    }
    assert rendered(summary_table(summary)).count(SHOWN) == 2


def test_names_in_a_comparison() -> None:
    bounds = Bounds(None, None, None)
    assert SHOWN in rendered(table([Outcome(EVIL, 1)], bounds, None, None))
