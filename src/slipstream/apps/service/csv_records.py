"""CSV (RFC 4180) as it arrives: records with the physical line where each began.

Lines end with LF, CRLF or CR. A quoted field may contain line ends, commas and doubled quotes;
spaces around its quotes are skipped. A quote inside an unquoted field is a plain character.

At any time one block and one record are in memory, and a record is at most ``MOST_CHARACTERS``
long: a quote that never ends is found there, not at the end of the body. Python's ``csv`` has no
such limit of its own, and cannot refuse text after a closing quote but accept spaces there.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator

from slipstream.apps.service.errors import ApiError

MOST_CHARACTERS = 4 << 20  # of a record: 3,000 classes of 256 characters, and a text, fit
# Bytes that are no UTF-8 are decoded to these characters, which no valid UTF-8 contains.
ESCAPED = re.compile("[\udc80-\udcff]")
ZIP, XLS = "PK\x03\x04", "\udcd0\udccf\x11\udce0"  # how a zip or xlsx begins; and an xls
OPENING = re.compile(r'[ \t]*"')
CLOSED = re.compile(r'([^"]*+(?:""[^"]*+)*+)"([^,]*)')  # a quoted value, and what follows it

Record = tuple[int, list[str]]  # the physical line where it began, from 1; its fields


def malformed(description: str) -> ApiError:
    """The refusal of training data that is no CSV of texts and classes."""
    return ApiError("Malformed data", description)


def records(stream: Iterable[bytes]) -> Iterator[Record]:
    """The records of a CSV in UTF-8, whose bytes are cut anywhere; blank lines are skipped.

    >>> list(records([b'one,a\\r\\n\\n"two,', b' ""2"" ",b\\n']))
    [(1, ['one', 'a']), (3, ['two, "2" ', 'b'])]
    """
    numbered = enumerate(_lines(stream), start=1)
    for number, line in numbered:
        _check(number, line)
        if len(line) > MOST_CHARACTERS:
            raise malformed(
                f"The row at line {number:,} has more than {MOST_CHARACTERS:,} characters."
            )
        if '"' in line:
            yield number, _quoted_fields(number, line, numbered)
        elif line and not line.isspace():
            yield number, line.split(",")


def _lines(stream: Iterable[bytes]) -> Iterator[str]:
    """Physical lines without their ends. One that is too long is the last: records refuse it."""
    ends = io.IncrementalNewlineDecoder(None, translate=True)
    rest = ""
    for block in codecs.iterdecode(stream, "utf-8-sig", "surrogateescape"):
        *whole, rest = (rest + ends.decode(block)).split("\n")
        yield from whole
        if len(rest) > MOST_CHARACTERS:
            break
    yield from (rest + ends.decode("", final=True)).split("\n")


def _check(number: int, line: str) -> None:
    if number == 1 and line.startswith((ZIP, XLS)):
        raise malformed(
            "The training data is a zip file or a spreadsheet, not a CSV: export it as CSV."
        )
    if not line.isascii() and ESCAPED.search(line):
        raise malformed(
            f"The training data is not UTF-8: line {number:,}. Save it as CSV in UTF-8."
        )
    if "\0" in line:
        raise malformed(f"The training data has a NUL character: line {number:,}.")


def _quoted_fields(began: int, line: str, more: Iterator[tuple[int, str]]) -> list[str]:
    """The fields of a record with quotes; takes more lines while a quoted field is open."""
    fields: list[str] = []
    at, length = 0, len(line)
    while at <= len(line):
        opening = OPENING.match(line, at)
        if opening is None:
            comma = line.find(",", at)
            end = comma if comma >= 0 else len(line)
            fields.append(line[at:end])
            at = end + 1
            continue
        parts, at = [], opening.end()
        while (closed := CLOSED.match(line, at)) is None:
            parts.append(line[at:])
            number, line = next(more, (0, ""))
            length, at = length + len(line) + 1, 0
            if not number or length > MOST_CHARACTERS:
                raise malformed(f"The row at line {began:,} has a quote that never ends.")
            _check(number, line)
        if closed[2].strip():
            raise malformed(
                f"The row at line {began:,} has text after a closing quote: double the quotes "
                "inside a quoted value."
            )
        fields.append("\n".join([*parts, closed[1]]).replace('""', '"'))
        at = closed.end() + 1
    return fields
