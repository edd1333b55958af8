"""Random clients against a running service, whose processes are killed again and again.

    python benchmarks/service_soak.py [--minutes 60] [--clients 6] [--seed 0] [--json soak.json]

Each client creates, classifies, retrains, cancels and deletes classifiers of its own, and sends
garbage. Meanwhile one process at a time is killed with SIGKILL: a learner, the update server, the
trainer, or the API process, which is then started again. At the end all classifiers are deleted and
the service is stopped. What must hold, or the run ends with exit code 1:

- a classifier that was Available answers until it is deleted
- a trained classifier knows its own training texts
- no answer is a 5xx, but 503 with ``Retry-After``; refused input is a 4xx
- every job ends
- no process, file or row is left
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from service_client import JSON, Client

from slipstream.apps.bench.comparison import machine_facts
from slipstream.runtime.launch.processes import Placement, start_process

MARK = "SLIPSTREAM_SOAK_MARK"  # in the environment: finds the processes, whoever their parent is
KILL_EVERY_S = 20.0  # on average
AWAY_S = 90.0  # that the API may take to answer again after a kill
PURGE_S = 15.0  # that files of deleted classifiers may still be there
END_S = 900.0  # that all jobs may take to end when no client sends any more
CLASSIFIERS = 4  # that a client has at once
TABLES = ("classifiers", "versions", "jobs", "epochs", "purges")
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "glade", "heath", "inlet", "jetty")
LOST = (ConnectionError, http.client.HTTPException, TimeoutError, OSError)
GARBAGE = (
    b"",
    b"text without a class\n",
    b"\xff\xfe\x00broken",
    b'"never closed,class\n' * 3,
    b"one,a\ntwo,a\nthree,a\nfour,a\nfive,a\n",
    b"PK\x03\x04 a zip file",
)


class Violation(Exception):
    """Something that must hold does not."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Service:
    """``slipstream serve`` on one port, started again when it is killed."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.data, self._log = folder / "data", (folder / "serve.log").open("ab")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {**os.environ, MARK: secrets.token_hex(8)}
        self.keys = [self._add_key(f"client{number}") for number in range(clients)]
        self.process = self._start()

    def _add_key(self, name: str) -> str:
        command = [sys.executable, "-m", "slipstream", "keys", "add", name]
        made = subprocess.run(
            [*command, "--data", str(self.data)], capture_output=True, text=True, check=True
        )
        return next(word for word in made.stdout.split() if word.startswith("sk_"))

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "slipstream", "serve", "--data", str(self.data)]
        options = ["--port", str(self.port), "--epochs", "3", "--rate", "1000000"]
        log = self._log.fileno()
        return start_process([*command, *options], self._env, Placement(), stdout=log, stderr=log)

    def processes(self) -> list[psutil.Process]:
        """All that live: the API process and what it started."""
        return list(marked(f"{MARK}={self._env[MARK]}".encode()))

    def kill(self, chance: random.Random) -> str | None:
        """Kill one process; returns which kind, or None if there was none of the kind."""
        kind = chance.choice(("learner", "learner", "update server", "trainer", "api"))
        if kind == "api":
            self.process.kill()
            self.process.wait()
            self.process = self._start()
            return kind
        needle = {
            "learner": "slipstream.apps.service.learn",
            "update server": "slipstream.runtime.shared_memory.update_server",
            "trainer": "slipstream.apps.service.trainer",
        }[kind]
        found = [each for each in self.processes() if is_module(each, needle)]
        if not found:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            chance.choice(found).kill()
        return kind

    def wait_for_purges(self) -> None:
        """The trainer removes the files of deleted classifiers, once their processes have ended."""
        until = time.monotonic() + PURGE_S
        while self._rows_of("purges") and time.monotonic() < until:
            time.sleep(0.2)

    def _rows_of(self, table: str) -> int:
        with contextlib.closing(sqlite3.connect(self.data / "service.db")) as database:
            (rows,) = database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()
        return int(rows)

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def left(self) -> list[str]:
        """Processes, files and rows that should be gone."""
        until = time.monotonic() + 5
        while (processes := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        found = [f"process {each.pid} {each.name()}" for each in processes]
        for folder in ("classifiers", "incoming"):
            found += [str(path.relative_to(self.data)) for path in (self.data / folder).iterdir()]
        for table in TABLES:
            rows = self._rows_of(table)
            found += [f"{rows} rows of {table}"] if rows else []
        return found


def marked(needle: bytes) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes():
                yield process


def is_module(process: psutil.Process, name: str) -> bool:
    """Whether a process runs ``python -m NAME``; a launcher has the name further back."""
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
        return "-m" in command and command[command.index("-m") + 1] == name
    return False


class RandomClient:
    """One client: does one thing after the other until it is stopped, then deletes all."""

    def __init__(self, service: Service, number: int, seed: int, stop: threading.Event) -> None:
        self.name = f"client{number}"
        self._service, self._stop = service, stop
        self._chance = random.Random(f"{seed} {number}")
        basic = b64encode(f"apikey:{service.keys[number]}".encode()).decode()
        self._headers = {"Authorization": f"Basic {basic}"}
        self._own: dict[str, dict[str, list[str]]] = {}  # classes and their texts, by id
        self._available: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.violation: str | None = None

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                self._act()
            self._finish()
        except Exception as error:  # an answer that cannot be read is a fault, too
            self.violation = f"{self.name}: {error!r}"
            self._stop.set()

    def _act(self) -> None:
        actions: list[tuple[int, Callable[[], None]]] = [
            (30 if len(self._own) < CLASSIFIERS else 0, self._create),
            (20, self._send_garbage),
            (10, self._send_no_http),
        ]
        if self._own:
            one = self._chance.choice(list(self._own))
            actions += [
                (120, lambda: self._classify(one)),
                (40, lambda: self._look(one)),
                (3, lambda: self._retrain(one)),
                (2, lambda: self._cancel_and_retry(one)),
                (10, lambda: self._follow(one)),
                (2, lambda: self._delete(one)),  # seldom, so that most classifiers are trained
            ]
        weights = [weight for weight, _ in actions]
        self._chance.choices([action for _, action in actions], weights)[0]()
        self._stop.wait(self._chance.random() * 0.2)

    # ---- requests

    def _send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        """A request, again and again while the service is away."""
        until = time.monotonic() + AWAY_S
        while True:
            try:
                client = Client(self._service.url)
                code, answer = client.send(method, path, body, **self._headers, **headers)
                if code == 503 and "Retry-After" not in client.headers:
                    raise Violation(f"{method} {path}: 503 without Retry-After: {answer}")
            except LOST as error:
                code, answer = 0, repr(error)
            self.counts[f"{code}"] += 1
            if code not in (0, 503):
                break
            if time.monotonic() > until:
                raise Violation(f"{method} {path}: {code} for {AWAY_S:.0f} s: {answer}")
            time.sleep(0.3)
        if code >= 500:
            raise Violation(f"{method} {path}: {code}: {answer}")
        return code, answer

    def _upload(self, method: str, path: str, rows: bytes, **headers: str) -> tuple[int, Any]:
        part = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        body = part % (b"training_metadata", b"{}") + part % (b"training_data", rows) + b"--b--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=b"}
        return self._send(method, path, body, **kind, **headers)

    def _expect(self, found: tuple[int, Any], *codes: int) -> Any:
        if found[0] not in codes:
            raise Violation(f"{found}, expected {codes}")
        return found[1]

    # ---- actions

    def _texts(self) -> dict[str, list[str]]:
        """Some classes, each with words of its own."""
        names = self._chance.sample(WORDS, self._chance.randint(2, 5))
        rows = self._chance.randint(4, 30)
        return {
            name: [f"{name} {self._chance.choice(WORDS)} {name}{n % 7}" for n in range(rows)]
            for name in names
        }

    def _create(self) -> None:
        texts = self._texts()
        # A kill may hide an answer: the key lets the repeated request find the classifier.
        key = {"Idempotency-Key": f"{self._chance.getrandbits(64):x}"}
        found = self._upload("POST", "/v1/classifiers", csv_of(texts), **key)
        if found[0] == 429:  # the queue is full
            return
        if found[0] == 409:  # the first request is still under way
            time.sleep(1)
            found = self._upload("POST", "/v1/classifiers", csv_of(texts), **key)
        self._own[self._expect(found, 200)["classifier_id"]] = texts
        self.counts["created"] += 1

    def _look(self, one: str) -> None:
        status = self._expect(self._send("GET", f"/v1/classifiers/{one}"), 200)["status"]
        if one in self._available and status != "Available":
            raise Violation(f"{one} was Available and is {status}")
        if status == "Available" and one not in self._available:
            self._available.add(one)
            self.counts["trained"] += 1

    def _classify(self, one: str) -> None:
        name = self._chance.choice(list(self._own[one]))
        texts = self._chance.choices(self._own[one][name], k=self._chance.randint(1, 30))
        body = json.dumps({"collection": [{"text": text} for text in texts]}).encode()
        path = f"/v1/classifiers/{one}/classify_collection"
        found = self._send("POST", path, body, **JSON)
        answer = self._expect(found, *((200,) if one in self._available else (200, 409)))
        if found[0] == 200:
            right = sum(each["top_class"] == name for each in answer["collection"])
            self.counts["phrases"] += len(texts)
            self.counts["right phrases"] += right

    def _retrain(self, one: str) -> None:
        """More rows of the same classes: what was known stays known."""
        found = self._upload("PUT", f"/api/classifiers/{one}/data", csv_of(self._own[one]))
        if self._expect(found, 200, 409, 429) and found[0] == 200:
            self.counts["retrained"] += 1
        versions = self._expect(self._send("GET", f"/api/classifiers/{one}/versions"), 200)
        for version in versions["versions"]:
            if version["trained"] and not version["active"] and self._chance.random() < 0.5:
                path = f"/api/classifiers/{one}/versions/{version['number']}/activate"
                self._expect(self._send("POST", path), 200, 404, 409)

    def _cancel_and_retry(self, one: str) -> None:
        self._expect(self._send("POST", f"/api/classifiers/{one}/cancel"), 200)
        self._expect(self._send("POST", f"/api/classifiers/{one}/retry"), 200, 409, 429)
        self.counts["cancelled"] += 1

    def _follow(self, one: str) -> None:
        """Read some events, and go."""
        with contextlib.suppress(*LOST):
            where = urlsplit(self._service.url)
            stream = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5)
            stream.request("GET", f"/api/classifiers/{one}/events", headers=self._headers)
            stream.getresponse().read1(200)
            stream.close()

    def _delete(self, one: str) -> None:
        self._available.discard(one)
        self._own.pop(one)
        # A repeated DELETE finds nothing if the first one's answer was lost in a kill.
        self._expect(self._send("DELETE", f"/v1/classifiers/{one}"), 200, 404)
        self._expect(self._send("GET", f"/v1/classifiers/{one}"), 404)
        self.counts["deleted"] += 1

    def _send_garbage(self) -> None:
        rows = self._chance.choice(GARBAGE)
        self._expect(self._upload("POST", "/v1/classifiers", rows), 400)
        bad = self._chance.choice((b"{", b"[" * 10_000, b'{"text": 5}', b"\xff"))
        path = f"/v1/classifiers/{'0' * 6}x{'0' * 10}-nlc-1/classify"
        self._expect(self._send("POST", path, bad, **JSON), 400, 404)

    def _send_no_http(self) -> None:
        """Bytes that are no request, or half of one; the connection is then closed."""
        with (
            contextlib.suppress(*LOST),
            socket.create_connection(("127.0.0.1", self._service.port), timeout=5) as wire,
        ):
            wire.sendall(self._chance.randbytes(self._chance.randint(1, 5000)))
            wire.sendall(b"POST /v1/classifiers HTTP/1.1\r\nContent-Length: 99\r\n\r\nhalf")

    def _finish(self) -> None:
        """Every job ends; then all is deleted."""
        until = time.monotonic() + END_S
        for one in list(self._own):
            while self._expect(self._send("GET", f"/api/classifiers/{one}"), 200)["state"] in (
                "waiting",
                "running",
            ):
                if time.monotonic() > until:
                    raise Violation(f"the job of {one} does not end")
                time.sleep(1)
            self._look(one)
            self._classify_if_available(one)
            self._delete(one)
        listed = self._expect(self._send("GET", "/v1/classifiers"), 200)["classifiers"]
        for each in listed:  # whose answer never came: a kill, and then a 429 for the repetition
            self._own[each["classifier_id"]] = {}
            self._delete(each["classifier_id"])

    def _classify_if_available(self, one: str) -> None:
        if one in self._available:
            self._classify(one)


def csv_of(texts: dict[str, list[str]]) -> bytes:
    lines = (f"{text},{name}\n" for name, own in texts.items() for text in own)
    return "".join(lines).encode()


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    service = Service(folder, args.clients)
    try:
        return run_clients(service, args)
    finally:
        service.process.kill()


def run_clients(service: Service, args: argparse.Namespace) -> dict[str, Any]:
    chance, stop, kills = random.Random(args.seed), threading.Event(), Counter[str]()
    clients = [RandomClient(service, n, args.seed, stop) for n in range(args.clients)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60 * args.minutes
    memory = []
    while time.monotonic() < until and not stop.wait(chance.expovariate(1 / KILL_EVERY_S)):
        if kind := service.kill(chance):
            kills[kind] += 1
        with contextlib.suppress(psutil.Error):
            memory.append(psutil.Process(service.process.pid).memory_info().rss / (1 << 20))
        print(f"{(until - time.monotonic()) / 60:5.1f} min left, kills {dict(kills)}", flush=True)
    stop.set()
    for thread in threads:
        thread.join(END_S + 60)
    violations = [client.violation for client in clients if client.violation]
    violations += ["a client does not end" for thread in threads if thread.is_alive()]
    service.wait_for_purges()
    code = service.stop()
    violations += [f"the service ended with {code}"] if code else []
    counts = sum((client.counts for client in clients), Counter[str]())
    if counts["right phrases"] < 0.99 * counts["phrases"]:
        violations.append("less than 99% of the training texts are known")
    return {
        "machine": machine_facts(),
        "minutes": args.minutes,
        "seed": args.seed,
        "kills": dict(kills),
        "counts": dict(sorted(counts.items())),
        "most_api_mib": max(memory, default=0.0),
        "violations": violations,
        "left": service.left() if not violations else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
        if found["violations"] or found["left"]:
            print((Path(folder) / "serve.log").read_text()[-5000:])
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(bool(found["violations"] or found["left"]))


if __name__ == "__main__":
    main()
