"""The page: what is served, that it needs nothing from elsewhere, and its check of a CSV."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources

import pytest
from service_process import ServiceProcess

from slipstream.apps.service.errors import ApiError as Refused
from slipstream.apps.service.rows import HEADER_CLASSES, HEADER_TEXTS, WHOLE, Limits, check, read

CSP = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
PAGE = resources.files("slipstream.apps.service") / "page"
FILES = {"": "text/html", "page.js": "text/javascript", "page.css": "text/css"}
FOUR = b"one,a\ntwo,b\nthree,a\nfour,b\n"
FIVE = FOUR + b"five,a\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


@pytest.mark.process
@pytest.mark.parametrize("name", FILES)
def test_files_are_served(service: ServiceProcess, name: str) -> None:
    answer = service.get(f"/{name}")
    assert answer.status_code == 200
    assert answer.content == (PAGE / (name or "index.html")).read_bytes()
    assert answer.headers["Content-Type"] == f"{FILES[name]}; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == CSP
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.process
def test_log_begins_with_the_places_of_the_data(service: ServiceProcess) -> None:
    """And with no line of a logger whose name makes an error of it."""
    log = service.log.read_text()
    database = service.data / "service.db"
    said = f"data directory {service.data}; SQLite database {database} (new)"
    assert said in log
    assert log.index(said) < log.index("ready at ")
    assert "error" not in log


@pytest.mark.process
@pytest.mark.parametrize("path", ["/schema.sql", "/page.py", "/page/page.js", "/%2e%2e%2fown.py"])
def test_nothing_else_is_served(service: ServiceProcess, path: str) -> None:
    assert service.get(path).status_code == 404


class Markup(HTMLParser):
    """Elements with their attributes, and text directly inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)


def read_markup(text: str) -> Markup:
    markup = Markup()
    markup.feed(text)
    assert markup.inline == []
    return markup


@pytest.mark.process
@pytest.mark.parametrize("name", ["docs", "guide"])
def test_docs_are_in_the_style_of_the_page(service: ServiceProcess, name: str) -> None:
    answer = service.get(f"/instances/any/{name}")
    assert answer.headers["Content-Security-Policy"] == CSP
    markup = read_markup(answer.text)
    targets = [one["href"] for _, one in markup.elements if one.get("href")]
    assert {"page.css", "./", "docs", "guide"} <= set(targets)  # relative: also below a prefix
    assert not [one for _, one in markup.elements if "style" in one or "src" in one]


@pytest.mark.process
def test_docs_name_the_address_that_was_called(service: ServiceProcess) -> None:
    assert f"url={service.url}/instances/any\n" in service.get("/instances/any/docs").text


def test_index_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    markup = read_markup((PAGE / "index.html").read_text("utf-8"))
    assert len(markup.elements) > 50
    for tag, attributes in markup.elements:
        assert tag != "style"
        assert not {name for name in attributes if name.startswith("on") or name == "style"}
        for name in ("src", "href", "action"):
            target = attributes.get(name) or "#"
            assert target in ("#", "data:,", "docs", "guide", "page.js", "page.css"), (tag, target)
        if "for" in attributes:
            assert attributes["for"] in {other.get("id") for _, other in markup.elements}


