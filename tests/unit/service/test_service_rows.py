"""What training data is accepted and refused, with the lines that refusals name."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.service.errors import ApiError as Refused
from slipstream.apps.service.rows import Limits, Rows, check, read
from slipstream.apps.service.words import cut_text, words_of

FOUR = b"one,a\ntwo,b\nthree,a\nfour,b\n"
FIVE = FOUR + b"five,a\n"


def rows(data: bytes, limits: Limits | None = None) -> Rows:
    counts = check([data], limits or Limits())
    found = read([data])
    assert counts == (len(found.texts), len(found.labels), 0)
    return found


def refusal(data: bytes, limits: Limits | None = None) -> Refused:
    with pytest.raises(Refused) as caught:
        rows(data, limits)
    return caught.value


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + FIVE,
        FIVE.replace(b"\n", b"\r\n"),
        FIVE.replace(b"\n", b"\r"),
        FIVE.rstrip(b"\n"),
        FIVE.replace(b"\n", b"\n\n \n"),
    ],
    ids=["BOM", "CRLF", "CR", "no last line end", "blank lines"],
)
def test_ways_to_write_lines(data: bytes) -> None:
    assert rows(data) == rows(FIVE)
    assert rows(data).texts == ["one", "two", "three", "four", "five"]
    assert rows(data).classes == [[0], [1], [0], [1], [0]]


@given(st.data())
def test_the_cuts_of_the_stream_do_not_matter(data: st.DataObject) -> None:
    whole = '"a ""b""\r\nc",x\r\ré,y,z\n\nd,x\r\ne,x\nf,"y"'.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(parts) == rows(whole)
    assert check(parts, Limits()) == check([whole], Limits())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (FIVE.decode().encode("utf-16"), "not UTF-8: line 1."),
        (b"ok,a\n" * 8_999 + b"caf\xe9,a\n" + FIVE, "not UTF-8: line 9,000."),
        (FIVE + b"a\0b,c\n", "NUL character: line 6."),
        (FIVE + b'text,"a\nb"\n', "line 6 and column 2 has a tab or a line end"),
        (FIVE + b"text,a,b\tc\n", "line 6 and column 3 has a tab or a line end"),
        (FIVE + b'"open,a\nand on\n', "The row at line 6 has a quote that never ends."),
        (FIVE + b'\n"a"b,c\n', "The row at line 7 has text after a closing quote"),
        (b'"x\ny",a\n"a"b,c\n', "The row at line 3"),
        (
            b"one;a\n",
            "line 1 and column 2 is 'null'. Are the columns separated by ';'",
        ),
        (b"one\ta\n", "separated by a tab"),
        (FIVE + b",a\n", "The 'text' value at line 6 and column 1 is 'empty'."),
        (FIVE + b'"  ",a\n', "The 'text' value at line 6 and column 1 is 'empty'."),
        (FIVE + b"alone\n", "The 'class' value at line 6 and column 2 is 'null'."),
        (FIVE + b"text,,\n", "The 'class' value at line 6 and column 2 is 'null'."),
        (b"data/train.csv", "forgot the @?"),
    ],
)
def test_malformed_data_names_its_line(data: bytes, said: str) -> None:
    refused = refusal(data)
    assert refused.error == "Malformed data"
    assert said in refused.description


def test_a_spreadsheet_is_to_be_exported() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("sheet.xml", "x")
    assert "export it as CSV" in refusal(packed.getvalue()).description


def test_unusual_characters_are_kept_and_controls_become_spaces() -> None:
    found = rows(FIVE + "a\x07b\u202e😀,cafe\u0301\n".encode())
    assert found.texts[-1] == "a b\u202e😀"
    assert "café" in found.labels  # NFC


@pytest.mark.parametrize("end", ["\n", "\r\n", "\t", "\\n", "\\t", "\\r"])
def test_line_ends_and_tabs_in_a_text_become_one_space(end: str) -> None:
    assert rows(FIVE + f'"a{end}b",a\n'.encode()).texts[-1] == "a b"


@pytest.mark.parametrize(("data", "count"), [(b"", 0), (b"\n \r\n\n", 0), (FOUR, 4)])
def test_too_few_rows(data: bytes, count: int) -> None:
    refused = refusal(data)
    assert refused.error == "Data too small"
    assert refused.description == (
        f"The number of training entries received = {count}, which is smaller than the required "
        "minimum of 5"
    )


def test_too_many_rows_are_counted_to_the_end() -> None:
    refused = refusal(b"some text,a\n" * 20_001)
    assert refused.error == "Too many data instances"
    assert "received = 20,001, which is larger than the permitted maximum of 20,000" in (
        refused.description
    )
    assert "= 20,003," in refusal(b"t,a\n" * 20_001 + b'\n"x\ny",a\nz,a').description


def test_many_short_rows_take_little_memory() -> None:
    block = b"t,a\n" * 20_000

    def stream() -> Iterator[bytes]:
        for _ in range(10):
            yield block

    tracemalloc.start()
    with pytest.raises(Refused, match="= 200,000,"):
        check(stream(), Limits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


def test_long_rows_take_little_memory_while_they_are_checked() -> None:
    block = "".join(f"{'😀' * 1000}{number},{'abc'[number % 3]}\n" for number in range(50)).encode()
    tracemalloc.start()
    assert check([block] * 200, Limits()) == (10_000, 3, 0)  # 40 MB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20


@pytest.mark.parametrize("body", [b'"' + b"x" * 99, b'"' + b"x" * 98 + b"\n", b"y" * 100])
def test_what_never_ends_is_refused_before_the_body_does(body: bytes) -> None:
    taken = 0

    def stream() -> Iterator[bytes]:
        nonlocal taken
        yield FIVE + body[:1]
        while taken < 96 << 20:
            taken += len(body) << 10
            yield body[1:] * 1024

    with pytest.raises(Refused, match="line 6") as caught:
        check(stream(), Limits())
    assert caught.value.error == "Malformed data"
    assert taken < 10 << 20


def test_too_few_and_too_many_classes() -> None:
    refused = refusal(b"x,a\n" * 5)
    assert refused.error == "Too few classes"
    assert refused.description.startswith("The training data has 1 class; ")
    many = b"".join(b"x%d,c%d\n" % (i, i) for i in range(3_001))
    refused = refusal(many)
    assert refused.error == "Too many classes"
    assert "has 3,001 classes which is larger than the permitted maximum of 3,000" in (
        refused.description
    )
    assert len(rows(b"".join(b"x%d,c%d\n" % (i, i) for i in range(50))).labels) == 50


def test_lengths_are_counted_in_code_points_after_trimming() -> None:
    assert len(rows(FIVE + f"  {'😀' * 1024}  ,a\n".encode()).texts[-1]) == 1024
    refused = refusal(FIVE + f"{'é' * 1025},a\n".encode())
    assert refused.error == "Phrase too long"
    assert refused.description == (
        "The phrase at line 6 has 1,025 characters which is larger than the permitted maximum of "
        "1,024 characters."
    )
    assert refusal(FIVE + b"x" * 20_000_000 + b",a\n").error == "Malformed data"
    refused = refusal(FIVE + b"x,y," + b"c" * 257)
    assert refused.error == "Class too long"
    assert "line 6 and column 3 has 257 characters" in refused.description


def test_many_classes_a_row() -> None:
    names = ",".join(f"c{i}" for i in range(500))
    assert len(rows(FIVE + f"x,{names},c0,\n".encode()).classes[-1]) == 500


@pytest.mark.parametrize(
    "cell",
    ["=cmd|' /C calc'!A0", "@SUM", "+1", "<script>", "{{7*7}}", "'; DROP", '5" disk'],
)
def test_hostile_cells_are_plain_text(cell: str) -> None:
    found = rows(FIVE + f"{cell},{cell}\n".encode())
    assert found.texts[-1] == cell
    assert found.labels[found.classes[-1][0]] == cell


def test_spaces_around_quotes_are_no_part_of_a_value() -> None:
    found = rows(FIVE + b' "a, b" , "c, d" \n')
    assert found.texts[-1] == "a, b"
    assert "c, d" in found.labels


def test_warnings() -> None:
    assert (
        rows(b"".join(b"t%d,%s\n" % (i, b"ab"[i % 2 : i % 2 + 1]) for i in range(10))).warnings
        == []
    )
    header = rows(b"text,class\n" + FIVE).warnings
    assert header[0].startswith("The first row looks like a header")
    repeated = rows(FIVE + b"one,a\n" * 10_000).warnings
    assert repeated[0].startswith("10,000 rows repeat an earlier row; first at line 6. Held-out")
    several = rows(b"".join(b"same,%d\n" % i for i in range(5))).warnings
    assert several[0].startswith("1 text has different classes")
    assert "first at line 2" in several[0]
    assert several[1].startswith("5 classes have fewer than 5 rows: '0', '1'")


def test_commas_in_texts_without_quotes_are_warned_of() -> None:
    rows = "".join(f"where is bill {n}?, please,{'ab'[n % 2]}\n" for n in range(20))
    (warning,) = read([rows.encode()]).warnings
    assert warning == (
        "The class 'please' is on nearly every row, beside others (line 1): is there a comma in "
        "the texts? Then put them in quotes."
    )
    quoted = "".join(f'"bill {n}?, please",{"ab"[n % 2]}\n' for n in range(20))
    assert read([quoted.encode()]).warnings == []
    mostly_one = "".join(f"bill {n},{'a' if n else 'b,c'}\n" for n in range(20)) + "x,b,c\n" * 6
    assert "comma" not in " ".join(read([mostly_one.encode()]).warnings)


def test_too_many_columns() -> None:
    row = b"text" + b",c" * 3_001
    with pytest.raises(Refused, match="The row at line 2 has 3,002 columns which is larger"):
        check([b"one,a\n" + row], Limits())
    assert check([FIVE, b"text" + b",c" * 3_000], Limits())[0] == 6


def test_the_column_of_a_class_that_is_repeated() -> None:
    long = b"x" * 257
    with pytest.raises(Refused, match="The class at line 1 and column 3 has 257"):
        check([b"one,a," + long + b",b," + long], Limits())


def test_a_row_that_the_operator_permits_is_read() -> None:
    """The job does not know the limits of the operator."""
    wide = "text," + ",".join(f"c{number}" for number in range(3_500)) + "\n"
    limits = Limits(max_classes=5_000, text_chars=2_000, class_chars=300)
    data = FIVE + wide.encode() + b"t" * 2_000 + b"," + b"c" * 300 + b"\n"
    assert len(rows(data, limits).classes[5]) == 3_500


# ---- several rows that cannot be used, and texts that are too long


def bad_rows(count: int) -> bytes:
    """A row that can be used, and one that cannot, in turn; the latter are on the even lines."""
    return b"".join(b"text,a\n,b\n" for _ in range(count))


def test_all_rows_that_cannot_be_used_are_named() -> None:
    first = "The 'text' value at line 2 and column 1 is 'empty'."
    assert refusal(bad_rows(1)).description == first
    said = refusal(bad_rows(3) + b"alone\n").description
    assert said == f"{first} 4 rows cannot be used, at lines 2, 4, 6, 7."
    lines = ", ".join(str(2 * number) for number in range(1, 21))
    assert refusal(bad_rows(20)).description.endswith(f" 20 rows cannot be used, at lines {lines}.")
    said = refusal(bad_rows(1_000)).description
    assert said == f"{first} 1,000 rows cannot be used, the first 20 at lines {lines}."


def test_rows_that_cannot_be_used_before_what_cannot_be_read() -> None:
    said = refusal(bad_rows(2) + b'"a"b,c\n').description
    assert (
        "2 rows cannot be used, at lines 2, 4. The rows after them were not read: The row" in said
    )
    assert refusal(bad_rows(1) + b'"a"b,c\n').description.endswith("is 'empty'.")
    said = refusal(bad_rows(9), Limits(max_rows=8)).description
    assert "Of the first 8 rows, 4 rows cannot be used, at lines 2, 4, 6, 8." in said


def test_of_texts_that_are_too_long_the_way_out_is_named() -> None:
    said = refusal(FIVE + b"x" * 9 + b",a\n" + b"y" * 7 + b",a\n", Limits(text_chars=6)).description
    assert said == (
        "The phrase at line 6 has 9 characters which is larger than the permitted maximum of "
        "6 characters. 2 rows cannot be used, at lines 6, 7. With ?long=cut the service cuts long "
        "texts after a word."
    )


def test_long_texts_are_cut_after_a_word() -> None:
    data = FIVE + "six seven,a\n\N{GRINNING FACE} 9 10 11 12,b\nshort,a\n".encode()
    limits = Limits(text_chars=6)
    assert check([data], limits, 6) == (8, 2, 2)
    assert read([data], 6).texts[5:] == ["six", "\N{GRINNING FACE} 9 10", "short"]
    assert read([data], 6).cut == 2
    assert read([data]).cut == 0


@given(
    st.text("ab'\N{LATIN SMALL LETTER E WITH ACUTE}京か., \xa0_7", max_size=40), st.integers(1, 30)
)
def test_a_cut_text_has_the_first_words(text: str, most: int) -> None:
    text = text.strip()
    found = cut_text(text, most)
    assert len(found) <= most
    assert text.startswith(found)
    if found != text:
        whole, kept = words_of(text, 99), words_of(found, 99)
        assert kept == whole[: len(kept)] or (len(kept) == 1 and len(found) == most)
        rest = text[len(found) :].lstrip()
        assert len(found) + len(text[len(found) :]) - len(rest) + len(words_of(rest, 1)[0]) > most
