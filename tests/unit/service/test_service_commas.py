"""Texts with a comma that are not in quotes, and rows that should have several classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.apps.service.rows import read

TRIPS = Path(__file__).parents[3] / "examples" / "trips.csv"
ASK = "Is there a comma in the text? Then put the text in quotes."


def about_commas(data: str) -> list[str]:
    return [text for text in read([data.encode()]).warnings if "comma" in text]


def trips_with(end: str, every: int) -> str:
    """The example; an end without quotes is added to some of its texts."""
    lines = TRIPS.read_text().splitlines()
    return "\n".join(
        line.replace(",", f"{end},", 1) if number % every == 0 else line
        for number, line in enumerate(lines, start=1)
    )


def test_end_that_repeats_after_a_space_is_warned_of() -> None:
    [said] = about_commas(trips_with(", please", 5))
    assert said == (
        "25 rows have several classes, one after a space; the first is line 5, class 'please'. "
        + ASK
    )


def test_several_classes_with_one_in_no_other_row_are_warned_of_however_few() -> None:
    """Of 36 rows with several classes, five have one of their own, with a space or without."""
    pairs = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"), ("i", "j")]
    rows = [f"text {n},{','.join(pairs[n % 5])}\n" for n in range(31)]
    rows += [f"room {n}, in Tokyo or {n},a\n" for n in range(3)]
    rows += [f"seat {n},to Rome or {n},b\n" for n in range(2)]
    [said] = about_commas("".join(rows))
    assert said == (
        "5 rows have several classes, one of them in no other row; the first is line 32, class "
        f"'in Tokyo or 0'. {ASK}"
    )


def test_both_signs_are_told_and_no_row_counts_twice() -> None:
    data = trips_with(", please", 5) + "\na room, in Oslo or so,hotel\n"
    alone, spaced = about_commas(data)
    assert alone.startswith("1 row has several classes, one of them in no other row; the first is")
    assert "line 129, class 'in Oslo or so'" in alone
    assert spaced.startswith("25 rows have several classes, one after a space")


def test_long_fragment_is_shortened() -> None:
    [said] = about_commas(f"one, {'x' * 50},a\n" + "two,a\nthree,b\n" * 3)
    assert f"class '{'x' * 40}…'." in said


@pytest.mark.parametrize(
    "row",
    [
        "text {n},a,b\n",  # always in this order
        "text {n}, a, b\n",  # a space before every column
        "text {n}, b,a\n",  # after a space, but a class of its own in other rows
        '"text {n}, please",a,b\n',
        "text {n},a,a\n",
        "text {n}, a,a\n",
    ],
)
def test_ordinary_rows_of_several_classes_are_not_warned_of(row: str) -> None:
    single = "".join(f"text {n},{name}\n" for n, name in enumerate("abcdc" * 4))
    assert about_commas(single + "".join(row.format(n=n) for n in range(6))) == []


def test_header_row_of_several_columns_is_no_comma() -> None:
    rows = "".join(f"text {n},{'ab'[n % 2]},{'cd'[n % 2]}\n" for n in range(12))
    warnings = read([f"text,topic,tone\n{rows}".encode()]).warnings
    assert warnings[0].startswith("The first row looks like a header")
    assert not [text for text in warnings if "comma" in text]
    assert about_commas(f"hello,topic,tone\n{rows}")  # which does not look like one
