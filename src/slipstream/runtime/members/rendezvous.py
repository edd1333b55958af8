"""The rendezvous of a job's ranks: torch's TCPStore, which anyone who reaches it may change.

So it holds nothing secret, and no value is trusted without a signature. Each rank posts a fresh
nonce, signed with the job's key. All nonces together give the key of this run, which signs the
addresses. So no value of an earlier run, or of another key in the store, is accepted as one of this
run. After that, all messages are sent over authenticated links.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from torch import distributed

from slipstream.errors import LaunchError, PeerFailed, SecretError, WaitLimit
from slipstream.runtime.members.store import (
    LONGEST_PAUSE_S,
    SHORTEST_PAUSE_S,
    connect_store,
    default_group_store,
    only_this_host,
)
from slipstream.runtime.process.environment import Environment
from slipstream.transports.credentials import Credentials, process_number, stretch

NONCE_BYTES = SIGNATURE_BYTES = 32
T = TypeVar("T")
EVERYBODY = (
    "all ranks to join (a job secret has to be set on all of them or on none, and WORLD_SIZE "
    "workers have to be started)"
)

_jobs = itertools.count()  # a process may run several, one after the other


class StoreClosed(PeerFailed):
    """An error that the store which rank 0 hosts is closed."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The first value that a rank posts: a nonce of its process, and its WORLD_SIZE."""

    nonce: bytes
    world_size: int


@dataclass(frozen=True, slots=True)
class Run:
    """The credentials of one run, and the process number of each rank."""

    credentials: Credentials
    processes: tuple[int, ...]


