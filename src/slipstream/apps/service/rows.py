"""Training data: a CSV of texts and their classes, checked row by row as it arrives.

Column 1 is the text, every further non-empty column a class; there is no header row. What cannot
be used is refused with the physical line. ``check`` counts and keeps no text, so memory does not
grow with the data; ``read`` is for the training job.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from slipstream.apps.service.bad_rows import TOO_LONG, BadRows
from slipstream.apps.service.commas import Several, comma_warnings, spaced_fields
from slipstream.apps.service.csv_records import malformed, records
from slipstream.apps.service.errors import ApiError
from slipstream.apps.service.words import CONTROLS, cut_text, plain

CLASS_BREAKS = re.compile(r"[\t\n\r\x85\u2028\u2029]")
PATH = re.compile(r"[\w.~:/\\ -]+\.(?:csv|tsv|txt|xlsx?)")
MOST_COUNTED_CLASSES = 20_000  # of too many
FEW_ROWS = 5  # a class with fewer is warned of
HEADER_TEXTS = {"text", "phrase", "sentence", "utterance", "question", "query", "message"}
HEADER_CLASSES = {"class", "class_name", "label", "labels", "category", "intent", "target"}
MOST_NAMED = 5  # classes that a warning names
WHOLE = sys.maxsize  # what texts are cut to if they are not


class Limits(msgspec.Struct, frozen=True):
    """How much training data may have."""

    min_rows: int = 5
    max_rows: int = 20_000
    min_classes: int = 2
    max_classes: int = 3_000
    text_chars: int = 1_024
    class_chars: int = 256

    @property
    def columns(self) -> int:
        """How many columns a row may have: one for its text, and one for each permitted class."""
        return 1 + self.max_classes


# What ``check`` has accepted has no further limit; a training job does not know the operator's.
NO_LIMITS = Limits(max_classes=sys.maxsize, text_chars=sys.maxsize, class_chars=sys.maxsize)


class Rows(msgspec.Struct):
    """Training data that was accepted."""

    texts: list[str]
    classes: list[list[int]]  # for each text, the numbers of its labels; at least one
    labels: list[str]  # sorted
    warnings: list[str]  # for the report
    cut: int = 0  # texts that were too long, and were cut


class Counts(NamedTuple):
    """How many rows, classes and cut texts training data has."""

    rows: int
    classes: int
    cut: int


class Cleaned(NamedTuple):
    """A row; ``spaced`` are those of its classes that are after a space, see ``commas``."""

    text: str
    classes: list[str]
    is_cut: bool
    spaced: list[str]


def check(stream: Iterable[bytes], limits: Limits, cut_to: int = WHOLE) -> Counts:
    """Check the bytes of a CSV, cut anywhere; ApiError with the lines that are wrong.

    Texts of more than ``cut_to`` characters are cut, and are not too long then.

    >>> check([b"hi,greeting\\nbye,parting\\nhello,greeting\\nci", b"ao,parting\\nhey,x"], Limits())
    Counts(rows=5, classes=3, cut=0)
    """
    names: set[str] = set()
    bad = BadRows()
    end: ApiError | None = None
    count, cut, found = 0, 0, records(stream)
    try:
        for count, (line, fields) in enumerate(found, start=1):
            if count > limits.max_rows:
                break
            try:
                row = clean(line, fields, limits, cut_to)
            except ApiError as reason:
                bad.add(line, reason)
                continue
            cut += row.is_cut
            if len(names) <= max(MOST_COUNTED_CLASSES, limits.max_classes):
                names.update(row.classes)
    except ApiError as error:  # it is no CSV from there on
        end = error
    within = f"Of the first {limits.max_rows:,} rows, " if count > limits.max_rows else ""
    if refused := bad.refusal(within, end.description if end else "") or end:
        raise refused
    _check_counts(count + sum(1 for _ in found), len(names), limits)
    return Counts(count, len(names), cut)


def read(stream: Iterable[bytes], cut_to: int = WHOLE) -> Rows:
    """The rows of a CSV that ``check`` has accepted.

    >>> read([b"hi,greeting\\nbye,parting\\nciao,greeting,parting"]).classes
    [[0], [1], [0, 1]]
    """
    lines: list[int] = []
    texts: list[str] = []
    names: list[list[str]] = []
    several: list[Several] = []
    cut = 0
    for line, fields in records(stream):
        row = clean(line, fields, NO_LIMITS, cut_to)
        lines.append(line)
        texts.append(row.text)
        names.append(row.classes)
        if len(row.classes) > 1:
            several.append(Several(line, row.classes, row.spaced))
        cut += row.is_cut
    labels = sorted({name for own in names for name in own})
    place = {label: number for number, label in enumerate(labels)}
    classes = [sorted(map(place.__getitem__, own)) for own in names]
    warnings = warnings_of(lines, texts, classes, labels)
    # A header row has classes of its own, and is warned of already.
    skip = bool(several and several[0].line == lines[0] and is_header(texts, classes, labels))
    counts = Counter(name for own in names for name in own)
    ends = {own[-1] for own in names}
    commas = comma_warnings(several[skip:], counts, len(lines), ends)
    return Rows(texts, classes, labels, [*warnings, *commas], cut)


def clean(line: int, fields: list[str], limits: Limits, cut_to: int = WHOLE) -> Cleaned:
    """The text and the classes of a row; ApiError if it cannot be used."""
    if len(fields) > limits.columns:
        most = f"larger than the permitted maximum of {limits.columns:,}."
        raise malformed(f"The row at line {line:,} has {len(fields):,} columns which is {most}")
    whole = clean_text(line, fields[0])
    text = cut_text(whole, cut_to)
    check_length(TOO_LONG, f"phrase at line {line:,}", text, limits.text_chars)
    classes = clean_classes(line, fields, limits.class_chars)
    fragments = spaced_fields(fields[1:]) if len(classes) > 1 else []
    spaced = [_class_name(field) for field in fragments]
    return Cleaned(text, classes, len(text) < len(whole), spaced)


def _check_counts(rows: int, classes: int, limits: Limits) -> None:
    received = f"The number of training entries received = {rows:,}, which is"
    if rows < limits.min_rows:
        least = f"smaller than the required minimum of {limits.min_rows:,}"
        raise ApiError("Data too small", f"{received} {least}")
    if rows > limits.max_rows:
        most = f"larger than the permitted maximum of {limits.max_rows:,}"
        raise ApiError("Too many data instances", f"{received} {most}")
    if classes > limits.max_classes:
        counted = "more than " if classes > MOST_COUNTED_CLASSES else ""
        has = f"The training data has {counted}{min(classes, MOST_COUNTED_CLASSES):,} classes"
        most = f"larger than the permitted maximum of {limits.max_classes:,} classes."
        raise ApiError("Too many classes", f"{has} which is {most}")
    if classes < limits.min_classes:
        least = f"a classifier needs at least {limits.min_classes}."
        raise ApiError("Too few classes", f"The training data has {classes} class; {least}")


def clean_text(line: int, field: str) -> str:
    """A row's text, trimmed; control characters and written escapes become spaces.

    >>> clean_text(1, " two\\nlines")
    'two lines'
    """
    text = plain(field).strip()
    if not text:
        raise malformed(f"The 'text' value at line {line:,} and column 1 is 'empty'.")
    return text


def clean_classes(line: int, fields: list[str], limit: int) -> list[str]:
    """A row's classes, trimmed, in NFC, each once.

    >>> clean_classes(1, ["text", " a ", "", "b", "a"], 256)
    ['a', 'b']
    """
    names: dict[str, None] = {}
    for field in dict.fromkeys(fields[1:]):  # a row may repeat one thousands of times
        name = _class_name(field)
        breaks = CLASS_BREAKS.search(field.strip())
        if breaks or len(name) > limit:
            place = f"at line {line:,} and column {fields.index(field, 1) + 1}"
            if breaks:
                raise malformed(f"The 'class' value {place} has a tab or a line end.")
            check_length("Class too long", f"class {place}", name, limit)
        if name:
            names[name] = None
    if not names:
        reason = _hint(fields[0].strip()) if len(fields) == 1 else ""
        raise malformed(f"The 'class' value at line {line:,} and column 2 is 'null'.{reason}")
    return list(names)


def _class_name(field: str) -> str:
    return unicodedata.normalize("NFC", re.sub(CONTROLS, " ", field)).strip()


def check_length(error: str, what: str, text: str, limit: int) -> None:
    """Refuse a text of more characters than permitted; ``what`` names it."""
    if len(text) > limit:
        most = f"larger than the permitted maximum of {limit:,} characters."
        raise ApiError(error, f"The {what} has {len(text):,} characters which is {most}")


def _hint(only: str) -> str:
    """What may be the reason that a row has a single field."""
    if PATH.fullmatch(only):
        return " Is it the path of a file: forgot the @?"
    for separator, shown in ((";", "';'"), ("\t", "a tab")):
        if separator in only:
            return f" Are the columns separated by {shown}? Use commas."
    return ""


# ---- warnings


def warnings_of(
    lines: list[int], texts: list[str], classes: list[list[int]], labels: list[str]
) -> list[str]:
    """What a user should know of rows that were accepted; ``lines`` are their physical lines.

    >>> warnings_of([1, 2], ["a", "a"], [[0], [1]], ["x", "y"])[0]
    '1 text has different classes in different rows, which cannot be learnt; first at line 2.'
    """
    found = []
    if is_header(texts, classes, labels):
        found.append(
            "The first row looks like a header; it was taken as a row. Remove it if it is one."
        )
    seen: dict[str, set[tuple[int, ...]]] = {}
    repeated: list[int] = []
    contradicted: dict[str, int] = {}
    for line, text, own in zip(lines, texts, map(tuple, classes), strict=True):
        before = seen.setdefault(text, set())
        if own in before:
            repeated.append(line)
        elif before:
            contradicted.setdefault(text, line)
        before.add(own)
    if contradicted:
        found.append(
            f"{_counted(len(contradicted), 'text has', 'texts have')} different classes in "
            f"different rows, which cannot be learnt; first at line {min(contradicted.values()):,}."
        )
    if repeated:
        subject = _counted(len(repeated), "row repeats", "rows repeat")
        found.append(
            f"{subject} an earlier row; first at line {repeated[0]:,}. Held-out rows may be among "
            "them, which makes the accuracy look better than it is."
        )
    counts = Counter(number for own in classes for number in own)
    if small := [repr(labels[own]) for own, count in sorted(counts.items()) if count < FEW_ROWS]:
        rest = f" and {len(small) - MOST_NAMED:,} more" if len(small) > MOST_NAMED else ""
        subject = _counted(len(small), "class has", "classes have")
        named = ", ".join(small[:MOST_NAMED])
        found.append(f"{subject} fewer than {FEW_ROWS} rows: {named}{rest}.")
    return found


def is_header(texts: Sequence[str], classes: list[list[int]], labels: Sequence[str]) -> bool:
    """Whether the first row looks like the names of columns.

    >>> is_header(["text", "hi"], [[0], [1]], ["class", "greeting"])
    True
    """
    names = HEADER_CLASSES.intersection(labels[own].lower() for own in classes[0])
    named = names or texts[0].lower() in HEADER_TEXTS
    return bool(named) and classes.count(classes[0]) == 1


def _counted(count: int, one: str, many: str) -> str:
    return f"1 {one}" if count == 1 else f"{count:,} {many}"
