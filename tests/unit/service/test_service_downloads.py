from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from service_requests import ask, prepared
from test_service_classifiers import create

from slipstream.apps.service import downloads
from slipstream.apps.service.errors import ApiError

LIMIT_S = 60


@pytest.mark.parametrize("answer", [downloads.log, downloads.report_csv])
def test_a_file_that_is_deleted_while_it_is_asked_for_is_not_found(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"name": None, "classifier": "id"}  # since the look
    monkeypatch.setattr(downloads, "_file", lambda call, name: (tmp_path / name, gone))
    with pytest.raises(ApiError) as refused:
        answer(SimpleNamespace(query_params={}, method="GET"))
    assert refused.value.body.code == 404


def test_a_log_that_grows_while_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"one\n")
    monkeypatch.setattr(downloads, "_file", lambda call, name: (log, {}))
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(LIMIT_S)

    async def send(message: Any) -> None:
        sent.append(message)
        with log.open("ab") as file:
            file.write(b"more\n" * (len(sent) == 1))

    answer = downloads.log(SimpleNamespace(query_params={"all": "1"}, method="GET"))  # type: ignore[arg-type]
    scope = {"type": "http", "method": "GET", "headers": []}
    asyncio.run(answer(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    assert body == b"one\nmore\n"
    # Of a longer body than the header says, the server sends a part, and no error.
    assert int(dict(sent[0]["headers"]).get(b"content-length", len(body))) == len(body)


@pytest.mark.parametrize(
    ("asked", "code", "said", "headers"),
    [
        (b"bytes=90-", 416, "has no such bytes", {"Content-Range": "bytes */6"}),
        (b"bytes=x", 400, "not of the form", {}),
    ],
)
def test_bytes_that_a_file_does_not_have(
    tmp_path: Path, asked: bytes, code: int, said: str, headers: dict[str, str]
) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b"one,a\n")
    scope = {"type": "http", "method": "GET", "headers": [(b"range", asked)]}
    with pytest.raises(ApiError) as refused:
        asyncio.run(downloads.Download(path)(scope, None, None))  # type: ignore[arg-type]
    assert refused.value.body.code == code
    assert said in refused.value.description
    assert refused.value.headers == headers


def test_a_log_is_not_read_for_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"one\n")
    monkeypatch.setattr(downloads, "_file", lambda call, name: (log, {}))
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(LIMIT_S)

    async def send(message: Any) -> None:
        sent.append(message)

    answer = downloads.log(SimpleNamespace(query_params={"all": "1"}, method="HEAD"))  # type: ignore[arg-type]
    asyncio.run(answer({"type": "http", "method": "HEAD", "headers": []}, receive, send))
    assert [message.get("body", b"") for message in sent] == [b"", b""]


def test_a_file_that_is_deleted_before_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b"one,a\n")
    download = downloads.Download(path, stat_result=path.stat())
    path.unlink()
    scope, sent = {"type": "http", "method": "GET", "headers": []}, []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ApiError) as refused:
        asyncio.run(download(scope, receive, send))
    assert refused.value.body.code == 404
    assert sent == []


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("trips", 'filename="trips-data.csv"'),
        ("../../x", 'filename="x-data.csv"'),
        ('a"; filename="b', 'filename="a_filename_b-data.csv"'),
        ("東京", "filename=\"id-data.csv\"; filename*=UTF-8''%E6%9D%B1%E4%BA%AC-data.csv"),
        ("e\u0301\u202egpj", "filename=\"egpj-data.csv\"; filename*=UTF-8''%C3%A9_gpj-data.csv"),
        ("", 'filename="id-data.csv"'),
        ("...", 'filename="id-data.csv"'),
        (None, 'filename="id-data.csv"'),
    ],
)
def test_names_of_files_begin_with_the_name_of_the_classifier(name: str, names: str) -> None:
    assert downloads.file_names(name, "id", "data.csv") == names


def test_a_long_name_fits_into_a_file_system(tmp_path: Path) -> None:
    found = downloads.file_names("東" * 256, "id", "model.safetensors")
    (tmp_path / unquote(found.partition("UTF-8''")[2])).touch()


def test_downloads_are_named_after_the_classifier(tmp_path: Path) -> None:
    with prepared(tmp_path / "data") as service:
        classifier = create(service)
        service.database.run("UPDATE classifiers SET name = 'Café 1'")
        files = service.directory.version(classifier, 1)
        (files / "model.safetensors").write_bytes(b"")
        (files / "report.json").write_text("{}")
        for path, use, end in (
            ("data", "attachment", "data.csv"),
            ("model", "attachment", "model.safetensors"),
            ("report.csv", "attachment", "report.csv"),
            ("report", "inline", "report.json"),
        ):
            header = ask(service, f"GET /api/classifiers/{classifier}/{path}").headers[
                "content-disposition"
            ]
            names = f"filename=\"Cafe_1-{end}\"; filename*=UTF-8''Caf%C3%A9_1-{end}"
            assert header == f"{use}; {names}"
