"""Training data: a CSV of texts and their classes, checked row by row as it arrives.

Column 1 is the text, every further non-empty column a class; there is no header row. What cannot
be used is refused with the physical line. Of data with too many rows or classes no row is kept:
the rest is only counted.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from slipstream.service.csv_records import Record, Records
from slipstream.service.refusals import Refused, malformed

CONTROLS = re.compile(r"\\[tnr]|[\x01-\x1f\x7f-\x9f]")  # in a text; written escapes count as one
CLASS_CONTROLS = re.compile(r"[\x01-\x1f\x7f-\x9f]")
CLASS_BREAKS = re.compile(r"[\t\n\r\x85\u2028\u2029]")
PATH = re.compile(r"[\w.~:/\\ -]+\.(?:csv|tsv|txt|xlsx?)")
MOST_COUNTED_CLASSES = 100_000  # beyond, classes are no longer counted
FEW_ROWS = 5  # a class with fewer is warned of
HEADER_TEXTS = {"text", "phrase", "sentence", "utterance", "question", "query", "message"}
HEADER_CLASSES = {"class", "class_name", "label", "labels", "category", "intent", "target"}
MOST_NAMED = 5  # lines or classes that a warning names


class Limits(msgspec.Struct, frozen=True):
    """How much training data may have.

    >>> Limits(max_rows=100).max_classes
    3000
    """

    min_rows: int = 5
    max_rows: int = 20_000
    min_classes: int = 2
    max_classes: int = 3_000
    text_chars: int = 1_024
    class_chars: int = 256


class Rows(msgspec.Struct):
    """Training data that was accepted; ``rows.msgpack`` is its msgpack.

    Attributes:
        texts: One text a row.
        classes: For each row, the numbers of its classes in ``labels``; at least one.
        labels: The classes' names, sorted.
        warnings: What the report should mention.
    """

    texts: list[str]
    classes: list[list[int]]
    labels: list[str]
    warnings: list[str]


def read(stream: Iterable[bytes], limits: Limits) -> Rows:
    """Read and check training data.

    Args:
        stream: The CSV's bytes, cut anywhere.
        limits: How much there may be.

    Returns:
        The rows, with classes by number.

    Raises:
        Refused: It cannot be used; the description has the line.

    >>> data = b"hi,greeting\\nbye,parting\\nhello,greeting\\nciao,greeting,parting\\nhey,greeting"
    >>> read([data], Limits()).classes
    [[0], [1], [0], [0, 1], [0]]
    """
    reader, records = _Reader(limits), Records(stream)
    for record in records:
        if not reader.add(record):
            reader.count += records.count_rest()
            break
    return reader.rows()


class _Reader:
    """Rows so far; only a count once there are too many rows or classes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.count = 0
        self._lines: list[int] = []
        self._texts: list[str] = []
        self._names: list[list[str]] = []
        self._labels: set[str] = set()
        self._hashes: set[int] | None = None  # of labels, once there are too many to keep

    def add(self, record: Record) -> bool:
        """Take a row; False if there are too many, and the rest need only be counted."""
        self.count += 1
        if self.count > self._limits.max_rows:
            return False
        line, fields = record
        text = clean_text(line, fields[0], self._limits.text_chars)
        names = clean_classes(line, fields, self._limits.class_chars)
        if self._hashes is not None:
            if len(self._hashes) < MOST_COUNTED_CLASSES:
                self._hashes.update(map(hash, names))
            return True
        self._lines.append(line)
        self._texts.append(text)
        self._names.append(names)
        self._labels.update(names)
        if len(self._labels) > self._limits.max_classes:
            self._hashes = set(map(hash, self._labels))
            self._lines, self._texts, self._names, self._labels = [], [], [], set()
        return True

    def rows(self) -> Rows:
        self._check_counts()
        labels = sorted(self._labels)
        numbers = {label: number for number, label in enumerate(labels)}
        classes = [sorted(numbers[name] for name in names) for names in self._names]
        return Rows(
            self._texts, classes, labels, warnings_of(self._lines, self._texts, self._names)
        )

    def _check_counts(self) -> None:
        count, limits = self.count, self._limits
        received = f"The number of training entries received = {count:,}, which is"
        if count < limits.min_rows:
            raise Refused(
                "Data too small",
                f"{received} smaller than the required minimum of {limits.min_rows:,}",
            )
        if count > limits.max_rows:
            raise Refused(
                "Too many data instances",
                f"{received} larger than the permitted maximum of {limits.max_rows:,}",
            )
        if self._hashes is not None:
            more = "more than " if len(self._hashes) >= MOST_COUNTED_CLASSES else ""
            raise Refused(
                "Too many classes",
                f"The training data has {more}{len(self._hashes):,} classes which is larger than "
                f"the permitted maximum of {limits.max_classes:,} classes.",
            )
        if len(self._labels) < limits.min_classes:
            raise Refused(
                "Too few classes",
                f"The training data has {len(self._labels)} class; a classifier needs at least "
                f"{limits.min_classes}.",
            )


