"""Connections that send nothing, or too slowly, end; the others are served meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest
from service_process import ServiceProcess

pytestmark = pytest.mark.process
HEAD = b"POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\n"
BODY = HEAD + b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 900000\r\n\r\n"
BODY += b'--b\r\nContent-Disposition: form-data; name="training_data"\r\n\r\n'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    data = tmp_path_factory.mktemp("service") / "data"
    with ServiceProcess(data, "--connections", "64") as service:
        yield service


def connect(service: ServiceProcess) -> socket.socket:
    where = urlsplit(service.url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


def answer_to(service: ServiceProcess, sent: bytes, drip: bool) -> bytes:
    got = b""
    with connect(service) as connection, suppress(ConnectionError):
        connection.sendall(sent)
        while drip:  # a byte a second, until the other side has had enough
            connection.settimeout(1)
            try:
                got += connection.recv(65536)
                break
            except TimeoutError:
                connection.sendall(b"x")
        connection.settimeout(60)
        while block := connection.recv(65536):
            got += block
    return got


def test_slow_requests(service: ServiceProcess) -> None:
    cases = [(b"", False), (HEAD, False), (HEAD + b"X: ", True), (BODY, False), (BODY, True)]
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: answer_to(service, *case), cases))
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 408"), answers
        assert b'"error":"Request timeout"' in answer
        number = answer.split(b"X-Global-Transaction-Id: ")[1][:32].decode()
        assert f"{number} Request timeout" in service.log.read_text()
    service.wait_for(lambda: not list((service.data / "incoming").iterdir()))


def test_silent_connections_make_room(service: ServiceProcess) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(service))
        assert service.get("/v1/classifiers").status_code == 200
