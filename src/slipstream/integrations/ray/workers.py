"""A worker on Ray: its variables and its actor; for ``run`` and for Ray Train."""

from __future__ import annotations

import atexit
import os
import pickle
import secrets
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from slipstream.errors import (
    ConfigError,
    LaunchError,
    LeftBehind,
    PeerFailed,
    PeerLost,
    RuntimeFault,
    SlipstreamError,
)
from slipstream.job_end import end_open_jobs
from slipstream.methods import SharedMemoryUpdates
from slipstream.runtime.launch.processes import WORKER_VARIABLES
from slipstream.runtime.process.environment import LOOPBACK, is_loopback
from slipstream.runtime.process.error_reporting import location
from slipstream.strategy import Strategy
from slipstream.systems import parse

CAUSED = (PeerLost, PeerFailed, LeftBehind)  # errors of a worker that another one has caused
_listeners: list[socket.socket] = []  # of rank 0, open until the store uses it


def checked(strategy: Strategy | str | None, *, several: bool = True) -> Strategy | None:
    """Return a strategy that workers on Ray can have; None: the training function names it.

    Args:
        several: True if there may be more than one worker.

    Raises:
        ConfigError: It is no strategy, or one of several learners that share memory.
    """
    chosen = parse(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, Strategy | None):
        raise ConfigError(
            f"strategy={strategy!r}: give a strategy, such as slipstream.push_pull(), or its text"
        )
    if several and chosen is not None and isinstance(chosen.method, SharedMemoryUpdates):
        raise ConfigError(
            f"{chosen.name} with several workers needs `slipstream run` on one machine, which "
            "starts learners again and holds their memory: use that, or another strategy on Ray"
        )
    return chosen


def settings_of(strategy: Strategy | None) -> dict[str, str]:
    """Return the variables that are the same on all workers of a new job, with a new secret."""
    variables = {} if strategy is None else {"SLIPSTREAM_STRATEGY": strategy.to_json()}
    return {"SLIPSTREAM_SECRET": secrets.token_hex(32), **variables}


def environments(
    nodes: Sequence[str], address: tuple[str, int], settings: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables of every worker, by rank.

    Args:
        nodes: The id of every rank's node. Several nodes may have one address.
        address: The address at which rank 0 listens.
        settings: The variables that are the same on all workers.
    """
    shared_by, before = Counter(nodes), Counter[str]()
    by_rank = []
    for rank, node in enumerate(nodes):
        own = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": before[node],
            "LOCAL_WORLD_SIZE": shared_by[node],
            "MASTER_ADDR": address[0],
            "MASTER_PORT": address[1],
        }
        by_rank.append({name: str(value) for name, value in own.items()} | dict(settings))
        before[node] += 1
    return by_rank


# ---- in the worker's process


def node_id() -> str:
    """Return the id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def listen(one_node: bool) -> tuple[str, int]:
    """Bind the job's socket in rank 0's process, so that no other program gets its port.

    Like that of ``slipstream run`` it does not listen yet: torch may open the store first.

    Args:
        one_node: True if all workers are on this node; other hosts cannot reach the socket then.
    """
    host = str(ray.util.get_node_ip_address())
    if one_node or is_loopback(host):
        host = LOOPBACK
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"rank 0 cannot listen on its node's address {host}: {error.strerror}; start Ray with "
            "an address of this host (ray start --node-ip-address)"
        ) from error
    _listeners.append(listener)
    return host, int(listener.getsockname()[1])


def set_environment(variables: Mapping[str, str]) -> None:
    """Make this process the worker that the variables describe, whatever its parent was."""
    for name in (*WORKER_VARIABLES, "SLIPSTREAM_INCARNATION"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    if variables["RANK"] == "0" and _listeners:
        os.environ["SLIPSTREAM_STORE_FD"] = str(_listeners.pop().detach())


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a worker's function: its result, or its error and the line that raised it."""

    result: Any = None
    error: Exception | None = None
    where: str = ""


class AsScript:
    """A block that ends as a script does: with ``sys.exit()``, and with jobs that it left open.

    It is no generator, since the line of an error would then be one of contextlib.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        exited = isinstance(error, SystemExit) and not error.code
        try:
            end_open_jobs(None if exited else error)
        except BaseException as late:
            end_open_jobs(late)
            raise
        return exited


def failed(raised: BaseException, reported: Exception) -> Outcome:
    """Return the outcome of a function that raised; the driver raises ``reported``."""
    sys.last_value = raised  # for exit handlers, as after a script's error
    return Outcome(error=reported, where=where_of(raised))


def train(fn: Callable[[], Any], variables: Mapping[str, str], returns: Any = None) -> Outcome:
    """Call the function as the worker that the variables describe.

    Args:
        returns: The actor that records restarted workers which have rejoined.
    """
    set_environment(variables)
    if returns is not None:
        notify_return(int(variables["RANK"]), returns)
    result = None
    try:
        with AsScript():
            result = fn()
        return Outcome(result)
    except Exception as error:
        return failed(error, portable(error))
    except SystemExit as end:
        return failed(end, RuntimeFault(f"exited: {end.code}"))


def run_exit_handlers() -> None:
    """Run the exit handlers of this process; Ray kills actors without doing so.

    The actor does not exit for that: Ray counts it as ended before the handlers have run, and
    nobody could wait for them.
    """
    atexit._run_exitfuncs()


class Worker:
    """The actor of one worker; functions run in its main thread, one after the other."""

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the actor's process."""
        return fn(*args)


class Returns:
    """An actor with the ranks that were started again and have rejoined the job."""

    def __init__(self) -> None:
        self._rejoined: list[int] = []

    def note(self, rank: int) -> None:
        """Record that a worker has rejoined."""
        self._rejoined.append(rank)

    def back(self) -> list[int]:
        """Return the ranks of all workers that have rejoined."""
        return self._rejoined


def notify_return(rank: int, returns: Any) -> None:
    """Report to ``returns`` when this worker, which was started again, has rejoined the job."""
    reader, writer = os.pipe()
    os.environ["SLIPSTREAM_BACK_FD"] = str(writer)

    def await_return() -> None:
        with os.fdopen(reader, "rb") as pipe:
            if pipe.read(1):
                returns.note.remote(rank)

    threading.Thread(target=await_return, name="slipstream return", daemon=True).start()


def portable(error: Exception) -> Exception:
    """Return the error, or one with its text if the driver could not decode it."""
    try:
        pickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return RuntimeFault(f"{type(error).__qualname__}: {error}")
    return error


def where_of(error: BaseException) -> str:
    """Return the line of the user's code for slipstream's own errors; a traceback for others."""
    if isinstance(error, SlipstreamError):
        return location(error, error.__traceback__).strip()
    return "".join(traceback.format_exception(error)).strip()