def clean_text(line: int, field: str, limit: int) -> str:
    """A row's text, trimmed; control characters and written escapes become spaces.

    >>> clean_text(1, " two\\nlines", 1024)
    'two lines'
    """
    text = CONTROLS.sub(" ", field).strip()
    if not text:
        raise malformed(f"The 'text' value at line {line:,} and column 1 is 'empty'.")
    if len(text) > limit:
        raise Refused(
            "Phrase too long",
            f"The phrase at line {line:,} has {len(text):,} characters which is larger than the "
            f"permitted maximum of {limit:,} characters.",
        )
    return text


def clean_classes(line: int, fields: list[str], limit: int) -> list[str]:
    """A row's classes, trimmed, in NFC, each once.

    >>> clean_classes(1, ["text", " a ", "", "b", "a"], 256)
    ['a', 'b']
    """
    names: dict[str, None] = {}
    for column, field in enumerate(fields[1:], start=2):
        name = field.strip()
        if CLASS_BREAKS.search(name):
            raise malformed(
                f"The 'class' value at line {line:,} and column {column} has a tab or a line end."
            )
        name = unicodedata.normalize("NFC", CLASS_CONTROLS.sub(" ", name)).strip()
        if len(name) > limit:
            raise Refused(
                "Class too long",
                f"The class at line {line:,} and column {column} has {len(name):,} characters "
                f"which is larger than the permitted maximum of {limit:,} characters.",
            )
        if name:
            names[name] = None
    if not names:
        raise malformed(
            f"The 'class' value at line {line:,} and column 2 is 'null'.{_hint(fields)}"
        )
    return list(names)


def _hint(fields: list[str]) -> str:
    """What may be the reason that a row has no class."""
    only = fields[0].strip()
    if len(fields) > 1:
        return ""
    if PATH.fullmatch(only):
        return " Is it the path of a file: forgot the @?"
    for separator, shown in ((";", "';'"), ("\t", "a tab")):
        if separator in only:
            return f" Are the columns separated by {shown}? Use commas."
    return ""


# ---- warnings


def warnings_of(lines: list[int], texts: list[str], names: list[list[str]]) -> list[str]:
    """What a user should know of rows that were accepted.

    Args:
        lines: The physical line of each row.
        texts: Its text.
        names: Its classes.

    Returns:
        Sentences; none if nothing stands out.

    >>> warnings_of([1, 2], ["a", "a"], [["x"], ["y"]])[0]
    '1 text has different classes in different rows: it cannot be learnt; first at line 2.'
    """
    return [
        *_header(texts, names),
        *_repeated(lines, texts, names),
        *_small_classes(names),
    ]


def _header(texts: list[str], names: list[list[str]]) -> list[str]:
    first = {name.lower() for name in names[0]} if names else set()
    if not names or not (texts[0].lower() in HEADER_TEXTS or first & HEADER_CLASSES):
        return []
    if sum(names[0] == other for other in names) > 1:
        return []
    return ["The first row looks like a header; it was taken as a row. Remove it if it is one."]


def _repeated(lines: list[int], texts: list[str], names: list[list[str]]) -> list[str]:
    seen: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    duplicates: list[int] = []
    contradictions: dict[str, int] = {}
    for line, text, own in zip(lines, texts, names, strict=True):
        key = tuple(sorted(own))
        if key in seen[text]:
            duplicates.append(line)
        elif seen[text]:
            contradictions.setdefault(text, line)
        seen[text].add(key)
    found = []
    if contradictions:
        count = len(contradictions)
        subject = "1 text has" if count == 1 else f"{count:,} texts have"
        them = "it" if count == 1 else "they"
        found.append(
            f"{subject} different classes in different rows: {them} cannot be learnt; first at "
            f"line {min(contradictions.values()):,}."
        )
    if duplicates:
        count = len(duplicates)
        subject = "1 row repeats" if count == 1 else f"{count:,} rows repeat"
        found.append(f"{subject} an earlier row; first at line {duplicates[0]:,}.")
    return found


def _small_classes(names: list[list[str]]) -> list[str]:
    counts = Counter(name for own in names for name in own)
    small = sorted(name for name, count in counts.items() if count < FEW_ROWS)
    if not small:
        return []
    named = ", ".join(map(repr, small[:MOST_NAMED]))
    rest = f" and {len(small) - MOST_NAMED:,} more" if len(small) > MOST_NAMED else ""
    subject = "1 class has" if len(small) == 1 else f"{len(small):,} classes have"
    return [f"{subject} fewer than {FEW_ROWS} rows: {named}{rest}."]