def test_script_and_style_make_no_markup_and_name_no_other_site() -> None:
    script, style = ((PAGE / name).read_text("utf-8") for name in ("page.js", "page.css"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)
    assert set(re.findall(r"https?://[^\"'`\s]+", script)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|//", style)
    used = set(re.findall(r"\bat\(\"([\w-]+)\"\)", script))
    ids = set(re.findall(r"\bid=\"([\w-]+)\"", (PAGE / "index.html").read_text("utf-8")))
    assert used - ids == set()


# ---- the page's check of a CSV is the service's own

CASES = [
    FIVE,
    b"\xef\xbb\xbf" + FIVE,
    FIVE.replace(b"\n", b"\r\n"),
    FIVE.replace(b"\n", b"\r"),
    FIVE.rstrip(b"\n"),
    FIVE.replace(b"\n", b"\n\n \n"),
    FIVE.replace(b"\n", "\n\N{IDEOGRAPHIC SPACE}\n\N{NO-BREAK SPACE}\t\n\x1c\n".encode()),
    FIVE + b'" \n\n",a\n',
    FOUR,
    b"",
    b"\n \r\n",
    FIVE.decode().encode("utf-16"),
    FIVE + b"caf\xe9,a\n",
    FIVE + b"a\0b,a\n",
    FIVE + b'"two\nlines\tand ""quotes""",a,"b"\n',
    FIVE + b'text,"a\nb"\n',
    FIVE + b'"never\nends,a\n' * 3,
    FIVE + b'\n"a"b,c\n',
    FIVE + b' "a" ,"b" \n',
    b"one;a\ntwo;b\n",
    FIVE + b"one\ta\n",
    FIVE + b"alone\n",
    FIVE.replace(b"\n", b"\r\n") + b"\ralone\r\n",
    FIVE + b"text,,\n",
    FIVE + b",a\n",
    FIVE + b"  \\t ,a\n",
    FIVE.replace(b",b", b",a"),
    FIVE + b"x" * 1025 + b",a\n",
    FIVE + "\N{GRINNING FACE}".encode() * 1024 + b",a\n",
    FIVE + "\N{GRINNING FACE}".encode() * 1025 + b",a\n",
    FIVE + b"text," + b"c" * 257 + b"\n",
    FIVE + "e\N{COMBINING ACUTE ACCENT},x\ng,e\N{COMBINING ACUTE ACCENT}\nh,\xe9\n".encode(),
    FIVE + "\N{NO-BREAK SPACE}\N{EM SPACE},a\n".encode(),
    FIVE + "\ufeff,a\nq,\ufeff\n".encode(),
    FIVE + "\x85,a\n".encode(),
    FIVE + b"text,a\x1cb,\x1c\n",
    FIVE + "text,a\N{LINE SEPARATOR}b\n".encode(),
    b"PK\x03\x04" + bytes(100),
    FIVE + b'"' + b"x" * (5 << 20),
    FIVE + b"x" * (5 << 20),
    FIVE + b"text,,\n" * 3,
    FIVE + b"text,,\n" * 21,
    FIVE + b"x" * 1025 + b",a\n,b\n" + b"y" * 1030 + b",\n",
    FIVE + b"text,,\n" * 2 + b"a\0b,a\n" + b"text,,\n",
]
CHECK = """
const { Refused, TrainingData } = await import(process.argv[1]);
const cut = process.argv[2] === "cut";
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const cases = JSON.parse(Buffer.concat(chunks));
console.log(JSON.stringify(cases.map(([data, size]) => {
  const bytes = Buffer.from(data, "base64");
  const found = new TrainingData();
  try {
    for (let at = 0; at < bytes.length; at += size) found.feed(bytes.subarray(at, at + size));
    found.end();
    found.refuse(cut);
    return [found.rows, [...found.classes.keys()]];
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return [error.error, error.description];
  }
})));
"""


def verdict(data: bytes, cut_to: int) -> list[object]:
    try:
        check([data], Limits(), cut_to)
    except Refused as refused:
        return [refused.error, refused.description]
    rows = read([data])
    return [len(rows.texts), rows.labels]


def run_page(tmp_path, script: str, sent: object, *more: str) -> object:
    """What a script prints that has the page's own functions."""
    module = tmp_path / "page.mjs"
    module.write_bytes((PAGE / "page.js").read_bytes())
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script, str(module), *more],
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CALL = """
const page = await import(process.argv[1]);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const [name, cases] = JSON.parse(Buffer.concat(chunks));
console.log(JSON.stringify(cases.map((given) => page[name](...given))));
"""
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
JOB = {"state": "running", "ahead": 0, "percent": 0, "epoch": 0, "epochs": 0, "samples_s": 0.0}
CUTS = [{}, {"cut": 0}, {"cut": 1}, {"cut": 3280}]
TRAINS = {**JOB, "percent": 70, "epoch": 141, "epochs": 200, "samples_s": 1234.5, "eta_s": 90}


@pytest.mark.process
@needs_node
def test_the_page_says_what_a_job_does(tmp_path) -> None:
    """Also of a service that names no phases."""
    figures = "70%, about 2 min left; epoch 141 of 200, 1,235 rows a second."
    cases = {
        "Waiting, 2 ahead.": {**JOB, "state": "waiting", "ahead": 2, "phase": "waiting"},
        "Starting…": JOB,
        "Reading rows…": {**JOB, "phase": "reading rows", "phase_percent": None},
        "Building features: 40%.": {**JOB, "phase": "building features", "phase_percent": 40},
        "Starting learners: 0%. Continuing from epoch 141.": {
            **TRAINS,
            "phase": "starting learners",
            "phase_percent": 0,
            "resumed_epoch": 141,
        },
        figures: TRAINS,
        "70%, at most 2 min left; epoch 141 of 200, 1,235 rows a second.": {
            **TRAINS,
            "phase": "training",
            "may_stop_early": True,
            "stops_early": None,
        },
        f"{figures} Stops early: held-out accuracy has not improved for 30 epochs.": {
            **TRAINS,
            "phase": "training",
            "may_stop_early": False,
            "stops_early": "held-out accuracy has not improved for 30 epochs",
        },
        f"{figures} Continuing from epoch 0.": {
            **TRAINS,
            "phase": "training",
            "phase_percent": 70,
            "resumed_epoch": 0,
        },
        f"Final pass over all rows: {figures}": {**TRAINS, "phase": "final pass"},
        "Measuring: 50%.": {**TRAINS, "phase": "measuring", "phase_percent": 50},
        "Cancelled.": {**TRAINS, "state": "cancelled", "phase": None, "phase_percent": None},
    }
    said = run_page(tmp_path, CALL, ["jobText", [[job] for job in cases.values()]])
    assert said == list(cases)


@pytest.mark.process
@needs_node
def test_the_page_says_how_many_texts_were_cut(tmp_path) -> None:
    one = {"status": "Available", "classifier_id": "id", "language": "en", "created": "2026-01-01"}
    jobs = [{"state": "done", "rows": 9000, "classes": 20, **cut} for cut in CUTS]
    said = run_page(tmp_path, CALL, ["factsText", [[one, job] for job in jobs]])
    ends = [text.partition("20 classes.")[2] for text in said]
    assert ends == ["", "", " 1 long text was cut.", " 3,280 long texts were cut."]


@pytest.mark.process
@needs_node
def test_the_caption_names_the_epoch_of_each_figure(tmp_path) -> None:
    """A loss is of the epoch that is complete then; a held-out accuracy may be an earlier one's."""
    point = {"loss": 0.70064, "held_accuracy": None}
    measured = {"epoch": 81, "loss": 0.2, "held_accuracy": 0.95}
    cases = {
        "Epoch 103: loss 0.7006, held-out accuracy 95.0% (epoch 81).": (103, measured, 103),
        "Epoch 103: loss 0.7006, held-out accuracy 95.0% (epoch 80).": (
            102,
            {**measured, "epoch": 80},
            200,
        ),
        "Epoch 81: loss 0.7006, held-out accuracy 95.0%.": (81, measured, 81),
        "Epoch 1: loss 0.7006.": (0, None, 200),
    }
    given = [[{**point, "epoch": epoch}, *rest] for epoch, *rest in cases.values()]
    assert run_page(tmp_path, CALL, ["captionText", given]) == list(cases)


BROKEN = """
const { eventsOf } = await import(process.argv[1]);
const begun = new TextEncoder().encode(`event: epoch
data: {"epoch":1}

`);
const stream = new ReadableStream({
  pull(controller) {
    if (!this.sent) controller.enqueue(begun);
    else controller.error(new TypeError("network error"));
    this.sent = true;
  },
});
const told = [];
try {
  for await (const { event } of eventsOf(stream)) told.push(event);
} catch (error) {
  told.push(error.message);
}
console.log(JSON.stringify(told));
"""


@pytest.mark.process
@needs_node
def test_the_page_has_its_own_words_for_a_stream_that_breaks(tmp_path) -> None:
    assert run_page(tmp_path, BROKEN, None)[-1] == "The connection to the service broke."


@pytest.mark.process
@needs_node
def test_the_page_doubts_commas_as_the_report_does(tmp_path) -> None:
    """By the same signs, in the same words but for the quotes around a class."""
    singles = "".join(f"text {n},{name}\n" for n, name in enumerate("abcdc" * 4))
    several = [
        ", please,a",
        ",please,a",
        ", in {n},b",
        ",in {n},b",
        ",a,b",
        ", a, b",
        ", a,b",
        ", b,a",
        ", a,a",
        ",a, b",
        ', "x",a',
        ', " ",a',
        f",{'x' * 50}, {{n}},a",
    ]
    datas = [
        first + singles * few + "".join(f"row {n}{row.format(n=n)}\n" for n in range(6))
        for row in several
        for few in (0, 1)
        for first in ("", "text,topic,tone\n")
    ]
    script = """
const { TrainingData } = await import(process.argv[1]);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
console.log(JSON.stringify(JSON.parse(Buffer.concat(chunks)).map((data) => {
  const found = new TrainingData();
  found.feed(new TextEncoder().encode(data));
  found.end();
  return found.warnings();
})));
"""
    shown = run_page(tmp_path, script, datas)
    counts = set()
    for data, said in zip(datas, shown, strict=True):
        # The page alone knows of classes of one row each; the report says it in other words.
        page = [text for text in said if "comma" in text and "one row each" not in text]
        report = [text for text in read([data.encode()]).warnings if "comma" in text]
        assert [same_words(text) for text in page] == [same_words(text) for text in report], data
        counts.add(len(report))
    assert counts >= {0, 1}


def same_words(text: str) -> str:
    text = re.sub(r"[“”']", "", text)
    return text.replace(
        "). Is there a comma in the text? Then put the text in quotes.", "): ask"
    ).replace("): is there a comma in the texts? Then put them in quotes.", "): ask")


@pytest.mark.process
@needs_node
def test_the_page_doubts_a_header_as_the_report_does(tmp_path) -> None:
    """By the same words in the first row, however these are written."""
    firsts = [
        "text,class",
        "TEXT,a",
        "one,Intent",
        "one,a,label",
        "one,a",
        "text,b",
        "hello,class ",
    ]
    firsts += [*(f"{word},a" for word in HEADER_TEXTS), *(f"one,{word}" for word in HEADER_CLASSES)]
    datas = [first + "\ntwo,b\nthree,a\nfour,b\nfive,c\n" for first in firsts]
    script = """
const { TrainingData } = await import(process.argv[1]);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
console.log(JSON.stringify(JSON.parse(Buffer.concat(chunks)).map((data) => {
  const found = new TrainingData();
  found.feed(new TextEncoder().encode(data));
  found.end();
  return found.warnings().some((text) => text.includes("header"));
})));
"""
    doubted = run_page(tmp_path, script, datas)
    reported = [any("header" in text for text in read([data.encode()]).warnings) for data in datas]
    assert doubted == reported
    assert {True, False} == set(doubted)


@pytest.mark.process
@needs_node
@pytest.mark.parametrize("long", ["refused", "cut"])
def test_the_page_refuses_what_the_service_refuses(tmp_path, long: str) -> None:
    """In the same words, however the bytes are cut."""
    sizes = (1 << 16, 7, 1)
    runs = [(data, size) for data in CASES for size in sizes if len(data) < 10_000 * size]
    sent = [(base64.b64encode(data).decode(), size) for data, size in runs]
    answers = run_page(tmp_path, CHECK, sent, long)
    cut_to = Limits().text_chars if long == "cut" else WHOLE
    for (data, size), (first, second) in zip(runs, answers, strict=True):
        found = [first, sorted(second) if isinstance(second, list) else second]
        expected = verdict(data, cut_to)
        if isinstance(expected[1], str):  # the page has a switch for that
            expected[1] = expected[1].removesuffix(
                " With ?long=cut the service cuts long texts after a word."
            )
        assert found == expected, (data[-80:], size)
