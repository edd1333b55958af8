"""Bad input, as clients send it: each gets its answer, and the service goes on.

The rows of the specification's §12, and the tests that have them (here if no file is named):

======= ==========================================================================================
1-22    test_rows_that_are_accepted, test_rows_that_are_refused; more in unit/test_service_rows.py;
        8, 9, 13, 19-22 trained by the real net: test_service_real.py
23      test_names_that_are_refused, test_names_that_are_kept
24      test_filenames_do_not_matter
25      test_ids
26      test_metadata_that_is_no_object, test_of_duplicate_keys_the_last_counts
27      test_languages_that_are_refused, test_languages
28, 29  test_parts, test_too_many_parts_and_headers
30      test_boundaries, test_clients_that_go_away
31      test_create_of_another_type, test_bodies_of_another_type
32      test_rows_that_are_refused
33      test_sizes, test_chunks_without_end, test_chunks_without_end_after_an_answer
34      test_gzip; its memory: test_service_crowds.py
35      test_service_deadlines.py
36      test_service_crowds.py; with few connections: test_service_deadlines.py
37      test_headers_that_are_no_http
38      test_methods, test_expect_100_continue
39-41   test_texts_that_are_none, test_texts, test_bodies_that_are_no_json
42      test_collections
43      test_classify_without_a_model; test_service_crowds.py
44      test_deleting_twice; in a loop: test_service_crowds.py
45      test_quota; at once: test_service_crowds.py
46      test_too_many_requests_and_jobs; by the SDKs: test_service_sdk_python.py, ..._node.py
47      test_idempotency; at once: test_service_crowds.py
48      test_hosts_and_origins
49      test_service_sdk_python.py; expired: unit/test_service_keys.py
50      test_a_damaged_model; another format: unit/test_service_answers.py
======= ==========================================================================================
"""

from __future__ import annotations

import gzip
import json
import select
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
from service_process import CSV, ServiceProcess

pytestmark = pytest.mark.process
BOUNDARY = "b"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    options = ("--max-body", "2", "--rate", "100000")
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data", *options) as service:
        yield service


@pytest.fixture(scope="module")
def trained(service: ServiceProcess) -> str:
    classifier = service.created()
    service.wait_status(classifier, "Available")
    return classifier


@pytest.fixture(autouse=True)
def still_answers(service: ServiceProcess) -> Iterator[None]:
    yield
    assert service.get("/livez").status_code == 200
    service.wait_for(lambda: not list((service.data / "incoming").iterdir()))


def part(name: str, value: bytes, extra: str = "") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
META = part("training_metadata", b'{"name": "n"}')
DATA = part("training_data", CSV.encode())


def post(service: ServiceProcess, body: bytes, **headers: str) -> requests.Response:
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    return requests.post(
        f"{service.url}/v1/classifiers", data=body, headers={**kind, **headers}, timeout=60
    )


def accepted(service: ServiceProcess, answer: requests.Response) -> dict:
    assert answer.status_code == 200, answer.text
    made = answer.json()
    gone = requests.delete(f"{service.url}/v1/classifiers/{made['classifier_id']}", timeout=30)
    assert gone.status_code == 200
    return made


def refused(answer: requests.Response, code: int, error: str) -> str:
    found = answer.json()
    assert (answer.status_code, found["error"]) == (code, error), found
    assert found["code"] == code
    assert set(found) == {"code", "error", "description"}
    return found["description"]


