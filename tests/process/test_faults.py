"""Whatever happens to one member, the others end within seconds, say who it was, leave nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from fork_server import ForkServer, Run
from launches import SLIPSTREAM, Launch, until
from remains import listening_ports

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("fault_worker.py")
END_S = 30.0  # from the fault to the end of all survivors, however busy the machine is
WORKERS = 3
AT_A_TIME = 6
KILLED = -signal.SIGKILL
PEER_FAILED = 69  # this worker was fine, another one was not
Deed = Callable[[Run], None]


@dataclass
class Scene:
    """A job, what is done to it once its ranks have left a mark, and who is to be blamed."""

    name: str
    strategy: str
    blamed: str
    argument: str = "none"  # what the culprit does by itself
    culprit: int = -1
    deed: Deed | None = None  # what is done from outside
    afterwards: Deed | None = None  # once the survivors have ended
    when: str = "training"
    absent: tuple[int, ...] = ()  # ranks that are never started
    culprit_code: int = KILLED
    codes: tuple[int, ...] = (PEER_FAILED,)  # of the others
    run: Run = field(init=False)
    moment: float = 0.0

    def __str__(self) -> str:
        return self.name

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(len(self.run.pids)) if rank != self.culprit]

    def start(self, fork_server: ForkServer) -> None:
        present = [rank for rank in range(WORKERS) if rank not in self.absent]
        ranks: Sequence[dict[str, str]] = [
            {"RANK": str(rank), "WORLD_SIZE": str(WORKERS)} for rank in present
        ]
        arguments = (self.strategy, self.argument, str(self.culprit))
        self.moment = time.monotonic()
        self.run = fork_server.start(WORKER, *arguments, ranks=ranks)

    def strike(self) -> None:
        """Wait for the marks, then do what is to be done; or a rank does it by itself."""
        if self.absent:
            return
        until(lambda: self.run.marked(self.when), f"{self.when}: {self}")
        self.run.remains.note_ports(*self.run.pids)
        self.moment = time.monotonic()
        if self.deed is not None:
            self.deed(self.run)

    def see_out(self) -> None:
        until(lambda: self.run.codes.keys() >= set(self.survivors), f"survivors: {self}")
        if self.afterwards is not None:
            self.afterwards(self.run)
        self.run.wait()


def send(signum: signal.Signals, *ranks: int) -> Deed:
    def deed(run: Run) -> None:
        for rank in ranks:
            os.kill(run.pids[rank], signum)

    return deed


def kill_server(run: Run) -> None:
    """As soon as there is one that listens."""
    until(lambda: any(listening_ports(p.pid) for p in servers(run)), "a server to listen")
    servers(run)[0].kill()


def servers(run: Run) -> list[psutil.Process]:
    return [
        p for p in run.remains.processes() if "slipstream.runtime.servers.server" in p.cmdline()
    ]


def worker_killed(strategy: str, rank: int) -> Scene:
    deed = send(signal.SIGKILL, rank)
    return Scene(f"rank {rank} killed, {strategy}", strategy, f"rank {rank}", "none", rank, deed)


SCENES = [
    worker_killed("push_pull", 1),
    worker_killed("allreduce", 1),
    worker_killed("all_to_all", 1),
    worker_killed("push_pull", 0),
    worker_killed("allreduce", 0),
    Scene("server killed", "push_pull", "server 0", deed=kill_server),
    Scene("worker raises", "push_pull", "rank 2", "raise", 2, culprit_code=1),
    Scene("worker raises, allreduce", "allreduce", "rank 2", "raise", 2, culprit_code=1),
    Scene("rank 0 raises", "push_pull", "rank 0", "raise", 0, culprit_code=1),
    Scene(
        "rank 0 raises when all have finished",
        "push_pull",
        "rank 0",
        "raise last",
        culprit=0,
        when="finished",
        culprit_code=1,
    ),
    Scene("worker exits", "push_pull", "rank 1", "exit", 1, culprit_code=3),
    Scene(
        "worker stopped, then continued",
        "push_pull",
        "rank 2",
        culprit=2,
        deed=send(signal.SIGSTOP, 2),
        afterwards=send(signal.SIGCONT, 2),
        culprit_code=PEER_FAILED,
    ),
    Scene(
        "killed in distribute",
        "push_pull",
        "rank 1",
        "lingers",
        culprit=1,
        deed=send(signal.SIGKILL, 1),
        when="joined",
    ),
    Scene(
        "server killed in distribute",
        "push_pull(update='server')",
        "server 0",
        deed=kill_server,
        when="joined",
    ),
    Scene(
        "rank 0 hangs before init",
        "push_pull",
        "rank 0",
        "hangs",
        culprit=0,
        when="started",
        codes=(1,),
        afterwards=send(signal.SIGKILL, 0),
    ),
    Scene("rank 0 never comes", "push_pull", "rank 0", "nobody comes", absent=(0,), codes=(1,)),
    Scene("rank 2 never comes", "push_pull", "rank 2", "nobody comes", absent=(2,), codes=(1,)),
]


@pytest.fixture(scope="module")
def launched(launch: Callable[..., Launch]) -> dict[str, Launch]:
    """Jobs under ``slipstream run``, to each of which something is done once it trains."""
    colocated = (SLIPSTREAM, "run", "--workers=2", str(WORKER), "push_pull", "none")
    dedicated = (*colocated[:3], "--servers=1", *colocated[3:])
    jobs = {name: launch(*colocated) for name in ("worker stopped", "interrupted")}
    jobs["server killed"] = launch(*dedicated)
    for job in jobs.values():
        files = [job.folder / f"training.{rank}" for rank in range(2)]
        until(lambda files=files: all(f.exists() for f in files), "training")
        job.remains.note_ports()
    os.kill(int((jobs["worker stopped"].folder / "training.1").read_text()), signal.SIGSTOP)
    jobs["interrupted"].send(signal.SIGINT)
    processes = jobs["server killed"].remains.processes()
    next(p for p in processes if "slipstream.runtime.servers.server" in p.cmdline()).kill()
    for job in jobs.values():
        job.note_moment()
    return jobs


@pytest.fixture(scope="module")
def scenes(fork_server: ForkServer, launched: dict[str, Launch]) -> dict[str, Scene]:
    """Several at a time: most of a fault is waiting for somebody who has gone silent."""
    for first in range(0, len(SCENES), AT_A_TIME):
        together = SCENES[first : first + AT_A_TIME]
        for scene in together:
            scene.start(fork_server)
        for scene in together:
            scene.strike()
        for scene in together:
            scene.see_out()
    return {scene.name: scene for scene in SCENES}


@pytest.mark.parametrize("name", [scene.name for scene in SCENES])
def test_survivors_end_soon_and_name_the_peer(scenes: dict[str, Scene], name: str) -> None:
    scene = scenes[name]
    run = scene.run
    codes = run.wait()
    lasted_s = max(run.ended[rank] for rank in scene.survivors) - scene.moment
    assert lasted_s < END_S, run.told()
    lines = run.own_lines()
    assert len(lines) == 1, run.told()
    assert scene.blamed in lines[0], run.told()
    assert {codes[rank] for rank in scene.survivors} <= set(scene.codes), run.told()
    if scene.culprit >= 0:
        assert codes[scene.culprit] == scene.culprit_code
    assert run.remains.left() == []


def test_own_error_is_shown_where_it_happened_and_told_to_the_others(
    scenes: dict[str, Scene],
) -> None:
    run = scenes["worker raises"].run
    assert "ValueError: no luck today" in run.stderr(2)
    assert "Traceback" in run.stderr(2)
    assert run.own_lines()[0] == "slipstream: rank 2 failed: ValueError: no luck today"
    assert "Traceback" not in run.stderr(0) + run.stderr(1)
    last = run.stderr(0).splitlines()[-1]
    assert last.startswith("  on rank 2, at "), "the line that failed, not the one that waited"
    assert last.endswith('raise ValueError("no luck today")')


def test_interrupted_everywhere(fork_server: ForkServer) -> None:
    """What Ctrl-C in a terminal does where no launcher of ours stands between."""
    run = fork_server.start(WORKER, "push_pull", "none", ranks=WORKERS)
    until(lambda: run.marked("training"), "training")
    moment = time.monotonic()
    send(signal.SIGINT, 0, 1, 2)(run)
    codes = run.wait()
    assert max(run.ended.values()) - moment < END_S
    assert 0 not in codes
    assert len(run.own_lines()) <= 1, run.told()
    assert run.remains.left() == []


def test_dedicated_server_killed(launched: dict[str, Launch]) -> None:
    job = launched["server killed"]
    assert job.wait() == 128 + signal.SIGKILL
    assert job.lasted_s < END_S
    assert any(line.startswith("slipstream: server 0 was killed") for line in job.own_lines)
    assert job.remains.left() == []


def test_worker_stopped_under_the_launcher(launched: dict[str, Launch]) -> None:
    """The others end at once, the launcher when it has given up on the one that is stopped."""
    job = launched["worker stopped"]
    assert job.wait() != 0
    assert job.lasted_s < 3 * END_S
    assert job.own_lines[0].startswith("slipstream: rank 1 is lost"), job.stderr
    assert job.remains.left() == []


def test_ctrl_c_in_training(launched: dict[str, Launch]) -> None:
    job = launched["interrupted"]
    assert job.wait() == 128 + signal.SIGINT
    assert job.lasted_s < END_S
    assert job.own_lines == ["slipstream: stopped by Ctrl-C"]
    assert "Traceback" not in job.stderr
    assert job.remains.left() == []
