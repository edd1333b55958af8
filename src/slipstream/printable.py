"""Text from files, peers and users, made safe for a terminal: escaped, and not too long."""

from __future__ import annotations

import reprlib

MOST_SHOWN = 200  # characters of a value that a message quotes

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_SHOWN


def printable(text: str) -> str:
    """On one line: characters that a terminal would act on, or cannot show, become escapes.

    >>> printable("rack \\x1b[2J\\n")
    'rack \\\\x1b[2J\\\\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines; line ends and tabs stay."""
    kept = ("\n", "\t")
    return "".join(c if c in kept else printable(c) for c in text)


def shown(value: object) -> str:
    """A value for an error message: like ``repr``, but short, however large or deep it is."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        text = f"<{type(value).__name__}>"
    return printable(text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…")
