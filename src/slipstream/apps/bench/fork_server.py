"""A process that loads torch and a workload once, and forks the workers of every trial.

Many processes on few cores would otherwise spend most of a comparison importing. It reads one
request per line from stdin, answers with a line that names the workers' processes, and writes
another one when some have ended. Each worker enters its network namespace, if it has one, and
communicates with the bench over a Unix socket. All workers end with this process, and it ends when
its stdin closes. On request it kills the workers of a trial: it reaps them, so only it knows
whether a number still belongs to a worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

NETNS_FOLDER = Path("/run/netns")
CLONE_NEWNET = 0x40000000
SET_DEATH_SIGNAL = 1


class Place(msgspec.Struct, frozen=True):
    """The place of a worker, and its environment."""

    env: dict[str, str]
    namespace: str | None = None


class Request(msgspec.Struct, frozen=True, tag=True):
    """A request for the workers of one trial; ``trial`` is a
    ``slipstream.apps.bench.trial.Trial``."""

    trial: msgspec.Raw
    places: list[Place]
    socket: str
    folder: str


class KillAll(msgspec.Struct, frozen=True, tag=True):
    """A request to kill all remaining workers and their children."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request: the workers' processes by rank."""

    pids: list[int]


class Reaped(msgspec.Struct, frozen=True, tag=True):
    """A message that workers have ended. From now on their numbers may be reused."""

    pids: list[int]


def serve(folder: str) -> None:
    """Fork on request until stdin closes; the bench has then ended, or was killed."""
    try:
        fork_on_request()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fork_on_request() -> None:
    preload()
    children: set[int] = set()
    text = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.05)
        reap(children)
        if not readable:
            continue
        more = os.read(0, 1 << 16)
        if not more:
            return
        text += more
        while b"\n" in text:
            line, _, text = text.partition(b"\n")
            request = msgspec.json.decode(line, type=Request | KillAll)
            if isinstance(request, Request):
                children |= fork_all(request)
            else:
                kill_all(children)


def preload() -> None:
    """Import what every worker would otherwise import, without starting a thread."""
    import torch
    import torch.distributed
    import torch.optim

    import slipstream.apps.bench.worker
    import slipstream.initialization

    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter]).step()
    assert slipstream.initialization
    assert slipstream.apps.bench.worker


def fork_all(request: Request) -> set[int]:
    from slipstream.apps.bench.trial import Trial, loaded

    # Data is read here, once for all workers and trials.
    trial = msgspec.json.decode(request.trial, type=Trial)
    loaded(trial)
    gc.collect()
    gc.freeze()  # workers must not collect shared objects
    pids = []
    for rank, place in enumerate(request.places):
        pid = os.fork()
        if pid == 0:
            become_worker(request, place, rank)
        pids.append(pid)
    answer(Started(pids))
    return set(pids)


def reap(children: set[int]) -> None:
    ended = {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
    if ended:
        children -= ended
        answer(Reaped(sorted(ended)))


def kill_all(children: set[int]) -> None:
    """Kill all children; this is safe, as numbers of unreaped children are not reused."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def answer(content: Started | Reaped) -> None:
    print(msgspec.json.encode(content).decode(), flush=True)


def become_worker(request: Request, place: Place, rank: int) -> NoReturn:
    """Become a worker, and never return: the worker ends with the trial."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        redirect(Path(request.folder) / f"rank{rank}.err")
        # Temporary files of a killed worker are removed with the trial's folder.
        os.environ |= place.env | {"TMPDIR": request.folder}
        if place.namespace is not None:
            enter(place.namespace)
        run(request, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def die_with_parent() -> None:
    """End this process when its parent ends, for any reason."""
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)


def redirect(errors: Path) -> None:
    """Close the input, and send all output to one file."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, nowhere), (1, file), (2, file)):
        os.dup2(source, target)


def enter(namespace: str) -> None:
    """Enter a network namespace, as ``ip netns exec`` does, in a process that runs already."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(NETNS_FOLDER / namespace, os.O_RDONLY)
    try:
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    finally:
        os.close(fd)


def run(request: Request, rank: int) -> None:
    from slipstream.apps.bench.trial import Trial, loaded
    from slipstream.apps.bench.worker import work

    trial = msgspec.json.decode(request.trial, type=Trial)
    with socket.socket(socket.AF_UNIX) as line, contextlib.closing(line.makefile("rwb")) as file:
        line.connect(request.socket)
        say = speaker(file, rank)
        say("here", None)

        def wait() -> None:
            if not file.readline():
                raise SystemExit("the bench that started this worker has ended")

        work(trial, loaded(trial), rank, len(request.places), say, wait)


def speaker(file: Any, rank: int) -> Callable[[str, Any], None]:
    def say(event: str, content: Any) -> None:
        file.write(msgspec.json.encode({"rank": rank, "event": event, "content": content}) + b"\n")
        file.flush()

    return say


if __name__ == "__main__":
    serve(sys.argv[1])
