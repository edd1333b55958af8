"""A real Ray cluster of two nodes on this machine, and what its tests have in common."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent
LIMIT_S = 120.0
NODE = {"num_cpus": 3, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.2"}
LOSABLE = "losable"  # a resource of nodes that are not the first, which cannot be lost
# A node that has died is noticed soon. Servers have to end by themselves: Ray would kill what its
# workers have started, and nobody would see a server that stays.
SYSTEM = {
    "health_check_period_ms": 300,
    "health_check_failure_threshold": 2,
    "kill_child_processes_on_worker_exit": False,
}
# Ray's own: sockets and files that it leaves to the garbage collector, old interfaces.
IGNORED = [
    pytest.mark.filterwarnings(f"ignore::{warning}")
    for warning in (
        "ResourceWarning",
        "DeprecationWarning",
        "FutureWarning",
        "pytest.PytestUnraisableExceptionWarning",
    )
]


class Nodes:
    """A cluster of two nodes with one address."""

    def __init__(self) -> None:
        head = {**NODE, "include_dashboard": False, "_system_config": SYSTEM}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self._raylets = [raylet_of(self.cluster.head_node)]
        self.others: list[Any] = []  # nodes that can be lost
        self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """Add a node that can be lost."""
        self.others.append(self.cluster.add_node(**NODE, resources={LOSABLE: 3}))
        self._raylets.append(raylet_of(self.others[-1]))

    @contextmanager
    def losing(self, doomed: Callable[[], Any]) -> Iterator[None]:
        """Within, a node is killed once ``doomed`` returns it; until then it returns None."""
        over = threading.Event()
        lost: list[str] = []

        def kill() -> None:
            until(lambda: over.is_set() or doomed() is not None)
            if not over.is_set():
                node = doomed()
                lost.append(node.node_id)
                self.others.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        try:
            yield
        finally:
            over.set()
            killer.join(LIMIT_S)
            assert not killer.is_alive(), f"node {lost} is not removed after {LIMIT_S:.0f} s"

    @contextmanager
    def nothing_left(self) -> Iterator[None]:
        """Two nodes before; after, no actor holds resources, and no server of slipstream runs."""
        if not self.others:
            self.add()
        yield
        until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
        until(lambda: not self.servers())

    def servers(self) -> list[int]:
        """Servers of jobs on this cluster: descendants of its nodes."""
        marks = {f"RAY_RAYLET_PID={pid}".encode() for pid in self._raylets}
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if "slipstream.runtime.servers.server" in (process.info["cmdline"] or []):
                with suppress(OSError):  # it has just ended
                    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                    if marks & set(environment.split(b"\0")):
                        found.append(process.pid)
        return found


def raylet_of(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


@contextmanager
def connected() -> Iterator[Nodes]:
    """Start the cluster, and connect this process to it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Workers inherit it: they find ray_loops, and torch without its compiler.
        paths = (HERE, HERE.parent / "light", os.environ.get("PYTHONPATH", ""))
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        started = Nodes()
        try:
            ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
            yield started
        finally:
            ray.shutdown()
            started.cluster.shutdown()


def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it has not come to that in time"
        time.sleep(0.05)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)
