"""A running service, and a connection to it: what the benchmarks of the service share."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from slipstream.runtime.launch.processes import Placement, inherited_environment, start_process

JSON = {"Content-Type": "application/json"}
LIMIT_S = 600.0


class Client:
    """One connection."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        self._connection.request(method, path, body or None, headers)
        answer = self._connection.getresponse()
        self.headers = answer.headers  # of the last answer
        return answer.status, json.loads(answer.read())

    def create(self, rows: bytes) -> str:
        part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = part % (b"training_metadata", b"{}") + part % (b"training_data", rows) + b"--b--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        code, made = self.send("POST", "/v1/classifiers", body, **kind)
        assert code == 200, made
        return str(made["classifier_id"])

    def wait(
        self,
        classifier: str,
        reached: Callable[[dict[str, Any]], bool],
        limit_s: float = LIMIT_S,
    ) -> dict[str, Any]:
        """The state of a classifier's job, once it is reached."""
        until = time.monotonic() + limit_s
        while not reached(state := self.send("GET", f"/api/classifiers/{classifier}")[1]):
            assert state["state"] in ("waiting", "running"), state
            assert time.monotonic() < until, state
            time.sleep(0.2)
        return state

    def classify(self, classifier: str, text: str) -> int:
        body = json.dumps({"text": text}).encode()
        return self.send("POST", f"/v1/classifiers/{classifier}/classify", body, **JSON)[0]

    def classify_collection(self, classifier: str, texts: list[str]) -> tuple[int, Any]:
        body = json.dumps({"collection": [{"text": text} for text in texts]}).encode()
        path = f"/v1/classifiers/{classifier}/classify_collection"
        return self.send("POST", path, body, **JSON)


@contextmanager
def serving(folder: Path, options: list[str]) -> Iterator[tuple[str, psutil.Process, float]]:
    """The service's address, its API process, and the seconds from its start until it is ready."""
    log = folder / "log"
    command = [sys.executable, "-m", "slipstream", "serve", "--data", str(folder / "data")]
    began = time.monotonic()
    with log.open("w") as out:  # the kernel kills it if this process is killed
        process = start_process(
            [*command, "--port", "0", *options],
            inherited_environment(),
            Placement(),
            stdout=out.fileno(),
            stderr=out.fileno(),
        )
    try:
        while not (found := re.search(r"ready at (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < began + LIMIT_S, log.read_text()
            time.sleep(0.01)
        url = found[1]
        assert Client(url).send("GET", "/livez")[0] == 200
        yield url, psutil.Process(process.pid), time.monotonic() - began
    finally:
        process.terminate()
        process.wait(60)
