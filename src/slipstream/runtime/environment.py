"""What launchers and schedulers tell a process through its environment, read once and checked."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slipstream.errors import ConfigError, LaunchError, SecretError
from slipstream.input_files import read_limited

Nonfinite = Literal["pass", "refuse", "stop"]

MOST_SECRET_BYTES = 64 * 1024
LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # an address of no network, set aside for documentation


@dataclass(frozen=True, slots=True)
class Environment:
    """RANK and friends, as torchrun, ``slipstream run`` or a scheduler set them; alone if unset."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    master_addr: str = LOOPBACK
    master_port: int = 0
    store_fd: int | None = None
    agent_store: bool = False
    attempt: int = 0
    strategy: str | None = None
    servers: int | None = None
    server_addresses: tuple[str, ...] = ()
    secret: bytes | None = None
    encrypt: bool | None = None  # None: between hosts
    job: str | None = None
    interface: str | None = None
    json: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None
    prometheus: int | None = None
    launcher: int | None = None
    control_fd: int | None = None  # of the socket to the launcher, where learners share memory
    back_fd: int | None = None  # where a worker that was started again says that it is back
    presence_fd: int | None = None  # where a worker says that it has joined, and left
    nonfinite: Nonfinite = "pass"  # what becomes of a gradient with a NaN or an infinity
    life: int = 0  # how often this worker was started again, in a job that goes on without it

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Environment:
        rank, world = whole(env, "RANK", 0), whole(env, "WORLD_SIZE", 1)
        if not 0 <= rank < world:
            raise LaunchError(f"RANK={rank} does not fit WORLD_SIZE={world}")
        alone = world == 1 or "SLIPSTREAM_CONTROL_FD" in env
        if not alone and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise LaunchError(
                f"WORLD_SIZE={world} but MASTER_ADDR or MASTER_PORT is not set: start with "
                "`slipstream run` or torchrun, or set both to rank 0's address and a free port"
            )
        port = whole(env, "MASTER_PORT", 0)
        if not 0 <= port < 1 << 16:
            raise LaunchError(f"MASTER_PORT={port} is no port: choose one from 1 to 65535")
        addresses = env.get("SLIPSTREAM_SERVER_ADDRESSES", "")
        return cls(
            rank=rank,
            world_size=world,
            local_rank=whole(env, "LOCAL_RANK", 0),
            local_world_size=optional(env, "LOCAL_WORLD_SIZE"),
            master_addr=env.get("MASTER_ADDR", LOOPBACK),
            master_port=port,
            store_fd=optional(env, "SLIPSTREAM_STORE_FD"),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=whole(env, "TORCHELASTIC_RESTART_COUNT", 0),
            strategy=env.get("SLIPSTREAM_STRATEGY") or None,
            servers=optional(env, "SLIPSTREAM_SERVERS"),
            server_addresses=tuple(a for a in addresses.split(",") if a),
            secret=read_secret(env),
            encrypt=flag(env, "SLIPSTREAM_ENCRYPT"),
            job=env.get("SLIPSTREAM_JOB") or None,
            interface=env.get("SLIPSTREAM_INTERFACE") or None,
            json=path(env, "SLIPSTREAM_JSON"),
            log=path(env, "SLIPSTREAM_LOG"),
            tensorboard=path(env, "SLIPSTREAM_TENSORBOARD"),
            prometheus=optional(env, "SLIPSTREAM_PROMETHEUS"),
            launcher=optional(env, "SLIPSTREAM_LAUNCHER"),
            control_fd=optional(env, "SLIPSTREAM_CONTROL_FD"),
            back_fd=optional(env, "SLIPSTREAM_BACK_FD"),
            presence_fd=optional(env, "SLIPSTREAM_PRESENCE_FD"),
            nonfinite=nonfinite_in(env.get("SLIPSTREAM_NONFINITE") or "pass"),
            life=whole(env, "SLIPSTREAM_LIFE", 0),
        )

    @property
    def started_again(self) -> bool:
        """Whether training had begun before this process did."""
        return bool(self.life or self.attempt)

    @property
    def one_host(self) -> bool:
        """Whether all workers are known to run on this host."""
        if self.local_world_size == self.world_size:
            return True
        return is_loopback(self.master_addr) and not self.interface

    @property
    def store_address(self) -> str:
        """Where the ranks meet; on one host never where another host reaches it."""
        return LOOPBACK if self.one_host and not self.agent_store else self.master_addr

    @property
    def encrypts(self) -> bool:
        """As was asked for; else not on one host, where only root can read what links carry."""
        return not self.one_host if self.encrypt is None else self.encrypt

    def listen_host(self) -> str:
        """The address to listen on: loopback on one host, else the route to MASTER_ADDR."""
        if self.one_host:
            return LOOPBACK
        if self.interface:
            return address_of(self.interface)
        host = address_towards(self.master_addr, self.master_port)
        # Many systems give a host's own name a loopback address; others need the real one.
        return address_towards(ELSEWHERE, 9) if is_loopback(host) else host

    def require_secret(self) -> None:
        if self.secret is not None:
            return
        if not self.one_host:
            raise SecretError(
                f"MASTER_ADDR={self.master_addr} is another host: across hosts a job secret is "
                "needed; set SLIPSTREAM_SECRET to the same random text on every host, or "
                "SLIPSTREAM_SECRET_FILE to a file that holds it"
            )
        if self.agent_store:
            raise SecretError(
                "torchrun's store listens on every address of this host, so a job secret is "
                "needed: start with SLIPSTREAM_SECRET=$(openssl rand -hex 32) torchrun ..., or "
                "with `slipstream run`, which makes a secret of its own"
            )


