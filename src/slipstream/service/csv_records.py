"""CSV (RFC 4180) as it arrives: records with the physical line where each began.

Lines end with LF, CRLF or CR. A quoted field may contain line ends, commas and doubled quotes;
spaces around its quotes are skipped. A quote inside an unquoted field is a plain character.

At any time one block and one record are in memory, and a record is at most ``RECORD_NBYTES``
long: a quote that never ends is found there, not at the end of the body.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from slipstream.service.refusals import Refused, malformed

BLOCK_NBYTES = 1 << 16  # lines are cut from blocks of about this size
RECORD_NBYTES = 4 << 20  # 3,000 classes of 256 characters, and a text, fit
MAGIC = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")  # zip and xlsx; xls

Record = tuple[int, list[str]]  # the physical line where it began, from 1; its fields


class Records:
    """The records of a CSV, by iteration; blank lines are skipped.

    Args:
        stream: The bytes, cut anywhere; UTF-8 with or without a byte order mark.

    Iterating raises Refused if it is not UTF-8, has a NUL character, or a quote that is not closed
    properly.

    >>> list(Records([b'one,a\\r\\n\\n"two,', b' ""2"" ",b\\n']))
    [(1, ['one', 'a']), (3, ['two, "2" ', 'b'])]
    """

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._blocks = whole_lines(stream)
        self._parser = _RecordParser()
        self._number = 0
        self._lines: Iterator[bytes] = iter(())  # the rest of the current block

    def __iter__(self) -> Iterator[Record]:
        while True:
            yield from self._of_block()
            block = next(self._blocks, None)
            if block is None:
                break
            self._lines = iter(block.splitlines())
        self._parser.end()

    def count_rest(self) -> int:
        """How many records are left, without a look at what they say where they have no quotes.

        >>> rest = Records([b"a,x\\nb,x\\n\\nc,x"])
        >>> next(iter(rest)), rest.count_rest()
        ((1, ['a', 'x']), 2)
        """
        count = sum(1 for _ in self._of_block())
        for block in self._blocks:
            lines = block.splitlines()
            if self._parser.open or b'"' in block:
                self._lines = iter(lines)
                count += sum(1 for _ in self._of_block())
            else:
                self._number += len(lines)
                count += len(lines) - sum(map(bytes.isspace, lines)) - lines.count(b"")
        self._parser.end()
        return count

    def _of_block(self) -> Iterator[Record]:
        parser = self._parser
        for line in self._lines:
            self._number += 1
            if parser.open or line.strip():
                parser.feed(self._number, decoded(self._number, line))
                if not parser.open:
                    yield parser.take()


def whole_lines(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes in blocks that end where a physical line does; only the last may not.

    >>> list(whole_lines([b"\\xef\\xbb\\xbfa\\nb"]))
    [b'a\\n', b'b']
    """
    rest, first = b"", True
    for block in _blocks(stream):
        rest += block
        if first:
            _refuse_archive(rest)
            rest, first = rest.removeprefix(codecs.BOM_UTF8), False
        # A CR at the end may be the first half of a CRLF: it waits for the next block.
        cut = max(rest.rfind(b"\n"), rest.rfind(b"\r", 0, len(rest) - 1)) + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        elif len(rest) > RECORD_NBYTES:
            # Without a line end there is nothing to number; the record's limit refuses it.
            yield rest
            return
    if rest:
        yield rest


def _blocks(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks of at least BLOCK_NBYTES but for the last."""
    waiting: list[bytes] = []
    nbytes = 0
    for part in stream:
        waiting.append(part)
        nbytes += len(part)
        if nbytes >= BLOCK_NBYTES:
            yield b"".join(waiting)
            waiting, nbytes = [], 0
    if waiting:
        yield b"".join(waiting)


def _refuse_archive(head: bytes) -> None:
    if head.startswith(MAGIC):
        raise malformed(
            "The training data is a zip file or a spreadsheet, not a CSV: export it as CSV."
        )


def decoded(number: int, line: bytes) -> str:
    """A line as text; Refused if it is not UTF-8 or has a NUL.

    >>> decoded(1, b"caf\\xc3\\xa9")
    'café'
    """
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise malformed(
            f"The training data is not UTF-8: line {number:,}. Save it as CSV in UTF-8."
        ) from None
    if "\0" in text:
        raise malformed(f"The training data has a NUL character: line {number:,}.")
    return text


class _RecordParser:
    """One record at a time, fed by lines; ``open`` while a quoted field is unfinished."""

    def __init__(self) -> None:
        self.open = False
        self._began = 0
        self._length = 0
        self._fields: list[str] = []
        self._parts: list[str] = []  # of the quoted field that is being read

    def feed(self, number: int, line: str) -> None:
        if not self.open:
            self._began, self._length = number, 0
        self._length += len(line) + 1
        if self._length > RECORD_NBYTES:
            raise self._too_long()
        if not self.open and '"' not in line:
            self._fields = line.split(",")
            return
        at = 0
        if self.open:
            self._parts.append("\n")
            at = self._quoted(line, 0)
        while at <= len(line) and not self.open:
            at = self._field(line, at)

    def _field(self, line: str, at: int) -> int:
        """Read the field that begins at ``at``; returns where the next one begins."""
        start = at
        while start < len(line) and line[start] in " \t":
            start += 1
        if line.startswith('"', start):
            self.open, self._parts = True, []
            return self._quoted(line, start + 1)
        comma = line.find(",", at)
        end = len(line) if comma < 0 else comma
        self._fields.append(line[at:end])
        return end + 1

    def _quoted(self, line: str, at: int) -> int:
        """Read on within quotes; the field stays open if its closing quote is not in this line."""
        while (quote := line.find('"', at)) >= 0:
            if line.startswith('"', quote + 1):
                self._parts.append(line[at : quote + 1])
                at = quote + 2
                continue
            self._parts.append(line[at:quote])
            self._fields.append("".join(self._parts))
            self.open = False
            return self._after_quote(line, quote + 1)
        self._parts.append(line[at:])
        return len(line) + 1

    def _after_quote(self, line: str, at: int) -> int:
        comma = line.find(",", at)
        end = len(line) if comma < 0 else comma
        if line[at:end].strip():
            raise malformed(
                f"The row at line {self._began:,} has text after a closing quote: double the "
                "quotes inside a quoted value."
            )
        return end + 1

    def take(self) -> Record:
        fields, self._fields = self._fields, []
        return self._began, fields

    def end(self) -> None:
        if self.open:
            raise self._unclosed()

    def _unclosed(self) -> Refused:
        return malformed(f"The row at line {self._began:,} has a quote that never ends.")

    def _too_long(self) -> Refused:
        if self.open:
            return self._unclosed()
        return malformed(
            f"The row at line {self._began:,} has more than {RECORD_NBYTES:,} characters."
        )
