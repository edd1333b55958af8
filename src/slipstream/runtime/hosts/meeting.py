"""The meeting of one host's workers, at which they get the memory that they share.

The host's first worker creates it, without a name, and passes its descriptor to the others over a
socket of this host. The socket's name is random, and is sent to the others over the job's
authenticated links, with a token that each must present. Both sides also ask the kernel for the
user of the other process. The socket is closed when all have connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import LaunchError, WaitLimit
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.joining import Membership
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Layer, Rank, Spec

TOKEN_BYTES = 32
PROOF = struct.Struct(f"<{TOKEN_BYTES}sI")  # the token, and the rank that presents it
CREDENTIALS = struct.Struct("3i")  # of a socket's peer: pid, uid, gid
LOOK_AROUND_S = 0.1
PROOF_S = 10.0  # for a process of this user to send its token
FLAT = "or keep workers of one host apart, as push_pull(hierarchical=False) does"


def host_identity(address: str) -> str:
    """Return an identity that is the same for workers that can share memory: one kernel and user.

    Args:
        address: The address of this worker's links, without the port.
    """
    if sys.platform != "linux":
        return f"{address}/{secrets.token_hex(8)}"  # equal to no other
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
    except OSError:  # in a sandbox
        return f"{address}/{secrets.token_hex(8)}"
    return f"{address}/{boot}/{spaces}/{os.geteuid()}"


def find_hosts(membership: Membership, key: str, *, apart: bool) -> tuple[tuple[Rank, ...], ...]:
    """Return the ranks of each host, in the order of their lowest; every rank calls it.

    Args:
        key: The name of this gathering.
        apart: True if this worker has a reason to take part by itself.

    Returns:
        An empty tuple if every worker has a host of its own, or if all share one.
    """
    address = membership.transport.address.rpartition(":")[0]
    own = f"rank {membership.env.rank}" if apart else host_identity(address)
    hosts: dict[str, list[Rank]] = {}
    for rank, identity in enumerate(membership.gathering.gather(key, own, str)):
        hosts.setdefault(identity, []).append(rank)
    if len(hosts) in (1, membership.env.world_size):
        return ()
    return tuple(tuple(ranks) for ranks in hosts.values())


def meet(
    specs: Sequence[Spec],
    ranks: Sequence[Rank],
    membership: Membership,
    key: str,
    layers: Sequence[Layer] = (),
) -> HostMemory:
    """Return the memory of a host, the same for all of its workers; each of them calls it.

    Args:
        specs: The tensors of the plan.
        ranks: The workers of this host, in rank order.
        membership: This worker's membership of the job.
        key: The name of this memory, which no other has.
        layers: The layers whose gradients may be sent as factors or rows.

    Raises:
        LaunchError: There is not enough memory, or workers cannot share any.
    """
    nbytes = HostSegment.of(specs, len(ranks), layers).nbytes
    key = f"{key}/{ranks[0]}"
    if membership.env.rank == ranks[0]:
        shared = SharedMemory.create(nbytes)
        if len(ranks) > 1:
            hand_out(shared, ranks[1:], membership, key)
    else:
        shared = SharedMemory(fetch(nbytes, ranks[0], membership, key))
    return HostMemory(specs, ranks, shared, layers)


def hand_out(
    shared: SharedMemory, others: Sequence[Rank], membership: Membership, key: str
) -> None:
    """Pass the descriptor to the host's other workers."""
    name, token = f"slipstream-{secrets.token_hex(16)}", secrets.token_bytes(TOKEN_BYTES)
    waiting = set(others)
    deadline = time.monotonic() + membership.limits.start_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(len(others) + 16)
        listener.settimeout(LOOK_AROUND_S)
        membership.gathering.post(key, (name, token))
        while waiting:
            membership.member.check()
            if time.monotonic() > deadline:
                missing = [f"rank {rank}" for rank in sorted(waiting)]
                raise WaitLimit(
                    "workers of this host to share memory", membership.limits.start_s, missing
                )
            with contextlib.suppress(OSError), listener.accept()[0] as link:
                link.settimeout(PROOF_S)
                rank = shown(link, token)
                if rank in waiting:
                    socket.send_fds(link, [b"."], [shared.descriptor])
                    waiting.discard(rank)


def shown(link: socket.socket, token: bytes) -> Rank:
    """Return the rank of a process that connected; -1 if it does not belong to this host's job."""
    if peer_user(link) != os.geteuid():
        return -1
    proof = b""
    while len(proof) < PROOF.size:
        more = link.recv(PROOF.size - len(proof))
        if not more:
            return -1
        proof += more
    received, rank = PROOF.unpack(proof)
    return rank if hmac.compare_digest(received, token) else -1


def fetch(nbytes: int, leader: Rank, membership: Membership, key: str) -> int:
    """Return the descriptor of the host's memory, checked."""
    name, token = membership.gathering.read(key, leader, tuple[str, bytes])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(membership.limits.start_s)
        try:
            link.connect("\0" + name)
            if peer_user(link) != os.geteuid():
                raise LaunchError(
                    f"rank {leader} on this host runs as another user, so it shares no memory with "
                    f"rank {membership.env.rank}: start all workers of a host as one user, {FLAT}"
                )
            link.sendall(PROOF.pack(token, membership.env.rank))
            _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        except OSError as error:
            raise LaunchError(
                f"rank {membership.env.rank} has the address of rank {leader} but shares no memory "
                f"with it ({error}): start them in one network namespace, {FLAT}"
            ) from error
    if not descriptors:
        raise LaunchError(f"rank {leader} on this host passed no memory on; look at its error")
    os.set_inheritable(descriptors[0], False)
    check_memory(descriptors[0], nbytes, leader)
    return descriptors[0]


def check_memory(descriptor: int, nbytes: int, leader: Rank) -> None:
    """Check the size of the memory, and that it cannot shrink: reads would be fatal."""
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    size = os.fstat(descriptor).st_size
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:
        sealed = False
    if size != nbytes or not sealed:
        os.close(descriptor)
        raise LaunchError(
            f"rank {leader} on this host shares {size} bytes where {nbytes} are needed: use the "
            "same slipstream on all workers"
        )


def peer_user(link: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(raw)[1])
