"""Requests and options of the service, against its application."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from service_requests import ask, prepared
from test_service_classifiers import CSV, PART, create

from slipstream.apps.service import classifiers, downloads, keys, metrics, queue
from slipstream.apps.service.context import Service
from slipstream.apps.service.database import Database, Row
from slipstream.apps.service.examples import EXAMPLES, ID, PARAMETERS
from slipstream.apps.service.routes import OPERATIONS, description
from slipstream.apps.service.rows import Limits

FORM = "application/x-www-form-urlencoded"
UPLOAD = (PART.format("metadata", "{}") + PART.format("data", CSV) + "--b--\r\n").encode()
JSON = {"content_type": "application/json"}
UPLOAD_TYPE = "multipart/form-data; boundary=b"
GRANT = "grant_type=urn:ibm:params:oauth:grant-type:apikey&response_type=cloud_iam&apikey="


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with prepared(tmp_path / "data") as service:
        yield service


# ---- addresses


def test_the_public_url(tmp_path: Path) -> None:
    with prepared(tmp_path / "data", public_url="https://nlc.example/") as service:
        classifier = create(service)
        forwarded = {"x_forwarded_host": "evil"}
        for prefix in ("", "/instances/a-1"):
            one = f"/v1/classifiers/{classifier}"
            answer = ask(service, f"GET {prefix}{one}", **forwarded)
            assert answer.json["url"] == f"https://nlc.example{prefix}{one}"


@pytest.mark.parametrize(
    ("headers", "base"),
    [
        ({"x_forwarded_proto": "https", "x_forwarded_host": "a.example"}, "https://a.example"),
        ({"x_forwarded_proto": "https, http", "x_forwarded_host": "a, b"}, "https://a"),
        ({}, "http://localhost"),
    ],
)
def test_behind_a_proxy(tmp_path: Path, headers: dict[str, str], base: str) -> None:
    with prepared(tmp_path / "data", behind_proxy=True) as service:
        create(service)
        [found] = ask(service, "GET /v1/classifiers", **headers).json["classifiers"]
        assert found["url"] == f"{base}/v1/classifiers/{found['classifier_id']}"


def test_a_path_is_matched_to_its_end(service: Service) -> None:
    for path in ("/v1/classifiers", "/livez", "/docs"):
        assert ask(service, f"GET {path}").code == 200
        assert ask(service, f"GET {path}%0A").code == 404


# ---- keys


def test_the_key_of_metrics(tmp_path: Path) -> None:
    with prepared(tmp_path / "data", metrics_key="mk") as service:
        for credential in ("Bearer mk", "bearer mk", "BEARER  mk"):
            answer = ask(service, "GET /metrics", authorization=credential)
            assert answer.code == 200
            assert b"slipstream_jobs" in answer.body
        for wrong in ("Bearer mk2", "Basic mk", "mk", ""):
            assert ask(service, "GET /metrics", authorization=wrong).code == 401
        assert ask(service, "GET /livez").code == 200


@pytest.mark.parametrize("no_auth", [False, True])
def test_a_token_for_a_wrong_key(tmp_path: Path, no_auth: bool) -> None:
    def token(key: str) -> int:
        form = (GRANT + key).encode()
        return ask(service, "POST /identity/token", form, content_type=FORM).code

    with prepared(tmp_path / "data", no_auth=no_auth) as service:
        assert token("sk_any") == 200  # there is no key yet
        key = keys.add_key(service.database, "team")
        assert [token(key), token("sk_any")] == [200, 400]


def test_a_browser_does_not_send_its_password_for_other_pages(tmp_path: Path) -> None:
    with prepared(tmp_path) as service:
        key = keys.add_key(service.database, "team")
        basic = f"Basic {b64encode(f'apikey:{key}'.encode()).decode()}"
        listed = "GET /v1/classifiers"
        for origin, credential, code in [
            ("http://evil", basic, 403),
            ("http://localhost:8080", basic, 200),
            ("http://evil", f"Bearer {key}", 200),
        ]:
            assert ask(service, listed, authorization=credential, origin=origin).code == code


@pytest.mark.parametrize("prefix", ["", "/instances/abc", "/natural-language-classifier/api"])
@pytest.mark.parametrize(
    ("options", "headers", "origin", "foreign"),
    [
        ({}, {"host": "localhost"}, "http://localhost", "http://other"),
        ({}, {"host": "localhost:8080"}, "http://localhost:8080", "http://localhost.other"),
        ({}, {"host": "[::1]"}, "http://[::1]", "http://[::2]"),
        # The proxy ends TLS, and says nothing of it.
        ({}, {"host": "nlc.example"}, "https://nlc.example", "https://example"),
        ({"public_url": "https://a.example/nlc"}, {}, "https://a.example", "http://localhost"),
        ({"public_url": "https://A.example:444/n/"}, {}, "https://a.example:444", "https://a"),
        ({"behind_proxy": True}, {"x_forwarded_host": "a.example"}, "https://a.example", "null"),
        ({"allow_host": ("b.example",)}, {}, "https://b.example", "https://c.b.example"),
        ({}, {}, "http://localhost", "http://["),
    ],
)
def test_the_host_of_a_page_that_sends_a_password(
    tmp_path: Path,
    prefix: str,
    options: dict[str, Any],
    headers: dict[str, str],
    origin: str,
    foreign: str,
) -> None:
    with prepared(tmp_path, **options) as service:
        key = keys.add_key(service.database, "team")
        basic = f"Basic {b64encode(f'apikey:{key}'.encode()).decode()}"
        more = {"authorization": basic, **headers}
        listed = f"GET {prefix}/v1/classifiers"
        assert ask(service, listed, **more, origin=origin).code == 200
        assert ask(service, listed, **more, origin=foreign).code == 403
        assert ask(service, listed, **more).code == 200
        assert ask(service, listed, **{**more, "host": "", "origin": "null"}).code == 403


# ---- bodies


@pytest.mark.parametrize("charset", ["utf-16", "UTF16", '"UTF_32LE"'])
def test_json_in_another_encoding(service: Service, charset: str) -> None:
    path, kind = "/v1/classifiers/x/classify", "application/json; charset="
    answer = ask(service, f"POST {path}", b"{}", content_type=kind + charset)
    assert (answer.code, answer.json["error"]) == (415, "Unsupported media type")
    assert ask(service, f"POST {path}", b"{}", content_type=kind + "UTF8").code == 400


# ---- logs


def test_the_end_of_a_log_and_all_of_it(service: Service) -> None:
    classifier = create(service)
    log = b"".join(b"line %d\n" % number for number in range(20_000))
    assert len(log) > 2 * downloads.LOG_NBYTES
    (service.directory.version(classifier, 1) / "train.log").write_bytes(log)
    path = f"GET /api/classifiers/{classifier}/log"
    assert ask(service, path).body == log[-downloads.LOG_NBYTES :]
    assert ask(service, f"{path}?all=1").body == log
    assert ask(service, f"{path}?all=0").body == log[-downloads.LOG_NBYTES :]


# ---- health


def test_readiness(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_ready() -> set[str]:
        answer = ask(service, "GET /readyz")
        wrong = {name for name, value in answer.json.items() if value is False} - {"ready"}
        assert answer.json["ready"] is not bool(wrong)
        assert (answer.code, answer.headers.get("retry-after")) == (
            (503, "5") if wrong else (200, None)
        )
        return wrong

    monkeypatch.setattr(metrics, "FREE_NBYTES", 0)
    assert not_ready() == set()
    service.trainer_silent_s = lambda: metrics.TRAINER_SILENT_S
    assert not_ready() == {"trainer"}
    service.stopping.set()
    assert not_ready() == {"trainer", "running"}
    service.trainer_silent_s = lambda: 0.0
    assert not_ready() == {"running"}


# ---- the description


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_operation_is_described() -> None:
    found = description()
    schemas = found["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in references(found)} <= set(schemas)
    ids = [entry["operationId"] for path in found["paths"].values() for entry in path.values()]
    assert len(set(ids)) == len(ids) == len(OPERATIONS)
    for one in OPERATIONS:
        entry = found["paths"][one.path][one.method.lower()]
        assert entry["summary"]
        assert entry.get("security") == ([] if one.is_open else None)
        in_path = {p["name"] for p in entry["parameters"] if p["in"] == "path" and p["required"]}
        assert in_path == set(re.findall(r"{(\w+)}", one.path))
        assert ("requestBody" in entry) == bool(one.body)
        assert {"200", "default"} == set(entry["responses"])


@pytest.mark.parametrize(
    ("operation", "kind", "fields"),
    [
        (
            "post /v1/classifiers",
            "multipart/form-data",
            {"training_metadata", "training_data"},
        ),
        (
            "put /api/classifiers/{id}/data",
            "multipart/form-data",
            {"training_metadata", "training_data"},
        ),
        ("post /v1/classifiers/{id}/classify", "application/json", {"text"}),
        ("post /v1/classifiers/{id}/classify_collection", "application/json", {"collection"}),
        ("post /identity/token", FORM, {"grant_type", "apikey"}),
    ],
)
def test_bodies_are_described(operation: str, kind: str, fields: set[str]) -> None:
    method, path = operation.split()
    found = description()
    content = found["paths"][path][method]["requestBody"]["content"]
    assert list(content) == [kind]
    name = content[kind]["schema"]["$ref"].rpartition("/")[2]
    assert set(found["components"]["schemas"][name]["required"]) == fields


def test_parameters_and_the_report_are_described() -> None:
    paths = description()["paths"]
    shown = paths["/v1/classifiers/{id}/classify"]["get"]["parameters"]
    text = {"name": "text", "in": "query", "required": True, "schema": {"type": "string"}}
    assert text.items() <= shown[1].items()
    report = paths["/api/classifiers/{id}/report"]["get"]["responses"]["200"]
    assert list(references(report)) == ["#/components/schemas/Report"]


def test_pages_of_the_description(service: Service) -> None:
    assert ask(service, "GET /openapi.json").json == description()
    docs = ask(service, "GET /docs")
    assert docs.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in docs.headers["content-security-policy"]
    for path in description()["paths"]:
        assert f"</strong> {path}</code>".encode() in docs.body


def test_each_path_has_a_sentence_of_its_own(service: Service) -> None:
    paths = description()["paths"]
    said = {path: {entry["summary"] for entry in one.values()} for path, one in paths.items()}
    pairs = [(a, b) for a in said for b in said if a < b and said[a] & said[b]]
    assert pairs == []


def test_description_has_code_as_markdown_and_docs_as_markup(service: Service) -> None:
    assert "``" not in json.dumps(description())
    events = description()["paths"]["/api/classifiers/{id}/events"]["get"]["summary"]
    assert events == "Follow a job: server-sent events `progress`, `epoch` and `end`."
    docs = ask(service, "GET /docs").body.decode()
    assert "<code>progress</code>, <code>epoch</code> and <code>end</code>" in docs
    assert "?long=cut" in docs
    assert "`" not in docs


def test_limits_are_told(tmp_path: Path) -> None:
    limits = Limits(max_rows=12, text_chars=2000)
    with prepared(tmp_path / "data", limits=limits) as service:
        assert ask(service, "GET /api/limits").json == msgspec.to_builtins(limits)


def test_every_operation_has_a_tag_and_each_tag_a_description() -> None:
    found = description()
    entries = [entry for methods in found["paths"].values() for entry in methods.values()]
    used = {tag for entry in entries for tag in entry["tags"]}
    assert used == {tag["name"] for tag in found["tags"]}
    assert all(entry["tags"] for entry in entries)
    assert all(tag["description"] for tag in found["tags"])


def test_examples_are_of_their_types() -> None:
    """Each body and answer in JSON has one, but for the report; it has every field."""
    lacking = []
    for one in OPERATIONS:
        for kind in (one.answer, one.body):
            if kind is None or isinstance(kind, str):
                continue
            example = msgspec.to_builtins(EXAMPLES[kind])
            assert msgspec.to_builtins(msgspec.convert(example, kind)).items() <= example.items()
            lacking += set(kind.__struct_fields__) - set(example)
    assert lacking == []
    assert classifiers.ID.fullmatch(ID)
    assert PARAMETERS["id"][1] == ID


def test_examples_are_in_the_description() -> None:
    paths = description()["paths"]
    classify = paths["/v1/classifiers/{id}/classify"]
    body = classify["post"]["requestBody"]["content"]["application/json"]
    assert body["example"] == {"text": "a cheap room in Oslo"}
    upload = paths["/v1/classifiers"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert set(upload["example"]) == {"training_metadata", "training_data"}
    parameters = [
        p for methods in paths.values() for e in methods.values() for p in e["parameters"]
    ]
    assert all(one["description"] and one["example"] for one in parameters)


def test_only_the_use_of_a_key_is_noted(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no keys, each request may show another: nothing is kept of them."""
    statements: list[str] = []
    run = Database.run

    def noted(self: Database, statement: str, **values: object) -> list[Row]:
        statements.append(statement)
        return run(self, statement, **values)

    def uses() -> int:
        return sum(statement.startswith("UPDATE api_keys") for statement in statements)

    monkeypatch.setattr(Database, "run", noted)
    assert ask(service, "GET /v1/classifiers", authorization="Bearer any").code == 200
    assert uses() == 0
    key = keys.add_key(service.database, "alice")
    assert ask(service, "GET /v1/classifiers", authorization=f"Bearer {key}").code == 200
    assert uses() == 1


