"""A real ``slipstream serve`` for tests, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
import requests
from launches import LIGHT

STAND_IN = Path(__file__).parent / "service_stand_in"
PACED = Path(__file__).parent / "service_paced"
LIMIT_S = 200.0  # below the limit of one test
ENDS = ("Available", "Failed", "Unavailable")
CSV = "".join(
    f"{text},{name}\n"
    for text, name in [
        ("is it hot outside", "temperature"),
        ("will it rain today", "conditions"),
        ("how hot is it", "temperature"),
        ("is it windy", "conditions"),
        ("what is the temperature", "temperature"),
        ("is snow expected", "conditions"),
    ]
)


def environment(real: bool = False) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": LIGHT if real else str(STAND_IN)}


class ServiceProcess:
    """Starts on entering, ends on leaving."""

    def __init__(
        self,
        data: Path,
        *options: str,
        real: bool = False,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.data = data
        self.options = options
        self.env = {**environment(real), **(env or {})}
        self.url = ""
        self.log = log or data.parent / f"{data.name}.log"
        self._hold = self.log.with_suffix(".hold")
        self.env["SERVICE_HOLD"] = str(self._hold)

    def __enter__(self) -> ServiceProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        command = [sys.executable, "-m", "slipstream", "serve", "--data", str(self.data)]
        options = ["--port", "0", "--epochs", "2", "--learners", "1", *self.options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options], stdout=log, stderr=log, env=self.env
            )
        found = self.wait_for(lambda: re.search(r"ready at (http://\S+)", self.log.read_text()))
        self.url = found[1]

    def wait_for(self, condition):
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            if found := condition():
                return found
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"waited {LIMIT_S} s\n{self.told()}")

    def told(self) -> str:
        """The end of its log, without the requests of those who wait."""
        lines = self.log.read_text().splitlines()
        return "\n".join([line for line in lines if " GET " not in line][-40:])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def trainer(self) -> psutil.Process:
        def find() -> psutil.Process | None:
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "slipstream.apps.service.trainer" in process.cmdline():
                        return process
            return None

        return self.wait_for(find)

    def create(self, csv: str = CSV, **headers: str) -> requests.Response:
        parts = {"training_metadata": (None, '{"name": "w"}'), "training_data": (None, csv)}
        return requests.post(f"{self.url}/v1/classifiers", files=parts, headers=headers, timeout=60)

    def created(self, csv: str = CSV) -> str:
        answer = self.create(csv)
        assert answer.status_code == 200, answer.text
        return answer.json()["classifier_id"]

    def get(self, path: str, **more: object) -> requests.Response:
        return requests.get(self.url + path, timeout=30, **more)

    def hold(self, percent: int) -> None:
        """Jobs of the stand-in go on to this percent, and wait there until ``go()``; real ones with
        ``PACED`` on their path train slowly until then."""
        self._hold.write_text(str(percent))

    def go(self) -> None:
        self._hold.unlink(missing_ok=True)

    def training(self, percent: int = 30) -> str:
        """A classifier whose job is at this percent, and waits."""
        self.hold(percent)
        classifier = self.created()
        self.reaches(classifier, percent)
        return classifier

    def reaches(self, classifier: str, percent: int) -> None:
        self.wait_for(lambda: self.state(classifier)["percent"] >= percent)

    def state(self, classifier: str) -> dict:
        return self.get(f"/api/classifiers/{classifier}").json()

    def wait_status(self, classifier: str, *wanted: str) -> str:
        """Wait for one of these; another end fails at once, and says why it came to that."""

        def reached() -> str | None:
            shown = self.get(f"/v1/classifiers/{classifier}").json()
            status = shown["status"]
            if status in wanted:
                return status
            if status in ENDS:
                log = self.get(f"/api/classifiers/{classifier}/log").text[-3000:]
                said = f"{status}: {shown['status_description']}\n{log}\n{self.told()}"
                raise AssertionError(said)
            return None

        return self.wait_for(reached)

    def process_maps(self) -> str:
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
