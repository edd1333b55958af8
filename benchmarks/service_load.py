"""A service under load: answers while it trains, its memory, and how fast it starts.

    python benchmarks/service_load.py [--seconds 60] [--connections 4] [--json load.json]

Starts ``slipstream serve`` on a free port and a temporary directory. One classifier is trained on
``--csv``; then a job of ``--rows`` made-up rows trains for as long as requests are sent:

- one phrase a request, one after the other: milliseconds, p50 and p95
- one phrase a request, on several connections, as fast as answers come: requests a second
- 30 phrases a request, 500 phrases a second in all: codes, and how much the API's memory grows

Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from slipstream.bench.comparison import machine_facts

TRIPS = Path(__file__).parents[1] / "examples" / "trips.csv"
COLLECTION = 30
PHRASES_S = 500
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
        return answer.status, json.loads(answer.read())

    def create(self, rows: bytes) -> str:
        part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = part % (b"training_metadata", b"{}") + part % (b"training_data", rows) + b"--b--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        code, made = self.send("POST", "/v1/classifiers", body, **kind)
        assert code == 200, made
        return str(made["classifier_id"])

    def wait(self, classifier: str, reached: Callable[[dict[str, Any]], bool]) -> None:
        until = time.monotonic() + LIMIT_S
        while not reached(state := self.send("GET", f"/api/classifiers/{classifier}")[1]):
            assert state["state"] in ("waiting", "running"), state
            assert time.monotonic() < until, state
            time.sleep(0.2)

    def classify(self, classifier: str, text: str) -> int:
        body = json.dumps({"text": text}).encode()
        return self.send("POST", f"/v1/classifiers/{classifier}/classify", body, **JSON)[0]

    def classify_collection(self, classifier: str, texts: list[str]) -> int:
        body = json.dumps({"collection": [{"text": text} for text in texts]}).encode()
        path = f"/v1/classifiers/{classifier}/classify_collection"
        return self.send("POST", path, body, **JSON)[0]


@contextmanager
def serving(folder: Path, options: list[str]) -> Iterator[tuple[str, psutil.Process, float]]:
    """The service's address, its API process, and the seconds from its start until it is ready."""
    log = folder / "log"
    command = [sys.executable, "-m", "slipstream.cli", "serve", "--data", str(folder / "data")]
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", "0", *options], stdout=out, stderr=out)
    try:
        while not (found := re.search(r"ready at (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        url = found[1]
        while Client(url).send("GET", "/livez")[0] != 200:
            time.sleep(0.01)
        yield url, psutil.Process(process.pid), time.monotonic() - began
    finally:
        process.terminate()
        process.wait(60)


def made_up(rows: int) -> bytes:
    """Rows of five of 5,000 words, in 50 classes."""
    chance = random.Random(0)
    lines = (
        " ".join(f"word{chance.randrange(5000)}" for _ in range(5)) + f",class {number % 50}"
        for number in range(rows)
    )
    return "\n".join(lines).encode()


def one_by_one(client: Client, ask: Callable[[Client], int], seconds: float) -> dict[str, float]:
    took = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        assert ask(client) == 200
        took.append(1000 * (time.monotonic() - began))
    hundredths = statistics.quantiles(took, n=100)
    return {"requests": len(took), "p50_ms": hundredths[49], "p95_ms": hundredths[94]}


def together(
    url: str, ask: Callable[[Client], int], seconds: float, connections: int, every_s: float
) -> dict[str, Any]:
    """Ask on several connections; each begins a request ``every_s`` after the last, or later."""
    codes: Counter[int] = Counter()
    until = time.monotonic() + seconds

    def work() -> None:
        client, due = Client(url), time.monotonic()
        while (now := time.monotonic()) < until:
            if now < due:
                time.sleep(due - now)
            due = max(due + every_s, now - every_s)
            codes[ask(client)] += 1

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests_s = sum(codes.values()) / (time.monotonic() - began)
    return {"requests_s": requests_s, "codes": {str(code): codes[code] for code in codes}}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, ask, and look at the memory."""
    mib = 1 << 20
    found: dict[str, Any] = {"machine": machine_facts()}
    with serving(folder, ["--epochs", str(args.epochs), "--rate", "10000000"]) as (url, api, start):
        found["start_to_ready_s"] = start
        found["api_mib_at_start"] = api.memory_info().rss / mib
        client = Client(url)
        small = client.create(args.csv.read_bytes())
        client.wait(small, lambda state: state["state"] == "done")
        large = client.create(made_up(args.rows))
        client.wait(large, lambda state: state["updates"] > 0)
        texts = [line.rpartition(",")[0] for line in args.csv.read_text().splitlines()]

        def one(client: Client) -> int:
            return client.classify(small, random.choice(texts))

        def many(client: Client) -> int:
            return client.classify_collection(small, random.choices(texts, k=COLLECTION))

        found["one_phrase"] = one_by_one(client, one, args.seconds / 4)
        found["phrases"] = together(url, one, args.seconds / 4, args.connections, 0.0)
        before = api.memory_info().rss
        every_s = args.connections * COLLECTION / PHRASES_S
        paced = together(url, many, args.seconds, args.connections, every_s)
        paced["phrases_s"] = COLLECTION * paced.pop("requests_s")
        paced["memory_grows_mib"] = (api.memory_info().rss - before) / mib
        found["collections"] = paced
        found["api_mib_at_end"] = api.memory_info().rss / mib
        found["job"] = client.send("GET", f"/api/classifiers/{large}")[1]
        found["trained_all_the_time"] = found["job"]["state"] == "running"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--csv", type=Path, default=TRIPS)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