def test_data_for_an_unknown_classifier_is_not_read(service: Service) -> None:
    path = "PUT /api/classifiers/abcdefx0123456789-nlc-9/data"
    answer = ask(service, path, b"no multipart", content_type="text/plain")
    assert (answer.code, answer.json["error"]) == (404, "Not found")


def test_the_quota_of_those_without_a_key(tmp_path: Path) -> None:
    with prepared(tmp_path / "data", quota=9, queue=20) as service:
        for _ in range(9):
            ask(service, "POST /v1/classifiers", UPLOAD, content_type=UPLOAD_TYPE)
        assert len(ask(service, "GET /v1/classifiers").json["classifiers"]) == 9
        refused = ask(service, "POST /v1/classifiers", UPLOAD, content_type=UPLOAD_TYPE)
        assert refused.json["error"] == "Entitlement error"
        assert "('slipstream serve --quota N')" in refused.json["description"]


# ---- texts that are too long


def long_upload(lines: str) -> bytes:
    return (PART.format("metadata", "{}") + PART.format("data", lines) + "--b--\r\n").encode()


def trained(service: Service) -> queue.Claim:
    """The job that waited."""
    with service.database.transaction() as database:
        held = queue.claim(database, "me", 1)
        assert held is not None
        queue.finish(database, held, "done", None, 2)
        return held


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    rows = CSV + "two words and more,class0\nfits ten c,class1\n"
    with prepared(tmp_path / "data", limits=Limits(text_chars=10)) as service:
        sent = {"body": long_upload(rows), "content_type": UPLOAD_TYPE}
        refused = ask(service, "POST /v1/classifiers", **sent)
        assert refused.json["error"] == "Phrase too long"
        made = ask(service, "POST /v1/classifiers?long=cut", **sent).json["classifier_id"]
        own = f"/api/classifiers/{made}"
        state = ask(service, f"GET {own}").json
        assert (state["cut"], state["rows"]) == (1, 8)
        assert ask(service, f"GET {own}/data").body.decode() == rows  # as it was sent
        assert trained(service).cut_to == 10
        again = {"body": long_upload(CSV), "content_type": UPLOAD_TYPE}
        assert ask(service, f"PUT {own}/data", **sent).json["error"] == "Phrase too long"
        assert ask(service, f"PUT {own}/data?long=cut", **sent).json == {"version": 2}
        assert ask(service, f"GET {own}").json["cut"] == 1
        trained(service)
        assert ask(service, f"PUT {own}/data", **again).json == {"version": 3}
        assert ask(service, f"GET {own}").json["cut"] == 0
        assert trained(service).cut_to == 0


