"""Malformed frames and garbage connections are counted and refused; training does not notice."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from attacker import MEGABYTE, Crowd, Forger, send_as_member, send_oversized
from fork_server import ForkServer, Run
from launches import until
from remains import listening_ports

from slipstream.transports.credentials import Credentials

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("attack_worker.py")
WORKERS = 2
SECRET = "the secret of a job under attack"
FRAMES, CONNECTIONS = 10_000, 1_000
GROWTH_BYTES = 50 * MEGABYTE


@dataclass
class Outcome:
    undisturbed: Run
    attacked: Run
    growth: dict[str, int]


class Memory:
    """The largest each process has been, over what it was at first."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self._first = self._now()
        self._most = dict(self._first)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            now = self._now()
            self._most = {name: max(self._most[name], now[name]) for name in now}

    def growth(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        return {name: self._most[name] - first for name, first in self._first.items()}


@pytest.fixture(scope="module")
def outcome(fork_server: ForkServer) -> Outcome:
    undisturbed = fork_server.run(WORKER, ranks=WORKERS)
    assert set(undisturbed.codes.values()) == {0}, undisturbed.told()
    env = {"SLIPSTREAM_SECRET": SECRET}
    run = fork_server.start(WORKER, "hold", ranks=WORKERS, env=env)
    until(lambda: run.marked("training"), "training")
    growth = attack(run)
    (run.folder / "go").touch()
    run.wait()
    return Outcome(undisturbed, run, growth)


def attack(run: Run) -> dict[str, int]:
    servers = [
        p for p in run.remains.processes() if "slipstream.runtime.servers.server" in p.cmdline()
    ]
    members = {
        "server 0": servers[0],
        **{f"rank {rank}": psutil.Process(pid) for rank, pid in enumerate(run.pids)},
    }
    ports = {name: sorted(listening_ports(process.pid)) for name, process in members.items()}
    memory, crowd = Memory(members), Crowd()
    known = json.loads((run.folder / "run.json").read_text())
    credentials = Credentials(bytes.fromhex(known["key"]), encrypt=False)
    processes = {f"rank {rank}": number for rank, number in enumerate(known["processes"])}
    processes["server 0"] = credentials.process_of("server 0")
    everywhere = [port for some in ports.values() for port in some]
    links = [own_port(run, name, some) for name, some in ports.items()]
    crowd.connect(everywhere, CONNECTIONS // 2, seed=1)
    for number, port in enumerate(links):
        address = f"tcp://127.0.0.1:{port}"
        share = FRAMES // 2 if number == 0 else FRAMES // 4
        forger = Forger(number, processes)
        send_as_member(address, credentials, forger.messages(share))
        send_oversized(address, credentials)
    crowd.connect(everywhere, CONNECTIONS // 2, seed=2)
    growth = memory.growth()
    crowd.close()
    return growth


def own_port(run: Run, name: str, ports: list[int]) -> int:
    """Where a member takes messages: rank 0 also listens where all have met."""
    store = int((run.folder / "port").read_text())
    return next(port for port in ports if port != store)


def test_nobody_fails(outcome: Outcome) -> None:
    run = outcome.attacked
    assert run.codes == {0: 0, 1: 0}, run.told()
    assert run.own_lines() == []
    assert run.remains.left() == []


def test_same_weights(outcome: Outcome) -> None:
    def weights(run: Run) -> str:
        return run.stdout(0).rpartition(" ")[0]

    assert weights(outcome.attacked) == weights(outcome.undisturbed)


def test_memory_stays(outcome: Outcome) -> None:
    too_much = {name: by for name, by in outcome.growth.items() if by > GROWTH_BYTES}
    assert too_much == {}


def test_frames_were_refused_and_counted(outcome: Outcome) -> None:
    """By both workers; what the server refuses it keeps to itself."""
    assert int(outcome.attacked.stdout(0).split()[-1]) > 0.8 * FRAMES / 2
    assert int(outcome.undisturbed.stdout(0).split()[-1]) == 0
