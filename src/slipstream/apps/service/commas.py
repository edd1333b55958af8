"""Commas in texts without quotes: what follows such a comma becomes a class of its own.

So a row gets several classes, of which the last is the one that its writer meant. Three signs tell
these rows from rows that should have several classes. The page looks for the same signs before
anything is sent (``page.js``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

COMMON_SHARE = 0.9  # of the rows: a class on more, beside others, tells nothing
MOST_SHOWN = 40  # characters of a class
ASK = "Is there a comma in the text? Then put the text in quotes."


class Several(NamedTuple):
    """A row of several classes.

    Attributes:
        line: Where it begins.
        names: Its classes, in order.
        spaced: Those before the last that have a space before them, if the last one has none.
    """

    line: int
    names: list[str]
    spaced: list[str]


def spaced_fields(fields: Sequence[str]) -> list[str]:
    """The fields before the last that begin with a space, if the last one does not.

    People write a space after a comma in a sentence; programs write none between columns.

    >>> spaced_fields([" please", "hotel"]), spaced_fields([" hotel", " cheap"])
    ([' please'], [])
    """
    filled = [field for field in fields if field.strip()]
    if not filled or filled[-1].startswith(" "):
        return []
    return [field for field in filled if field.startswith(" ")]


def comma_warnings(
    rows: Sequence[Several], counts: dict[str, int], total: int, ends: Collection[str]
) -> Iterator[str]:
    """What looks like commas without quotes.

    >>> rows = [Several(7, ["in Tokyo", "hotel"], ["in Tokyo"])]
    >>> next(comma_warnings(rows, {"in Tokyo": 1, "hotel": 9}, 10, {"hotel"})).partition(";")[0]
    '1 row has several classes, one of them in no other row'

    Args:
        rows: Those of several classes.
        counts: How many rows each class has.
        total: How many rows there are.
        ends: The classes that are the last of a row.
    """
    common = next((name for name, count in counts.items() if count >= COMMON_SHARE * total), None)
    if rows and len(counts) > 2 and common is not None:
        where = f"on nearly every row, beside others (line {rows[0].line:,})"
        ask = "is there a comma in the texts? Then put them in quotes."
        yield f"The class {_shown(common)} is {where}: {ask}"
    alone, spaced = list[tuple[int, str]](), list[tuple[int, str]]()
    for row in rows:
        if only := [name for name in row.names if counts[name] == 1]:
            alone.append((row.line, only[0]))
        # A class that ends a row is meant as one. Of the common one all is said.
        elif rest := [name for name in row.spaced if name not in ends and name != common]:
            spaced.append((row.line, rest[0]))
    for found, sign in ((alone, "one of them in no other row"), (spaced, "one after a space")):
        if found:
            line, name = found[0]
            subject = "1 row has" if len(found) == 1 else f"{len(found):,} rows have"
            where = f"the first is line {line:,}, class {_shown(name)}"
            yield f"{subject} several classes, {sign}; {where}. {ASK}"


def _shown(name: str) -> str:
    return repr(name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}…")
