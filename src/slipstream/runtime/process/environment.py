"""The environment variables of launchers and schedulers, read once and checked."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from slipstream.errors import ConfigError, LaunchError, SecretError
from slipstream.input_files import read_limited
from slipstream.part_modules import module_names
from slipstream.runtime.process.user_secret import user_secret, user_secret_path

Nonfinite = Literal["pass", "refuse", "stop"]

MOST_SECRET_BYTES = 64 * 1024
LOOPBACK = "127.0.0.1"
ELSEWHERE = "192.0.2.1"  # reserved for documentation: no network has this address


def whole(text: str, name: str) -> int:
    """Return a whole number; raise LaunchError for other text."""
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is not a whole number") from None


def flag(text: str, name: str) -> bool:
    """Return True for 1 and False for 0; raise LaunchError for other text."""
    if text not in ("0", "1"):
        raise LaunchError(f"{name}={text!r}: give 0 or 1")
    return text == "1"


def path(text: str, name: str) -> Path:
    """Return a path."""
    return Path(text)


def plain(text: str, name: str) -> str:
    """Return the text unchanged."""
    return text


def listed(text: str, name: str) -> tuple[str, ...]:
    """Return the parts between commas."""
    return tuple(part for part in text.split(",") if part)


def modules(text: str, name: str) -> tuple[str, ...]:
    """Return the names of modules between commas; raise ConfigError for other names."""
    return module_names(listed(text, name))


def nonfinite_in(text: str, name: str = "") -> Nonfinite:
    """Return a value of ``SLIPSTREAM_NONFINITE``, or of ``init``'s argument.

    Raises:
        ConfigError: The value is unknown.
    """
    for known in get_args(Nonfinite):
        if text == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(
        f"nonfinite={text!r} (slipstream.init or SLIPSTREAM_NONFINITE): choose one of "
        f"{', '.join(get_args(Nonfinite))}"
    )


class Variable(NamedTuple):
    """The variable and the parser of a field; if it is unset or empty, the default applies."""

    name: str
    read: Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a process: RANK and so on, as set by torchrun, ``slipstream run`` or a
    scheduler; world size 1 if unset."""

    rank: Annotated[int, Variable("RANK", whole)] = 0
    world_size: Annotated[int, Variable("WORLD_SIZE", whole)] = 1
    local_rank: Annotated[int, Variable("LOCAL_RANK", whole)] = 0
    local_world_size: Annotated[int | None, Variable("LOCAL_WORLD_SIZE", whole)] = None
    master_addr: Annotated[str, Variable("MASTER_ADDR", plain)] = LOOPBACK
    master_port: Annotated[int, Variable("MASTER_PORT", whole)] = 0
    store_fd: Annotated[int | None, Variable("SLIPSTREAM_STORE_FD", whole)] = None
    attempt: Annotated[int, Variable("TORCHELASTIC_RESTART_COUNT", whole)] = 0
    strategy: Annotated[str | None, Variable("SLIPSTREAM_STRATEGY", plain)] = None
    servers: Annotated[int | None, Variable("SLIPSTREAM_SERVERS", whole)] = None
    server_addresses: Annotated[
        tuple[str, ...], Variable("SLIPSTREAM_SERVER_ADDRESSES", listed)
    ] = ()
    # None: encrypt between hosts.
    encrypt: Annotated[bool | None, Variable("SLIPSTREAM_ENCRYPT", flag)] = None
    job: Annotated[str | None, Variable("SLIPSTREAM_JOB", plain)] = None
    interface: Annotated[str | None, Variable("SLIPSTREAM_INTERFACE", plain)] = None
    json: Annotated[Path | None, Variable("SLIPSTREAM_JSON", path)] = None
    log: Annotated[Path | None, Variable("SLIPSTREAM_LOG", path)] = None
    tensorboard: Annotated[Path | None, Variable("SLIPSTREAM_TENSORBOARD", path)] = None
    prometheus: Annotated[int | None, Variable("SLIPSTREAM_PROMETHEUS", whole)] = None
    launcher: Annotated[int | None, Variable("SLIPSTREAM_LAUNCHER", whole)] = None
    # The socket to the launcher on this machine.
    control_fd: Annotated[int | None, Variable("SLIPSTREAM_CONTROL_FD", whole)] = None
    # Written when a restarted worker is back.
    back_fd: Annotated[int | None, Variable("SLIPSTREAM_BACK_FD", whole)] = None
    # Written when a worker has joined, and when it has left.
    presence_fd: Annotated[int | None, Variable("SLIPSTREAM_PRESENCE_FD", whole)] = None
    # The treatment of a gradient with a NaN or an infinity.
    nonfinite: Annotated[Nonfinite, Variable("SLIPSTREAM_NONFINITE", nonfinite_in)] = "pass"
    # The modules of the user's own parts, which this process and servers may import.
    parts: Annotated[tuple[str, ...], Variable("SLIPSTREAM_PARTS", modules)] = ()
    # The number of times this worker was started again, in a job that continues without it.
    incarnation: Annotated[int, Variable("SLIPSTREAM_INCARNATION", whole)] = 0
    agent_store: bool = False  # the rendezvous store is torchrun's, or torch's default group's
    secret: bytes | None = None
    user_secret_file: Path | None = None  # the path of the user's own secret, even if not made yet
    secret_from: Path | None = None  # this file, if the secret is the user's own

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Environment:
        """Read and check the environment of a process.

        Raises:
            LaunchError: A variable is invalid or missing.
            SecretError: The job's secret cannot be read, or is too short.
        """
        values: dict[str, Any] = {}
        for name, kind in get_type_hints(cls, include_extras=True).items():
            for variable in getattr(kind, "__metadata__", ()):
                if text := env.get(variable.name):
                    values[name] = variable.read(text, variable.name)
        agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        read = cls(
            **values,
            agent_store=agent_store,
            secret=read_secret(env),
            user_secret_file=user_secret_path(env),
        )
        if not 0 <= read.rank < read.world_size:
            raise LaunchError(f"RANK={read.rank} does not fit WORLD_SIZE={read.world_size}")
        if read.world_size > 1 and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
            raise LaunchError(
                f"WORLD_SIZE={read.world_size} but MASTER_ADDR or MASTER_PORT is not set: start "
                "with `slipstream run` or torchrun, or set both to rank 0's address and a free port"
            )
        if not 0 <= read.master_port < 1 << 16:
            raise LaunchError(
                f"MASTER_PORT={read.master_port} is no port: choose one from 1 to 65535"
            )
        return read

    @property
    def started_again(self) -> bool:
        """True if training began before this process started."""
        return bool(self.incarnation or self.attempt)

    @property
    def one_host(self) -> bool:
        """True if all workers are known to run on this host."""
        if self.local_world_size == self.world_size:
            return True
        return is_loopback(self.master_addr) and not self.interface

    @property
    def store_address(self) -> str:
        """The address of the rendezvous store; on one host, not reachable from other hosts."""
        if self.agent_store:
            return self.master_addr
        if self.one_host:
            return LOOPBACK
        if self.rank > 0 and is_loopback(self.master_addr):
            return self.master_addr  # this host may have several addresses, one for each rank
        # On its own host a name may resolve to loopback, where the store does not listen.
        return self.listen_host() if resolves_to_loopback(self.master_addr) else self.master_addr

    @property
    def encrypts(self) -> bool:
        """True if links are encrypted; by default not on one host, as root alone can read."""
        return not self.one_host if self.encrypt is None else self.encrypt

    def listen_host(self) -> str:
        """Return the address to listen on: loopback on one host, else the route to MASTER_ADDR."""
        if self.one_host:
            return LOOPBACK
        if self.interface:
            return address_of(self.interface)
        host = address_towards(self.master_addr, self.master_port)
        # Many systems give a host's own name a loopback address; other hosts need the real one.
        return address_towards(ELSEWHERE, 9) if is_loopback(host) else host

    def with_secret(self) -> Environment:
        """Return this environment with the user's own secret, if one is needed.

        Raises:
            SecretError: Other users could join the job without a secret, and there is none.
        """
        reason, path = self._why_secret, self.user_secret_file
        if self.secret is not None or not reason:
            return self
        if path is None:
            own = "HOME is not set, so you have no secret of your own"
        else:
            try:
                secret = secret_of(user_secret(path))
            except SecretError as error:
                own = f"your own cannot be used: {error}"
            else:
                return replace(self, secret=secret, secret_from=path)
        raise SecretError(
            f"{reason}; {own}. Or set SLIPSTREAM_SECRET to the same random text on every host "
            "(SLIPSTREAM_SECRET=$(openssl rand -hex 32) torchrun ...), or SLIPSTREAM_SECRET_FILE "
            "to a file that holds it"
        )

    @property
    def _why_secret(self) -> str:
        """The reason why others could join without a secret; empty if they could not."""
        if not self.one_host:
            host = self.master_addr
            return f"MASTER_ADDR={host} is another host: across hosts a job secret is needed"
        if self.agent_store:
            return (
                "torch's store (torchrun's, or that of init_process_group) listens on every "
                "address of this host, so a job secret is needed"
            )
        return ""


def read_secret(env: Mapping[str, str]) -> bytes | None:
    """Return the secret in the variable or the file; an empty variable means none.

    Raises:
        SecretError: The secret cannot be read, or is too short.
    """
    text = env.get("SLIPSTREAM_SECRET", "")
    file = env.get("SLIPSTREAM_SECRET_FILE", "")
    if file and not text:
        try:
            text = read_limited(Path(file), MOST_SECRET_BYTES).decode().strip()
        except OSError as error:
            raise SecretError(f"cannot read the secret file {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SecretError(f"cannot read the secret file {file}: it is not text") from error
    return secret_of(text) if file or text else None


def secret_of(text: str) -> bytes:
    """Return a secret's text as bytes; raise SecretError if it is too short."""
    if len(text) < 16:
        raise SecretError("the job secret is shorter than 16 characters; use a random one")
    return text.encode()


def is_loopback(host: str) -> bool:
    """Return whether this address is reachable only from this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolves_to_loopback(host: str) -> bool:
    """Return whether a name resolves to a loopback address."""
    try:
        return is_loopback(socket.gethostbyname(host))
    except OSError:
        return False


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to another host; no packet is sent."""
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
    """Return the IPv4 address of a named interface; an address is returned unchanged."""
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
