"""The store in which ranks meet: torch's TCPStore, one for torch and slipstream.

Rank 0 hosts it at MASTER_PORT, unless torchrun's agent does. Torch's default group, created by
``init_process_group``, and slipstream share it, whichever comes first: the server in a process is
torch's multi-tenant one, which closes when its last user has closed.
"""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed

from slipstream.errors import LaunchError, SecretError
from slipstream.runtime.process.environment import LOOPBACK, Environment, is_loopback

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
TRY_S = 2.0
NAME_PAUSE_S = 0.25
WITHOUT_STORE = ("mpi", "fake")  # backends whose ranks meet elsewhere

_used_fds: set[int] = set()  # the launcher's sockets that a store has used and closed


def default_group_store(env: Environment) -> Any:
    """Return the store of torch's default group, if that has the job's rank and size."""
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    own = distributed.get_rank(), distributed.get_world_size()
    if own != (env.rank, env.world_size) or distributed.get_backend() in WITHOUT_STORE:
        return None
    return distributed.distributed_c10d._get_default_store()


def require_same_world(env: Environment) -> None:
    """Check that torch has not made this process one of several, if it is to train alone.

    Raises:
        LaunchError: Torch's default group has several ranks, and the environment describes one.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return
    size = distributed.get_world_size()
    if env.world_size == 1 < size:
        raise LaunchError(
            f"torch.distributed has a default group of {size} processes, but RANK and WORLD_SIZE "
            "are not set, so slipstream would train in this process alone: set them, MASTER_ADDR "
            "and MASTER_PORT before slipstream.init, as torchrun does"
        )


def connect_store(env: Environment, limit_s: float) -> Any:
    """Join the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it unless torchrun does."""
    if not env.agent_store:
        # Where torch's env:// looks for it, too.
        os.environ["MASTER_ADDR"] = env.store_address
    if env.rank == 0 and not env.agent_store:
        return host_store(env, limit_s)
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
        # If torch gave up while Python exits, it would crash the process.
        thread.join(2 * TRY_S)
        raise unreachable(env, limit_s) from None
    if isinstance(store, Exception):
        raise store
    return store


def host_store(env: Environment, limit_s: float) -> Any:
    """Return rank 0's store; raise LaunchError if its port is taken."""
    try:
        return make_store(env, limit_s, listening_fd(env))
    except distributed.DistNetworkError as error:
        raise cannot_listen(env, str(error).partition("\n")[0]) from error


def cannot_listen(env: Environment, reason: str) -> LaunchError:
    """Return the error of rank 0 if its port is taken."""
    where = f"{env.store_address}:{env.master_port}"
    return LaunchError(f"rank 0 cannot listen on {where}: {reason}; choose a free MASTER_PORT")


def open_early(env: Environment, limit_s: float) -> Any:
    """Return rank 0's store on the launcher's socket, so that torch shares it; elsewhere None."""
    if env.rank > 0 or env.world_size == 1 or env.store_fd is None:
        return None
    return None if default_group_store(env) is not None else connect_store(env, limit_s)


def reach_store(env: Environment, limit_s: float) -> Any:
    """Return the store; try until rank 0 answers or the time is up."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            # Try a plain connection first: torch prints many lines if there is no listener.
            left_s = max(LONGEST_PAUSE_S, deadline - time.monotonic())
            socket.create_connection((env.store_address, env.master_port), left_s).close()
            store = make_store(env, TRY_S)
        except (OSError, distributed.DistError) as error:
            if time.monotonic() > deadline:
                raise unreachable(env, limit_s) from error
            time.sleep(LONGEST_PAUSE_S)
        else:
            store.set_timeout(timedelta(seconds=limit_s))
            return store


def unreachable(env: Environment, limit_s: float) -> LaunchError:
    """Return the error of a rank that cannot reach the store."""
    return LaunchError(
        f"rank {env.rank} cannot reach rank 0 at {env.store_address}:{env.master_port} within "
        f"{limit_s:.0f} s; check that rank 0 runs and that MASTER_ADDR and MASTER_PORT are its"
        f"{only_this_host(env)}",
        missing=["rank 0"],
    )


def only_this_host(env: Environment) -> str:
    """Return a hint for an error about missing ranks, if those on other hosts cannot come."""
    if env.local_world_size == env.world_size or not is_loopback(env.master_addr):
        return ""
    return (
        f"; MASTER_ADDR={env.master_addr} is this host, for this host only: if other ranks run on "
        "other hosts, set it to an address of rank 0's host that they reach, on rank 0 too"
    )


def await_name(env: Environment, limit_s: float) -> None:
    """Wait until MASTER_ADDR resolves: schedulers announce a name some time after it is used.

    Raises:
        LaunchError: The name is unknown when the time is up.
    """
    deadline = time.monotonic() + limit_s
    while not env.one_host:
        try:
            socket.getaddrinfo(env.master_addr, env.master_port)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"MASTER_ADDR={env.master_addr} has not resolved to an address within "
                    f"{limit_s:.0f} s ({error.strerror}); check the name, or give an address"
                ) from error
        time.sleep(NAME_PAUSE_S)


def make_store(env: Environment, limit_s: float, listening: int | None = None) -> Any:
    """Create a client of the store, and its server if there is a socket to listen on."""
    return distributed.TCPStore(
        env.store_address,
        env.master_port,
        None,
        is_master=listening is not None,
        timeout=timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=listening is not None,
        master_listen_fd=listening,
    )


def listening_fd(env: Environment) -> int:
    """Return a socket for the store, on loopback only if all ranks are on one host."""
    if env.store_fd is not None and env.store_fd not in _used_fds:
        _used_fds.add(env.store_fd)
        os.set_inheritable(env.store_fd, False)
        require_loopback(env, env.store_fd)
        return env.store_fd
    try:
        return bound_fd(env.store_address, env)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            # MASTER_ADDR may be a name that forwards to this host.
            return bound_fd(env.listen_host(), env)
        raise cannot_listen(env, os.strerror(error.errno or 0)) from error


def close_listener(env: Environment) -> None:
    """Close the launcher's socket if workers do not join over the network."""
    if env.store_fd is not None and env.store_fd not in _used_fds:
        _used_fds.add(env.store_fd)
        os.close(env.store_fd)


def require_loopback(env: Environment, fd: int) -> None:
    """Check that no other host reaches a launcher's socket, since it could read the token there."""
    with socket.socket(fileno=os.dup(fd)) as listener:
        host = str(listener.getsockname()[0])
    if env.secret is None and not is_loopback(host):
        raise SecretError(
            f"SLIPSTREAM_STORE_FD listens on {host}, which other hosts reach: set "
            "SLIPSTREAM_SECRET to a random text, or let it listen on " + LOOPBACK
        )


def bound_fd(host: str, env: Environment) -> int:
    """Return a new listening socket at MASTER_PORT."""
    with socket.create_server((host, env.master_port), backlog=2048) as server:
        return server.detach()