def nonfinite_in(text: str) -> Nonfinite:
    """A value of ``SLIPSTREAM_NONFINITE``, or of ``init``'s argument."""
    for known in get_args(Nonfinite):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(
        f"nonfinite={text!r} (slipstream.init or SLIPSTREAM_NONFINITE): choose one of "
        f"{', '.join(get_args(Nonfinite))}"
    )


def whole(env: Mapping[str, str], key: str, default: int) -> int:
    value = optional(env, key)
    return default if value is None else value


def optional(env: Mapping[str, str], key: str) -> int | None:
    text = env.get(key, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{key}={text!r} is not a whole number") from None


def flag(env: Mapping[str, str], key: str) -> bool | None:
    text = env.get(key, "")
    if text not in ("", "0", "1"):
        raise LaunchError(f"{key}={text!r}: give 0 or 1")
    return text == "1" if text else None


def path(env: Mapping[str, str], key: str) -> Path | None:
    text = env.get(key, "")
    return Path(text) if text else None


def read_secret(env: Mapping[str, str]) -> bytes | None:
    text = env.get("SLIPSTREAM_SECRET", "")
    file = env.get("SLIPSTREAM_SECRET_FILE", "")
    if file and not text:
        try:
            text = read_limited(Path(file), MOST_SECRET_BYTES).decode().strip()
        except OSError as error:
            raise SecretError(f"cannot read the secret file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SecretError(f"cannot read the secret file {file}: it is not text") from error
    if (file or "SLIPSTREAM_SECRET" in env) and len(text) < 16:
        raise SecretError("the job secret is shorter than 16 characters; use a random one")
    return text.encode() or None


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(socket.gethostbyname(host))
    except OSError:
        return False


def address_towards(host: str, port: int) -> str:
    """This host's address on the route to another; no packet is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"no route to MASTER_ADDR={host} ({error.strerror}); set SLIPSTREAM_INTERFACE to the "
            "interface or address that other hosts reach"
        ) from error


def address_of(interface: str) -> str:
    """The IPv4 address of a named interface; an address stands for itself."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    if sys.platform == "linux":
        import fcntl
        import struct

        siocgifaddr = 0x8915
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
                return socket.inet_ntoa(answer[20:24])
            except OSError:
                pass
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise LaunchError(
        f"SLIPSTREAM_INTERFACE={interface!r} has no IPv4 address here; interfaces are {names}; "
        "an address works too"
    )
