"""Streams of a job's events: what they send, how many there may be, when they end."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_requests import LIMIT_S, answer_to, ask, prepared
from test_service_classifiers import create

from slipstream.apps.service import keys, own, queue
from slipstream.apps.service.context import Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with prepared(tmp_path / "data") as service:
        yield service


def test_headers_of_events_come_at_once(service: Service) -> None:
    path = f"/api/classifiers/{create(service)}/events"  # its job waits, for ever
    answer = ask(service, f"HEAD {path}")
    assert (answer.code, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ask(service, "HEAD /api/classifiers/x/events").code == 404


def test_events_after_an_epoch(service: Service) -> None:
    classifier = create(service)
    held = queue.claim(service.database, "me", 1)
    assert held is not None
    epochs = [queue.Progress(10, 20, number, 4, 1.0, at=1, loss=0.5) for number in range(4)]
    queue.record(service.database, held, epochs)
    queue.finish(service.database, held, "done", None, 3)

    def told(**headers: str) -> list[bytes]:
        events = ask(service, f"GET /api/classifiers/{classifier}/events", **headers).body
        assert events.endswith(b"\n\n")
        assert b"event: end\n" in events
        return re.findall(rb"^id: (\d+)$", events, re.MULTILINE)

    assert told() == [b"0", b"1", b"2", b"3"]
    assert told(last_event_id="1") == [b"2", b"3"]
    assert told(last_event_id="3") == []


@pytest.mark.parametrize("state", ["running", "waiting", "done"])
def test_events_of_an_epoch_come_when_it_is_over(
    service: Service, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """The epoch under way gets its held-out accuracy last, also when its job has to wait again."""
    classifier = create(service)
    held = queue.claim(service.database, "me", 1)
    assert held is not None
    epochs = [queue.Progress(10, 20, each, 4, 1.0, at=each, loss=0.5) for each in range(2)]
    queue.record(service.database, held, epochs)
    if state == "waiting":
        queue.release(service.database, held, 2, blameless=True)
    elif state == "done":
        queue.finish(service.database, held, "done", None, 2)
    as_bytes = own.event

    def stop_after_progress(name: str, *rest: Any) -> bytes:
        if name == "progress":
            service.stopping.set()
        return as_bytes(name, *rest)

    monkeypatch.setattr(own, "event", stop_after_progress)
    events = ask(service, f"GET /api/classifiers/{classifier}/events").body
    assert f'"state":"{state}"'.encode() in events
    sent = re.findall(rb"^id: (\d+)$", events, re.MULTILINE)
    assert sent == ([b"0", b"1"] if state == "done" else [b"0"])


def test_streams_of_events_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = create(service)
    path = f"GET /api/classifiers/{classifier}/events"
    monkeypatch.setattr(own, "STREAMS", 1)
    service.streams[keys.LOCAL] = 1
    refused = ask(service, path)
    assert (refused.code, refused.json["error"]) == (429, "Too many requests")
    service.streams[keys.LOCAL] = 0
    service.stopping.set()  # so that the stream ends
    assert ask(service, path).code == 200
    assert service.streams[keys.LOCAL] == 0


def test_streams_that_are_opened_at_once_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = create(service)  # its job waits, for ever
    path = f"GET /api/classifiers/{classifier}/events"
    monkeypatch.setattr(own, "STREAMS", 2)

    async def run() -> list[int]:
        asked = [asyncio.create_task(answer_to(service, path)) for _ in range(6)]
        async with asyncio.timeout(LIMIT_S):
            while sum(one.done() for one in asked) < 4:
                await asyncio.sleep(0.01)
        service.stopping.set()
        return sorted([(await one).code for one in asked])

    assert asyncio.run(run()) == [200, 200, 429, 429, 429, 429]
    assert service.streams.total() == 0


@pytest.mark.parametrize(("connections", "streams"), [(8, 1), (64, 8), (512, 64), (9_999, 64)])
def test_streams_of_a_tenant_leave_connections_for_others(
    connections: int, streams: int, tmp_path: Path
) -> None:
    with prepared(tmp_path / "data", connections=connections) as service:
        path = f"GET /api/classifiers/{create(service)}/events"
        service.stopping.set()  # so that streams end
        service.streams[keys.LOCAL] = streams - 1
        assert ask(service, path).code == 200
        service.streams[keys.LOCAL] = streams
        refused = ask(service, path)
        assert (refused.code, refused.headers["retry-after"]) == (429, "30")
        assert refused.json["description"].startswith(f"{streams} of your streams")


def test_a_stream_ends_when_its_token_expires(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"GET /api/classifiers/{create(service)}/events"  # its job waits, for ever
    key = keys.add_key(service.database, "team")
    keys.take_local(service.database, "team")
    token = keys.make_token(keys.key_hash(key), service.secret, time.time())
    as_bytes, sent = own.event, []

    def sent_once(name: str, *rest: Any) -> bytes:
        sent.append(name)
        monkeypatch.setattr(time, "time", lambda: now + keys.TOKEN_S)
        return as_bytes(name, *rest)

    now = time.time()
    monkeypatch.setattr(own, "event", sent_once)
    monkeypatch.setattr(own, "EVENTS_S", 0.01)
    answer = ask(service, path, authorization=f"Bearer {token}")
    assert (answer.code, sent) == (200, ["progress"])
    assert ask(service, path, authorization=f"Bearer {token}").code == 401


@pytest.mark.parametrize("kind", ["Bearer", "token", "none"])
def test_a_stream_ends_when_its_caller_is_no_longer_let_in(
    kind: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier, database = create(service), service.database  # its job waits, for ever
    headers = {}
    if kind != "none":
        key = keys.add_key(database, "team")
        keys.take_local(database, "team")
        shown = keys.make_token(keys.key_hash(key), service.secret, time.time())
        headers["authorization"] = f"Bearer {key if kind == 'Bearer' else shown}"
    as_bytes, sent = own.event, []

    def sent_once(name: str, *rest: Any) -> bytes:
        sent.append(name)
        if kind == "none":
            keys.add_key(database, "team")  # from the first key on, everybody needs one
        else:
            keys.revoke_key(database, key)
        return as_bytes(name, *rest)

    monkeypatch.setattr(own, "event", sent_once)
    monkeypatch.setattr(own, "EVENTS_S", 0.01)
    answer = ask(service, f"GET /api/classifiers/{classifier}/events", **headers)
    assert (answer.code, sent) == (200, ["progress"])
    assert ask(service, f"GET /api/classifiers/{classifier}/events", **headers).code == 401
    assert service.streams.total() == 0