def test_a_job_that_is_tried_again_has_no_report_of_before(service: Service) -> None:
    """A learner that is fast would take it for that of this job, and train on held-out rows."""
    classifier = create(service)
    held = queue.claim(service.database, "me", 1)
    assert held is not None
    queue.finish(service.database, held, "failed", "no reason", 2)
    report = service.directory.version(classifier, 1) / "report.json"
    report.write_text("{}")
    assert ask(service, f"POST /api/classifiers/{classifier}/retry").json["state"] == "waiting"
    assert not report.exists()


def test_long_can_only_be_cut(service: Service) -> None:
    refused = ask(service, "POST /v1/classifiers?long=Cut", UPLOAD, content_type=UPLOAD_TYPE)
    assert (refused.code, refused.json["error"]) == (400, "Malformed query")
    assert refused.json["description"] == "The parameter 'long' is 'Cut'; it can only be 'cut'."


@pytest.mark.parametrize(("text_chars", "most"), [(9, 2048), (50_000, 50_000)])
def test_a_text_to_classify_may_be_as_long_as_one_to_train_on(
    tmp_path: Path, text_chars: int, most: int
) -> None:
    with prepared(tmp_path / "data", limits=Limits(text_chars=text_chars)) as service:
        classifier = create(service) if text_chars > 9 else "0"
        url = f"POST /v1/classifiers/{classifier}"
        for length, error in ((most, {"Classifier not available", "Not found"}), (most + 1, None)):
            text = {"text": "\N{GRINNING FACE}" * length}  # 12 bytes each in this JSON
            single = ask(service, f"{url}/classify", json.dumps(text).encode(), **JSON)
            body = json.dumps({"collection": [text] * 30}).encode()
            for answer in (single, ask(service, f"{url}/classify_collection", body, **JSON)):
                assert answer.json["error"] in (error or {"Phrase too long"})
