"""Commands that start whole jobs, such as ``slipstream run`` or ``torchrun``, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from remains import Remains

LIMIT_S = 180.0
BIN = Path(sys.executable).parent
SLIPSTREAM = str(BIN / "slipstream")
TORCHRUN = str(BIN / "torchrun")
# Torch's compiler would be half of the time in which a worker starts; see there.
LIGHT = str(Path(__file__).parents[1] / "light")
# A job's environment is its own, whatever the tests themselves were started with.
OURS = ("SLIPSTREAM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


class Launch:
    """A running command, in a folder of its own where it leaves marks and output."""

    def __init__(
        self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.remains = Remains()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        given = {"OMP_NUM_THREADS": "1", **inherited, **self.remains.mark, **(env or {})}
        if "bench" not in command:  # which imports torch once for all its workers, and all of it
            given["PYTHONPATH"] = os.pathsep.join(filter(None, (LIGHT, given.get("PYTHONPATH"))))
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

        self._ended = threading.Event()
        self._end = self._moment = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self.process.wait()
        self._end = time.monotonic()
        self._ended.set()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; a command that takes too long is ended and fails the test."""
        if not self._ended.wait(limit_s):
            self.close()
            pytest.fail(f"still running after {limit_s:.0f} s:\n{self.stdout}{self.stderr}")
        return self.process.returncode

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def note_moment(self) -> None:
        self._moment = time.monotonic()

    @property
    def lasted_s(self) -> float:
        """From the noted moment to the end."""
        return self._end - self._moment

    @property
    def stdout(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def own_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("slipstream:")]

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def close(self) -> None:
        if not self._ended.is_set():
            self.process.kill()
            self._ended.wait()
        self.remains.clear()


def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.02)
