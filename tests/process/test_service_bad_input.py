"""Bad input, as clients send it: each gets its answer, and the service goes on."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
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
    refused(post(service, part("training_metadata", raw) + DATA + END), 400, "Missing metadata")


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
    assert raw_answer(service, sent).startswith(b"HTTP/1.1 400")


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


def test_hosts_and_origins(service: ServiceProcess) -> None:
    for headers in ({"Host": "evil"}, {"Origin": "http://evil"}):
        refused(service.get("/v1/classifiers", headers=headers), 403, "Forbidden")
    forwarded = service.create(**{"X-Forwarded-Host": "evil"})
    assert accepted(service, forwarded)["url"].startswith(service.url)


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
        answers = [service.create() for _ in range(3)]
        # One may run and one may wait by then.
        full = next(answer for answer in answers if answer.status_code != 200)
        refused(full, 429, "Queue full")
        assert int(full.headers["Retry-After"]) > 0
        while (answer := service.get("/v1/classifiers")).status_code == 200:
            pass
        refused(answer, 429, "Too many requests")
        assert 0 < int(answer.headers["Retry-After"]) <= 60
