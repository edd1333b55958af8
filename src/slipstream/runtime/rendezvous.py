"""How members find each other: torch's TCPStore, every value signed with the job's key."""

from __future__ import annotations

import errno
import itertools
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from torch import distributed

from slipstream.errors import LaunchError, PeerFailed, SecretError, WaitLimit
from slipstream.runtime.environment import Environment, resolves_to_loopback
from slipstream.transports.credentials import Credentials

SIGNATURE_BYTES = 32
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1
TRY_S = 2.0
T = TypeVar("T")
# By what they say there: where all ranks meet.
TOGETHER = {
    "share": "job.share",
    "flushed": "job.flush",
    "ended": "the end of the `with` block",
    "save": "job.save",
    "load": "job.load",
}

# A process may run several jobs one after the other, but its port can be listened on only once.
_jobs = itertools.count()
_stores: dict[tuple[str, int], Any] = {}


class Rendezvous:
    """A signed blackboard that all ranks share; readers wait, within a limit."""

    def __init__(self, env: Environment, *, limit_s: float) -> None:
        self.limit_s = limit_s
        self._env = env
        self._watch: Callable[[], None] = lambda: None
        self.lost: Collection[str] = ()  # who is not waited for
        self.store = distributed.PrefixStore(
            f"slipstream/{env.attempt}/{next(_jobs)}", open_store(env, limit_s)
        )
        job = env.job or self._shared_random("job")
        secret = env.secret or self._shared_random("token").encode()
        self.credentials = Credentials(secret, job, env.encrypts)

    def _shared_random(self, key: str) -> str:
        """A random text that rank 0 makes up and everybody reads."""
        if self._env.rank == 0:
            self.store.set(key, secrets.token_hex(32))
        self._wait({key: "rank 0"})
        return bytes(self.store.get(key)).decode()

    def watch(self, check: Callable[[], None]) -> None:
        """Call this while waiting; it raises when the job has failed."""
        self._watch = check

    @contextmanager
    def watched(self, check: Callable[[], None]) -> Iterator[None]:
        """The same, within the block."""
        before, self._watch = self._watch, check
        try:
            yield
        finally:
            self._watch = before

    def _wait(self, whom: Mapping[str, str]) -> None:
        """Until all keys are there; ``whom`` says who posts which."""
        deadline = time.monotonic() + self.limit_s
        pause_s = SHORTEST_PAUSE_S
        while not self._has([key for key, name in whom.items() if name not in self.lost]):
            self._watch()
            if time.monotonic() > deadline:
                missing = [name for key, name in whom.items() if not self._has([key])]
                raise WaitLimit(waiting_for(next(iter(whom))), self.limit_s, missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _has(self, keys: list[str]) -> bool:
        try:
            return bool(self.store.check(keys))
        except distributed.DistError as error:
            self._watch()
            raise PeerFailed("rank 0", "its store closed") from error

    def post(self, key: str, value: object) -> None:
        content = msgspec.msgpack.encode(value)
        signed: Any = self.credentials.sign(key.encode() + content) + content
        self.store.set(key, signed)  # takes bytes, whatever its stub says

    def read(self, key: str, rank: int, kind: type[T]) -> T:
        """What a rank posted under a key."""
        self._wait({key: f"rank {rank}"})
        raw = bytes(self.store.get(key))
        signature, content = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        if not self.credentials.genuine(key.encode() + content, signature):
            raise SecretError(
                f"rank {rank} and rank {self._env.rank} were given different job secrets: "
                "set SLIPSTREAM_SECRET (or the secret file) to the same text everywhere"
            )
        return msgspec.msgpack.decode(content, type=kind)

    def is_first(self, key: str) -> bool:
        """Whether no rank has asked this before; each asks once."""
        try:
            return int(self.store.add(key, 1)) == 1
        except distributed.DistError:
            return True  # nobody can tell any more

    def gather(self, key: str, value: object, kind: type[T]) -> list[T]:
        """Everybody's value, by rank; every rank must call it with the same key.

        Who is lost is left out.
        """
        self.post(f"{key}/{self._env.rank}", value)
        ranks = range(self._env.world_size)
        self._wait({f"{key}/{rank}": f"rank {rank}" for rank in ranks})
        here = [rank for rank in ranks if f"rank {rank}" not in self.lost]
        return [self.read(f"{key}/{rank}", rank, kind) for rank in here]


def waiting_for(key: str) -> str:
    """What a wait for a key is a wait for, to people."""
    if key in ("job", "token") or key.startswith("address/"):
        return (
            "all ranks to join (a job secret has to be set on all of them or on none, and "
            "WORLD_SIZE workers have to be started)"
        )
    said = key.partition("/")[0]
    if said in TOGETHER:
        return f"all ranks in {TOGETHER[said]}, which every rank comes to at the same step"
    return f"all ranks to say their {said!r}"


def open_store(env: Environment, limit_s: float) -> Any:
    """Join the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it unless torchrun does."""
    place = (env.master_addr, env.master_port)
    if place not in _stores:
        _stores[place] = connect_store(env, limit_s)
    return _stores[place]


def connect_store(env: Environment, limit_s: float) -> Any:
    if env.rank == 0 and not env.agent_store:
        return make_store(env, limit_s, listening_fd(env))
    # On a thread: torch's limit does not cover a rank 0 that listens but never answers.
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            outcome.put(reach_store(env, limit_s))
        except Exception as error:
            outcome.put(error)

    thread = threading.Thread(target=connect, name="slipstream store", daemon=True)
    thread.start()
    try:
        store = outcome.get(timeout=limit_s + LONGEST_PAUSE_S)
    except queue.Empty:
        # If torch gave up while Python ends, it would take the process down with it.
        thread.join(2 * TRY_S)
        raise unreachable(env, limit_s) from None
    if isinstance(store, Exception):
        raise store
    return store


def reach_store(env: Environment, limit_s: float) -> Any:
    """Try until rank 0 answers or the time is up."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            # By ourselves first: torch fills the terminal when nobody listens.
            left_s = max(LONGEST_PAUSE_S, deadline - time.monotonic())
            socket.create_connection((env.master_addr, env.master_port), left_s).close()
            store = make_store(env, TRY_S)
        except (OSError, distributed.DistError) as error:
            if time.monotonic() > deadline:
                raise unreachable(env, limit_s) from error
            time.sleep(LONGEST_PAUSE_S)
        else:
            store.set_timeout(timedelta(seconds=limit_s))
            return store


def unreachable(env: Environment, limit_s: float) -> LaunchError:
    return LaunchError(
        f"rank {env.rank} cannot reach rank 0 at {env.master_addr}:{env.master_port} within "
        f"{limit_s:.0f} s; check that rank 0 runs and that MASTER_ADDR and MASTER_PORT are its",
        missing=["rank 0"],
    )


def make_store(env: Environment, limit_s: float, listening: int | None = None) -> Any:
    return distributed.TCPStore(
        env.master_addr,
        env.master_port,
        None,
        is_master=listening is not None,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def listening_fd(env: Environment) -> int:
    """A socket for the store, on loopback only where all ranks are on one host."""
    if env.store_fd is not None:
        os.set_inheritable(env.store_fd, False)
        return env.store_fd
    try:
        # A host's own name may stand for loopback, where no other host gets through.
        host = env.listen_host() if resolves_to_loopback(env.master_addr) else env.master_addr
        return bound_fd(host, env.master_port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            # MASTER_ADDR may be a name that forwards to this host.
            return bound_fd(env.listen_host(), env.master_port)
        raise LaunchError(
            f"rank 0 cannot listen on {env.master_addr}:{env.master_port}: "
            f"{os.strerror(error.errno or 0)}; choose a free MASTER_PORT"
        ) from error


def bound_fd(host: str, port: int) -> int:
    with socket.create_server((host, port), backlog=2048) as server:
        return server.detach()
