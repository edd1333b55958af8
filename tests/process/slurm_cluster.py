"""A Slurm of its own on this machine: munge, a controller and two nodes, in one folder.

Needs root, because slurmd starts tasks as their user.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port

from slipstream.runtime.process.slurm import PORTS, STEPS_APART

LIMIT_S = 120.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
NODES = ("node01", "node02")
JOBS = 8  # more than a test starts

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldParameters=enable_configless
ReturnToService=2
FirstJobId={first}
SchedulerType=sched/builtin
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=16\n"


def why_not() -> str:
    """Why a cluster cannot be started here; empty if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed: {', '.join(missing)} (Debian: slurmctld slurmd munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def first_job_and_ports(daemons: int) -> tuple[int, set[int]]:
    """The number of the first job, and ports of daemons, which are no ports of the first jobs.

    The ports of jobs come from their numbers; another cluster on this machine has others.
    """
    while True:
        first = 1 + secrets.randbelow(1_000_000)
        of_jobs = {PORTS[STEPS_APART * job % len(PORTS)] for job in range(first, first + JOBS)}
        if all(map(is_free, of_jobs)):
            break
    ports: set[int] = set()
    while len(ports) < daemons:
        ports |= {free_port()} - of_jobs
    return first, ports


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False


class SlurmCluster:
    """Runs from ``start`` to ``close``; its processes end with this object."""

    def __init__(self) -> None:
        # Outside of pytest's folder, which other users may not enter, and munge minds that.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "state").mkdir()
        first, (port, *of_nodes) = first_job_and_ports(1 + len(NODES))
        text = CONFIGURATION.format(host=host, port=port, folder=folder, first=first)
        for name, port in zip(NODES, of_nodes, strict=True):
            text += NODE.format(name=name, port=port)
            (folder / f"spool-{name}").mkdir()
        (folder / "slurm.conf").write_text(text)
        files = {"key": "key", "log": "log", "pid": "pid", "seed": "seed"}
        options = [f"--{kind}-file={folder}/munge.{end}" for kind, end in files.items()]
        self._spawn("munged", "--foreground", f"--socket={folder}/munge.socket", *options)
        self._until(lambda: (folder / "munge.socket").exists(), "munge")
        self._spawn("slurmctld", "-D", "-i")
        for name in NODES:
            self._spawn("slurmd", "-D", "-N", name)
        self._until(lambda: self._idle() == len(NODES), "nodes to be idle")

    def _spawn(self, *command: str) -> None:
        with (self.folder / "output").open("ab") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _idle(self) -> int:
        asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
        done = subprocess.run(asked, env=os.environ | self.env, capture_output=True, text=True)
        return done.stdout.split().count("idle")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            ended = [each.args for each in self._processes if each.poll() is not None]
            if ended or time.monotonic() > deadline:
                pytest.fail(f"waited for {what}; {ended} have ended:\n{self.told()}")
            time.sleep(0.1)

    def told(self) -> str:
        """What the daemons wrote, for the message of a test that fails."""
        files = [self.folder / "output", *sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {f.name}\n{f.read_text()[-3000:]}" for f in files if f.exists())

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
