"""Who gets the memory of a host, who does not, and which memory is refused."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.errors import LaunchError, WaitLimit
from slipstream.planning.host_segment import HostSegment
from slipstream.runtime.hosts import meeting
from slipstream.runtime.hosts.meeting import PROOF, check_memory, fetch, find_hosts, meet
from slipstream.transports.shared_memory import SharedMemory
from slipstream.types import Spec

SPECS = (Spec("w", (30, 20), "float32", 0),)


class Board:
    """What ranks have posted; stands for the gathering."""

    def __init__(self) -> None:
        self.posted: dict[str, Any] = {}
        self.came = threading.Event()

    def post(self, key: str, value: Any) -> None:
        self.posted[key] = value
        self.came.set()

    def read(self, key: str, rank: int, kind: Any) -> Any:
        assert self.came.wait(60)
        return self.posted[key]


def membership(rank: int, board: Any, start_s: float = 60.0) -> Any:
    return SimpleNamespace(
        env=SimpleNamespace(rank=rank, world_size=4),
        limits=SimpleNamespace(start_s=start_s),
        gathering=board,
        member=SimpleNamespace(check=lambda: None),
        transport=SimpleNamespace(address="tcp://10.0.0.1:4000"),
    )


def test_workers_of_a_host_share_what_they_write() -> None:
    board, found = Board(), {}

    def come(rank: int) -> None:
        found[rank] = meet(SPECS, (2, 5, 7), membership(rank, board), "memory")

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (5, 2, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found[5].place(1, 0).data[:] = 77
    assert bytes(found[2].place(1, 0).data[:4]) == bytes([77] * 4)
    assert not found[7].place(2, 0).data.any()
    for memory in found.values():
        memory.close()


def test_a_stranger_gets_nothing_and_the_others_still_do() -> None:
    board, found = Board(), {}
    leader = threading.Thread(
        target=lambda: found.update(leader=meet(SPECS, (0, 1), membership(0, board), "memory"))
    )
    leader.start()
    assert board.came.wait(60)
    name, token = board.posted["memory/0"]
    for proof in (PROOF.pack(b"x" * 32, 1), PROOF.pack(token, 3), b"short"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.connect("\0" + name)
            link.sendall(proof)
            link.shutdown(socket.SHUT_WR)
            assert socket.recv_fds(link, 1, 1)[:2] == (b"", [])
    nbytes = HostSegment.of(SPECS, 2).nbytes
    os.close(fetch(nbytes, 0, membership(1, board), "memory/0"))
    leader.join()
    found["leader"].close()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link,
        pytest.raises(ConnectionRefusedError),
    ):
        link.connect("\0" + name)


def test_a_worker_that_does_not_come_is_named() -> None:
    with pytest.raises(WaitLimit) as late:
        meet(SPECS, (0, 3), membership(0, Board(), start_s=0.2), "memory")
    assert late.value.missing == ("rank 3",)


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    board, name = Board(), f"slipstream-test-user-{os.getpid()}"  # all of this machine see it
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        board.post("memory", (name, b"t" * 32))
        monkeypatch.setattr(meeting, "peer_user", lambda link: os.geteuid() + 1)
        with pytest.raises(LaunchError, match=r"another user.*hierarchical=False"):
            fetch(4096, 0, membership(1, board), "memory")


def test_workers_that_cannot_reach_each_other_are_told_the_way_out() -> None:
    board = Board()
    board.post("memory", ("slipstream-nobody-listens", b"t" * 32))
    with pytest.raises(LaunchError, match=r"shares no memory.*hierarchical=False"):
        fetch(4096, 0, membership(1, board), "memory")


def test_memory_of_another_size_or_that_may_shrink_is_refused() -> None:
    sealed = SharedMemory.create(4096)
    check_memory(sealed.descriptor, 4096, 0)
    with pytest.raises(LaunchError, match="4096 bytes where 8192 are needed"):
        check_memory(os.dup(sealed.descriptor), 8192, 0)
    sealed.close()
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    with pytest.raises(LaunchError, match="same slipstream on all workers"):
        check_memory(loose, 4096, 0)


@pytest.mark.parametrize(
    ("said", "hosts"),
    [
        (["a", "b", "a", "b"], ((0, 2), (1, 3))),
        (["a", "a", "a", "b"], ((0, 1, 2), (3,))),
        (["a", "a", "a", "a"], ()),
        (["a", "b", "c", "d"], ()),
    ],
)
def test_hosts_are_what_workers_have_in_common(said: list[str], hosts: object) -> None:
    gathering = SimpleNamespace(gather=lambda key, own, kind: said)
    assert find_hosts(membership(0, gathering), "hosts", apart=False) == hosts