MORE = "".join(f"text {number},class {number}\n" for number in range(20_001)).encode()
ACCEPTED = {
    "1: BOM": b"\xef\xbb\xbf" + CSV.encode(),
    "2: CRLF": CSV.replace("\n", "\r\n").encode(),
    "3: CR": CSV.replace("\n", "\r").encode(),
    "4: no last line end": CSV.rstrip("\n").encode(),
    "8: odd characters": (CSV + "a\x07b\u202e\N{GRINNING FACE},cafe\u0301\n").encode(),
    "9: lines in a text": CSV.encode() + b'"two\nlines\tof text",conditions\n',
    "13: header": b"text,class\n" + CSV.encode(),
    "16: a class a row": MORE[: MORE.index(b"text 900,")],
    "19: one row 10,000 times": CSV.encode() + b"again,conditions\n" * 10_000,
    "20: 500 classes": CSV.encode() + b"x," + b",".join(b"c%d" % i for i in range(500)) + b"\n",
    "21: formulas": CSV.encode() + b"=cmd|' /C calc'!A0,@SUM\n+1,+1\n",
    "22: markup": CSV.encode() + b"<script>,{{7*7}}\n'; DROP TABLE,<script>\n",
}
REFUSED = {
    "5: UTF-16": (CSV.encode("utf-16"), "Malformed data", "not UTF-8: line 1"),
    "6: latin-1": (b"a,b\n" * 8_999 + b"caf\xe9,b\n", "Malformed data", "not UTF-8: line 9,000"),
    "7: NUL": (CSV.encode() + b"a\0b,c\n", "Malformed data", "NUL character: line 7"),
    "9: a line in a class": (CSV.encode() + b'x,"a\nb"\n', "Malformed data", "line 7 and column 2"),
    "10: a quote without end": (CSV.encode() + b'"x,c\n' * 9_999, "Malformed data", "line 7"),
    "11: text after a quote": (b'"a"b,c\n', "Malformed data", "line 1"),
    "12: semicolons": (b"a;b\n", "Malformed data", "separated by ';'"),
    "14: nothing": (b"", "Data too small", "= 0"),
    "14: blank lines": (b"\n \r\n", "Data too small", "= 0"),
    "14: four rows": (b"a,b\n" * 4, "Data too small", "= 4"),
    "15: 20,001 rows": (MORE, "Too many data instances", "= 20,001"),
    "16: one class": (b"a,b\n" * 5, "Too few classes", "1 class"),
    "16: 3,001 classes": (MORE[: MORE.index(b"text 3001,")], "Too many classes", "3,001"),
    "17: 1,025 characters": (CSV.encode() + b"x" * 1025 + b",a\n", "Phrase too long", "line 7"),
    "17: a long class": (CSV.encode() + b"a," + b"x" * 257, "Class too long", "257"),
    "18: empty text": (CSV.encode() + b",a\n", "Malformed data", "line 7 and column 1"),
    "18: spaces": (CSV.encode() + b"  ,a\n", "Malformed data", "line 7 and column 1"),
    "18: no class": (CSV.encode() + b"text,,\n", "Malformed data", "line 7 and column 2"),
    "32: a spreadsheet": (b"PK\x03\x04" + bytes(99), "Malformed data", "export it as CSV"),
    "32: a path": (b"data/train.csv", "Malformed data", "forgot the @?"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_rows_that_are_accepted(service: ServiceProcess, case: str) -> None:
    answer = post(service, META + part("training_data", ACCEPTED[case]) + END)
    assert answer.status_code == 200, answer.text
    one = answer.json()["classifier_id"]
    assert service.get(f"/api/classifiers/{one}/data").content == ACCEPTED[case]
    accepted(service, answer)


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_are_refused(service: ServiceProcess, case: str) -> None:
    data, error, said = REFUSED[case]
    answer = post(service, META + part("training_data", data) + END)
    assert said in refused(answer, 400, error)


@pytest.mark.parametrize("name", ["x" * 257, "a\0b", "a\nb", 7])
def test_names_that_are_refused(service: ServiceProcess, name: object) -> None:
    metadata = json.dumps({"name": name}).encode()
    refused(
        post(service, part("training_metadata", metadata) + DATA + END), 400, "Malformed metadata"
    )


@pytest.mark.parametrize("name", ["../../x", None, "<script>{{7*7}}'; DROP TABLE"])
def test_names_that_are_kept(service: ServiceProcess, name: str | None) -> None:
    metadata = json.dumps({"name": name}).encode()
    made = accepted(service, post(service, part("training_metadata", metadata) + DATA + END))
    assert made["name"] == name


@pytest.mark.parametrize("name", ["../../etc/passwd", "x" * 3000, "C:\\x"])
def test_filenames_do_not_matter(service: ServiceProcess, name: str) -> None:
    extra = f'; filename="{name}"'
    data = part("training_data", CSV.encode(), extra)
    accepted(service, post(service, data + META + END))


@pytest.mark.parametrize(
    "given", ["..", "%2e%2e%2f", "a%00b", "x" * 8000, "' OR 1=1", "a%2F..%2Fb"]
)
def test_ids(service: ServiceProcess, given: str) -> None:
    refused(service.get(f"/v1/classifiers/{given}"), 404, "Not found")


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"x"', b"[" * 60_000, b'{"name": NaN}'])
def test_metadata_that_is_no_object(service: ServiceProcess, raw: bytes) -> None:
    answer = post(service, part("training_metadata", raw) + DATA + END)
    refused(answer, 400, "Missing metadata")
    assert "should contain 'language' and 'name'" in answer.json()["description"]


def test_of_duplicate_keys_the_last_counts(service: ServiceProcess) -> None:
    metadata = part("training_metadata", b'{"name": "a", "name": "b"}')
    assert accepted(service, post(service, metadata + DATA + END))["name"] == "b"


@pytest.mark.parametrize("language", ["tlh", "", 5])
def test_languages_that_are_refused(service: ServiceProcess, language: object) -> None:
    raw = json.dumps({"language": language}).encode()
    refused(post(service, part("training_metadata", raw) + DATA + END), 400, "Unsupported language")


@pytest.mark.parametrize(("given", "kept"), [("EN", "en"), ("pt_BR", "pt"), ("en-US", "en")])
def test_languages(service: ServiceProcess, given: str, kept: str) -> None:
    raw = json.dumps({"language": given}).encode()
    made = accepted(service, post(service, part("training_metadata", raw) + DATA + END))
    assert made["language"] == kept


def test_parts(service: ServiceProcess) -> None:
    refused(post(service, META + END), 400, "Missing training data")
    refused(post(service, DATA + END), 400, "Missing metadata")
    refused(post(service, META + DATA + DATA + END), 400, "Malformed body")
    accepted(service, post(service, META + part("more", b"x" * 99) + DATA + END))


def test_too_many_parts_and_headers(service: ServiceProcess) -> None:
    refused(post(service, part("x", b"") * 10_000 + END), 400, "Malformed body")
    extra = "".join(f"\r\nX-{i}: 1" for i in range(10_000))
    refused(post(service, part("x", b"", extra) + END), 400, "Malformed body")


def test_boundaries(service: ServiceProcess) -> None:
    kind = {"Content-Type": "multipart/form-data"}
    refused(post(service, META + DATA + END, **kind), 415, "Unsupported media type")
    other = {"Content-Type": "multipart/form-data; boundary=other"}
    refused(post(service, META + DATA + END, **other), 400, "Malformed body")
    refused(post(service, META + DATA[:-20]), 400, "Malformed body")


@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded", ""])
def test_create_of_another_type(service: ServiceProcess, kind: str) -> None:
    refused(post(service, b"{}", **{"Content-Type": kind}), 415, "Unsupported media type")


def test_sizes(service: ServiceProcess) -> None:
    assert raw_answer(
        service,
        b"POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n",
    ).startswith(b"HTTP/1.1 413")


def test_chunks_without_end(service: ServiceProcess) -> None:
    where = urlsplit(service.url)
    head = (
        b"POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    )
    begin = META + DATA.rstrip(b"\r\n")
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n" % (len(begin), begin))
        sent = 0
        with suppress(ConnectionError):  # closed while we send
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                sent += 1
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        assert sent >= 31  # the limit here is 2 MiB


@pytest.mark.parametrize("path", [b"POST /nowhere", b"PUT /v1/classifiers", b"GET /livez"])
def test_chunks_without_end_after_an_answer(service: ServiceProcess, path: bytes) -> None:
    where = urlsplit(service.url)
    head = b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(path + head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 ")
        sent = 0
        with suppress(ConnectionError):
            while sent < 64:
                connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                sent += 1
        assert sent < 16  # 1 MiB, and what the kernel has room for


def test_expect_100_continue(service: ServiceProcess) -> None:
    where = urlsplit(service.url)
    body = META + DATA + END

    def answer(length: int) -> bytes:
        head = (
            "POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            "Connection: close\r\n"
            f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n"
        )
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            connection.sendall(head.encode())
            first = connection.recv(65536)
            if not first.startswith(b"HTTP/1.1 100 "):
                return first
            connection.sendall(body)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    made = answer(len(body))
    assert made.startswith(b"HTTP/1.1 200"), made
    number = json.loads(made.partition(b"\r\n\r\n")[2])["classifier_id"]
    requests.delete(f"{service.url}/v1/classifiers/{number}", timeout=60)
    assert answer(200_000_000).startswith(b"HTTP/1.1 413")  # before it sends anything


def test_clients_that_go_away(service: ServiceProcess) -> None:
    where = urlsplit(service.url)
    before = service.log.read_text()
    for sent in (META, META + DATA[:-20]):
        with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
            head = "POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n"
            kind = "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
            connection.sendall((head + kind).encode() + sent)
    service.wait_for(lambda: not list((service.data / "incoming").iterdir()))
    told = service.log.read_text().removeprefix(before)
    assert "Traceback" not in told
    assert "failed" not in told


def test_gzip(service: ServiceProcess) -> None:
    coded = {"Content-Encoding": "gzip"}
    accepted(service, post(service, gzip.compress(META + DATA + END), **coded))
    pack = zlib.compressobj(9, wbits=31)
    bomb = b"".join(pack.compress(bytes(1 << 20)) for _ in range(300)) + pack.flush()
    refused(post(service, META + bomb, **coded), 400, "Malformed body")
    head = gzip.compress(META + part("training_data", bytes(1 << 26)))
    refused(post(service, head, **coded), 413, "Request too large")
    twice = gzip.compress(gzip.compress(META + DATA + END))
    refused(post(service, twice, **coded), 400, "Malformed body")
    broken = gzip.compress(META + DATA + END)[:-9]
    refused(post(service, broken, **coded), 400, "Malformed body")
    brotli = post(service, META, **{"Content-Encoding": "br"})
    refused(brotli, 415, "Unsupported content encoding")


def raw_answer(service: ServiceProcess, sent: bytes) -> bytes:
    where = urlsplit(service.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(sent)
        got = b""
        while block := connection.recv(65536):
            got += block
        return got


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"x" * 70_000,
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
    ],
)
def test_headers_that_are_no_http(service: ServiceProcess, head: bytes) -> None:
    sent = b"POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n"
    answer, _, body = raw_answer(service, sent).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"x-global-transaction-id: " in answer.lower()
    assert set(json.loads(body)) == {"code", "error", "description"}


def test_methods(service: ServiceProcess) -> None:
    url = f"{service.url}/v1/classifiers"
    assert requests.head(url, timeout=30).status_code == 200
    for method in ("OPTIONS", "PUT", "TRACE"):
        answer = requests.request(method, url, timeout=30)
        refused(answer, 405, "Method not allowed")
        assert answer.headers["Allow"] == "GET, HEAD, POST"
    refused(service.get("/nowhere/at/all"), 404, "Not found")


def classify(service: ServiceProcess, classifier: str, body: bytes, **headers: str):
    url = f"{service.url}/v1/classifiers/{classifier}/classify"
    return requests.post(url, data=body, headers={**JSON, **headers}, timeout=30)


@pytest.mark.parametrize("text", [None, 5, [], "", "  "])
def test_texts_that_are_none(service: ServiceProcess, trained: str, text: object) -> None:
    refused(classify(service, trained, json.dumps({"text": text}).encode()), 400, "Missing text")


def test_texts(service: ServiceProcess, trained: str) -> None:
    refused(classify(service, trained, b"{}"), 400, "Missing text")
    emoji = json.dumps({"text": "😀" * 2048}).encode()
    assert classify(service, trained, emoji).status_code == 200
    long = json.dumps({"text": "x" * 2049}).encode()
    refused(classify(service, trained, long), 400, "Phrase too long")
    spaced = classify(service, trained, b'\xef\xbb\xbf{"text": " hot "}')
    assert spaced.json()["text"] == " hot "


@pytest.mark.parametrize(
    "raw", [b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": "a"} x', b"\xff"]
)
def test_bodies_that_are_no_json(service: ServiceProcess, trained: str, raw: bytes) -> None:
    refused(classify(service, trained, raw), 400, "Malformed body")


def test_bodies_of_another_type(service: ServiceProcess, trained: str) -> None:
    body = b'{"text": "a"}'
    for kind in ("text/plain", "application/json; charset=utf-16"):
        answer = classify(service, trained, body, **{"Content-Type": kind})
        refused(answer, 415, "Unsupported media type")
    large = json.dumps({"text": "x" * 600_000}).encode()
    refused(classify(service, trained, large), 413, "Request too large")


@pytest.mark.parametrize(
    ("collection", "error"),
    [
        ([], "Missing collection"),
        ("x", "Missing collection"),
        ([{"text": "a"}] * 31, "Too many phrases"),
        ([{"text": "a"}] * 29 + [{"text": ""}], "Missing text"),
    ],
)
def test_collections(service: ServiceProcess, trained: str, collection: object, error: str) -> None:
    url = f"{service.url}/v1/classifiers/{trained}/classify_collection"
    answer = requests.post(url, json={"collection": collection}, timeout=30)
    description = refused(answer, 400, error)
    assert error != "Missing text" or "collection[29]" in description


def test_the_largest_collection_is_taken_as_clients_escape_it(
    service: ServiceProcess, trained: str
) -> None:
    url = f"{service.url}/v1/classifiers/{trained}/classify_collection"
    largest = {"collection": [{"text": "😀" * 2048}] * 30}
    assert len(json.dumps(largest)) > 512 * 1024
    answer = requests.post(url, json=largest, timeout=30)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["collection"]) == 30
    larger = {"collection": [{"text": "😀" * 3000}] * 30}
    refused(requests.post(url, json=larger, timeout=30), 413, "Request too large")


def test_hosts_and_origins(service: ServiceProcess) -> None:
    for headers in ({"Host": "evil"}, {"Origin": "http://evil"}, {"Origin": "http://["}):
        refused(service.get("/v1/classifiers", headers=headers), 403, "Forbidden")
    forwarded = service.create(**{"X-Forwarded-Host": "evil"})
    assert accepted(service, forwarded)["url"].startswith(service.url)


def test_numbers_that_are_none(service: ServiceProcess, trained: str) -> None:
    url = f"{service.url}/api/classifiers/{trained}"
    for number in ("9" * 5000, "0", "2", "x", "\u00b2"):
        answer = requests.post(f"{url}/versions/{number}/activate", timeout=30)
        refused(answer, 404, "Not found")
    assert requests.post(f"{url}/versions/1/activate", timeout=30).json() == {"version": 1}
    for last in (b"\xb2", b"9" * 5000, b"-1"):
        events = service.get(f"/api/classifiers/{trained}/events", headers={"Last-Event-ID": last})
        assert events.status_code == 200
        assert "event: epoch" in events.text


def test_idempotency(service: ServiceProcess) -> None:
    first, again = (service.create(**{"Idempotency-Key": "k"}) for _ in range(2))
    assert first.json()["classifier_id"] == again.json()["classifier_id"]
    other = service.create(CSV + "more,rows\n", **{"Idempotency-Key": "k"})
    refused(other, 422, "Idempotency key reused")
    accepted(service, again)


def test_deleting_twice(service: ServiceProcess) -> None:
    made = accepted(service, service.create())
    url = f"{service.url}/v1/classifiers/{made['classifier_id']}"
    refused(requests.delete(url, timeout=30), 404, "Not found")


def test_a_damaged_model(service: ServiceProcess) -> None:
    classifier = service.created()
    service.wait_status(classifier, "Available")
    path = service.data / "classifiers" / classifier / "1" / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x80
    path.write_bytes(damaged)
    service.wait_status(classifier, "Unavailable")
    refused(classify(service, classifier, b'{"text": "a"}'), 409, "Classifier not available")
    assert "model.safetensors: it is no model" in service.log.read_text()  # the log says why
    requests.delete(f"{service.url}/v1/classifiers/{classifier}", timeout=30)


def test_classify_without_a_model(service: ServiceProcess) -> None:
    trains = service.training()  # it waits, and is not trained before it is asked
    text = b'{"text": "a"}'
    said = refused(classify(service, trains, text), 409, "Classifier not available")
    assert "in its training phase" in said
    service.go()
    fails = service.created(f"refuse me,a\n{CSV}")
    service.wait_status(fails, "Failed")
    said = refused(classify(service, fails, text), 409, "Classifier not available")
    assert said.startswith("Training failed")
    for classifier in (trains, fails):
        requests.delete(f"{service.url}/v1/classifiers/{classifier}", timeout=30)


def test_quota(service: ServiceProcess) -> None:
    made = []
    while (answer := service.create()).status_code == 200:
        made.append(answer.json()["classifier_id"])
        assert len(made) <= 8
    refused(answer, 400, "Entitlement error")
    for classifier in made:
        requests.delete(f"{service.url}/v1/classifiers/{classifier}", timeout=30)


def test_too_many_requests_and_jobs(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--rate", "5", "--queue", "1") as service:
        service.hold(0)
        answers = [service.create() for _ in range(3)]
        # One may run, for ever, and one may wait by then.
        full = next(answer for answer in answers if answer.status_code != 200)
        refused(full, 429, "Queue full")
        assert int(full.headers["Retry-After"]) > 0
        while (answer := service.get("/v1/classifiers")).status_code == 200:
            pass
        refused(answer, 429, "Too many requests")
        assert 0 < int(answer.headers["Retry-After"]) <= 60
