"""Many at once: connections, creates, deletes, and bodies that unpack to gigabytes.

Rows 34, 36, 43, 44, 45 and 47 of the specification's §12; ``test_service_bad_input.py`` lists all.
"""

from __future__ import annotations

import json
import resource
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import requests
from service_process import CSV, LIMIT_S, ServiceProcess

from slipstream.apps.service.deadlines import BODY_NBYTES_S

pytestmark = pytest.mark.process
CONNECTIONS = 2000
MIB = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    options = ("--rate", "1000000")
    with ServiceProcess(tmp_path_factory.mktemp("service") / "data", *options) as service:
        yield service


@pytest.fixture(autouse=True)
def nothing_left(service: ServiceProcess) -> Iterator[None]:
    """No classifier, no file, no process of a job."""
    yield
    for one in service.get("/v1/classifiers").json()["classifiers"]:
        delete(service, one["classifier_id"])
    for folder in ("classifiers", "incoming"):
        service.wait_for(lambda folder=folder: not list((service.data / folder).iterdir()))
    service.wait_for(lambda: not service.trainer().children())


def delete(service: ServiceProcess, classifier: str) -> int:
    url = f"{service.url}/v1/classifiers/{classifier}"
    return requests.delete(url, timeout=120).status_code


def at_once(count: int, act: Callable[[], requests.Response]) -> list[requests.Response]:
    together = threading.Barrier(count)

    def one(_: int) -> requests.Response:
        together.wait()
        return act()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


# ---- connections


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTIONS + 500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CONNECTIONS + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(service: ServiceProcess) -> socket.socket:
    where = urlsplit(service.url)
    return socket.create_connection((where.hostname, where.port), timeout=120)


def test_connections_that_do_nothing(service: ServiceProcess, many_files: None) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(service))
        for _ in range(3):
            assert service.get("/v1/classifiers").status_code == 200


def test_connections_beyond_the_limit(tmp_path: Path) -> None:
    """Each is in the middle of a request, so none can be closed for another."""
    half = (
        b"POST /v1/classifiers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        b'Content-Disposition: form-data; name="training_data"\r\n\r\n'
    )
    # So much of a body may come in minutes, so none ends before all are there.
    half += b"x" * int(LIMIT_S * BODY_NBYTES_S)
    with ServiceProcess(tmp_path / "data", "--connections", "8") as service:
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(connect(service)).sendall(half)
            service.wait_for(lambda: len(list((service.data / "incoming").iterdir())) == 8)
            connection = stack.enter_context(connect(service))
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503"), answer
        assert b"retry-after" in answer.lower()
        assert b"x-global-transaction-id" in answer.lower()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"] == "Service unavailable"
        service.wait_for(lambda: served(service))


def test_clients_that_do_not_read(tmp_path: Path) -> None:
    """Each has answers under way, and would keep its place for ever."""
    ask = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ServiceProcess(tmp_path / "data", "--connections", "20") as service:
        where = urlsplit(service.url)
        with ExitStack() as stack:
            for _ in range(20):
                wire = stack.enter_context(socket.socket())
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                wire.connect((where.hostname, where.port))
                wire.sendall(ask * 400)
                assert wire.recv(1)  # the answers, of 10 MB, have begun
            assert not served(service)
            service.wait_for(lambda: served(service))


def served(service: ServiceProcess) -> bool:
    with suppress(requests.ConnectionError):
        return service.get("/v1/classifiers").status_code == 200
    return False


# ---- bodies that unpack


def bomb(head: bytes, count: int) -> bytes:
    """Gzip of ``head`` and as many MiB of x; each block is the same, so it is packed once."""
    pack = zlib.compressobj(9, wbits=31)
    begin = pack.compress(head) + pack.flush(zlib.Z_FULL_FLUSH)
    return begin + (pack.compress(b"x" * MIB) + pack.flush(zlib.Z_FULL_FLUSH)) * count


def test_a_gzip_of_gigabytes(service: ServiceProcess) -> None:
    classifier = service.created()
    service.wait_status(classifier, "Available")
    process = psutil.Process(service.process.pid)
    part = b'--b\r\nContent-Disposition: form-data; name="training_data"\r\n\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": "gzip"}
    create = f"{service.url}/v1/classifiers"
    small = requests.post(create, data=bomb(part, 1), headers=kind, timeout=120)
    assert small.status_code == 400  # it ends too early; the code has been used once
    before = process.memory_info().rss
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
    sent = bomb(part, 10_000)
    assert len(sent) < 15 * MIB
    with suppress(requests.ConnectionError):  # closed while it was sent
        large = requests.post(create, data=sent, headers=kind, timeout=120)
        assert large.status_code == 413, large.text
    kind = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    text = bomb(b'{"text": "', 400)
    answer = requests.post(f"{create}/{classifier}/classify", data=text, headers=kind, timeout=120)
    assert answer.status_code == 413, answer.text
    peak = int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    assert peak * 1024 - before < 20 * MIB


# ---- creates and deletes


def test_classify_while_it_is_deleted(service: ServiceProcess) -> None:
    for _ in range(3):
        classifier = service.created()
        service.wait_status(classifier, "Available")
        codes: Counter[int] = Counter()
        begun, ended = threading.Event(), threading.Event()

        def ask(one: str = classifier, codes: Counter[int] = codes, begun=begun, ended=ended):
            while not ended.is_set():
                codes[service.get(f"/v1/classifiers/{one}/classify?text=hot").status_code] += 1
                begun.set()

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        begun.wait()
        assert delete(service, classifier) == 200
        service.wait_for(lambda codes=codes: codes[404] >= 4)
        ended.set()
        for asker in askers:
            asker.join()
        assert set(codes) == {200, 404}


def test_delete_and_create_in_a_loop(service: ServiceProcess) -> None:
    for _ in range(100):
        classifier = service.created()
        assert delete(service, classifier) == 200
    assert service.get("/v1/classifiers").json() == {"classifiers": []}


def test_creates_at_once_for_the_last_place(service: ServiceProcess) -> None:
    for _ in range(7):
        service.created()
    answers = at_once(8, service.create)
    found = Counter((one.status_code, one.json().get("error")) for one in answers)
    assert found == {(200, None): 1, (400, "Entitlement error"): 7}
    assert len(service.get("/v1/classifiers").json()["classifiers"]) == 8


def test_equal_idempotency_keys_at_once(service: ServiceProcess) -> None:
    key = {"Idempotency-Key": "at-once"}
    answers = at_once(10, lambda: service.create(CSV, **key))
    found = Counter((one.status_code, one.json().get("error")) for one in answers)
    assert found[200, None] >= 1
    assert set(found) <= {(200, None), (409, "Request under way")}
    [made] = service.get("/v1/classifiers").json()["classifiers"]
    ids = {one.json()["classifier_id"] for one in answers if one.status_code == 200}
    assert ids == {made["classifier_id"]}
    assert service.create(CSV, **key).json()["classifier_id"] == made["classifier_id"]