class Rendezvous:
    """One rank's view of the store, until the ranks have found each other.

    Args:
        store: A store that is open already; by default that of torch's default group, else rank
            0's.
    """

    def __init__(self, env: Environment, *, limit_s: float, store: Any = None) -> None:
        self._env, self._limit_s = env, limit_s
        self._prefix = f"slipstream/{env.attempt}/{next(_jobs)}"
        self._in_group = (group_store := default_group_store(env)) is not None
        store = group_store or store or connect_store(env, limit_s)
        self.store: Any = distributed.PrefixStore(self._prefix, store)
        self._master = stretch(env.secret) if env.secret else b""
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def process(self) -> int:
        """The number of this process in the headers of its messages."""
        return process_number(self._nonce)

    def close(self) -> None:
        """Stop listening on rank 0, as all ranks have joined, unless torchrun's agent hosts the
        store or torch uses it too."""
        self.store = None

    def _shared_token(self) -> bytes:
        """Return a secret of rank 0, if there is none; all who reach the store can read it.

        ``Environment.with_secret`` has checked that the store listens on loopback only.
        """
        if self._env.rank == 0:
            self._ask("set", "token", secrets.token_hex(32))
        self._wait({"token": "rank 0"})
        return bytes(self._ask("get", "token"))

    def meet(self) -> Run:
        """Claim this rank's place and wait for the other ranks; return their run.

        If the store closes meanwhile, it belonged to the previous job of the same processes.
        """
        deadline = time.monotonic() + self._limit_s
        while True:
            try:
                return self._meet()
            except StoreClosed:
                if self._env.rank == 0 or self._in_group or time.monotonic() > deadline:
                    raise
            self.store = None
            self.store = distributed.PrefixStore(
                self._prefix, connect_store(self._env, deadline - time.monotonic())
            )

    def _meet(self) -> Run:
        env = self._env
        if env.secret is None:
            self._master = self._shared_token()
        credentials = Credentials.for_run(self._master, b"meeting", encrypt=False)
        if not env.incarnation:
            self._claim_rank(credentials)
        places = self._read_all("place", credentials, Place)
        for rank, place in enumerate(places):
            self._check_place(rank, place)
        nonces = [place.nonce for place in places]
        # Dedicated servers are started before the rendezvous, with a number that their launcher
        # chose.
        fresh = env.job if env.job and env.server_addresses else hashlib.sha256(b"".join(nonces))
        run = fresh.encode() if isinstance(fresh, str) else fresh.digest()
        return Run(
            Credentials.for_run(self._master, run, encrypt=env.encrypts),
            tuple(process_number(nonce) for nonce in nonces),
        )

    def addresses(self, run: Run, own: str) -> tuple[str, ...]:
        """Return the address of every rank, by rank."""
        if not self._env.incarnation:
            self._post("address", run.credentials, own)
        addresses = self._read_all("address", run.credentials, str)
        addresses[self._env.rank] = own
        return tuple(addresses)

    def _claim_rank(self, credentials: Credentials) -> None:
        key = f"place/{self._env.rank}"
        own = self._signed(key, credentials, Place(self._nonce, self._env.world_size))
        stored = bytes(self._ask("compare_set", key, "", own))
        if stored == own:
            return
        self._verified(key, stored, self._env.rank, credentials, Place)
        raise LaunchError(
            f"rank {self._env.rank} has joined the job at {self._where} already, in another "
            "process: another job uses this port, or this rank was started twice; choose another "
            "MASTER_PORT, or wait until that job has ended",
            only_here=True,
        )

    def _check_place(self, rank: int, place: Place) -> None:
        env = self._env
        if rank == env.rank and not env.incarnation and place.nonce != self._nonce:
            raise SecretError(
                f"the place of rank {rank} in the store at {self._where} was changed by another "
                "process; make sure that only this job's hosts reach MASTER_PORT",
                only_here=True,
            )
        if len(place.nonce) != NONCE_BYTES or place.world_size != env.world_size:
            raise LaunchError(
                f"rank {rank} was started with WORLD_SIZE={place.world_size}, rank {env.rank} with "
                f"WORLD_SIZE={env.world_size}: set the same everywhere; if it is the same, another "
                "job uses this port",
                only_here=True,
            )

    # ---- signed values

    @property
    def _where(self) -> str:
        return f"{self._env.store_address}:{self._env.master_port}"

    def _read_all(self, kind: str, credentials: Credentials, of: type[T]) -> list[T]:
        keys = {f"{kind}/{rank}": f"rank {rank}" for rank in range(self._env.world_size)}
        self._wait(keys)
        return [
            self._verified(key, bytes(self._ask("get", key)), rank, credentials, of)
            for rank, key in enumerate(keys)
        ]

    def _post(self, kind: str, credentials: Credentials, value: object) -> None:
        key = f"{kind}/{self._env.rank}"
        self._ask("set", key, self._signed(key, credentials, value))

    def _signed(self, key: str, credentials: Credentials, value: object) -> bytes:
        content = msgspec.msgpack.encode(value)
        return credentials.sign(self._claim(key, content)) + content

    def _claim(self, key: str, content: bytes) -> bytes:
        """Return the content to sign: a value with its key, invalid under other keys."""
        return msgspec.msgpack.encode((self._prefix, key, content))

    @property
    def _same_secret(self) -> str:
        """The advice on giving all ranks the same secret."""
        if (own := self._env.secret_from) is not None:
            return (
                f"this rank took your own, {own}, and hosts without a shared home have different "
                "ones: copy it to all hosts, or set SLIPSTREAM_SECRET to the same text on every "
                "rank"
            )
        return "set SLIPSTREAM_SECRET (or the secret file) to the same text on every rank"

    def _verified(
        self, key: str, raw: bytes, rank: int, credentials: Credentials, of: type[T]
    ) -> T:
        signature, content = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        if not credentials.genuine(self._claim(key, content), signature):
            if rank == self._env.rank:
                subject = f"the value of rank {rank}, this process's own rank,"
            else:
                subject = f"the value of rank {rank}"
            raise SecretError(
                f"{subject} in the store at {self._where} is not signed with this job's secret: "
                f"{self._same_secret}; if it is the same, another job uses this port, or another "
                "program writes to it",
                # Rank 0 detects it too, unless it is in a job that has begun.
                only_here=rank == self._env.rank or self._has(["address/0"]),
            )
        return msgspec.msgpack.decode(content, type=of)

    def _wait(self, whom: Mapping[str, str]) -> None:
        """Wait until all keys are set; ``whom`` has, by key, the rank that posts it."""
        deadline = time.monotonic() + self._limit_s
        pause_s = SHORTEST_PAUSE_S
        while not self._has(list(whom)):
            if time.monotonic() > deadline:
                missing = [name for key, name in whom.items() if not self._has([key])]
                raise WaitLimit(EVERYBODY + only_this_host(self._env), self._limit_s, missing)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def _ask(self, call: str, *arguments: object) -> Any:
        try:
            return getattr(self.store, call)(*arguments)
        except (distributed.DistError, RuntimeError) as error:
            raise StoreClosed("rank 0", f"its store at {self._where} does not answer") from error
