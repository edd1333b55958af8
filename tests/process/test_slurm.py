"""A bare ``srun python train.py``, in a Slurm of the test's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import Launch
from slurm_cluster import SlurmCluster, why_not

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SCRIPT = str(Path(__file__).with_name("ways_worker.py"))
SRUN = ("srun", "--quiet", "--nodes")
FIGURES = {"SLIPSTREAM_JSON": "figures.json"}
NO_HOME = {"XDG_CONFIG_HOME": "/dev/null/config"}  # where no secret can be made
ON_LOOPBACK = {"MASTER_ADDR": "127.0.0.1"}  # both nodes are this machine


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster, launch: Callable[..., Launch]) -> dict[str, Launch]:
    """All at a time: most of each is spent importing torch."""
    env = {**cluster.env, **FIGURES, "OMP_NUM_THREADS": ""}
    python = (sys.executable, SCRIPT)
    batch = cluster.folder / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {SCRIPT}\n")
    submit = ("sbatch", "--quiet", "--wait", "--ntasks=2", "--output=batch.out", str(batch))
    return {
        "one node": launch(*SRUN, "1", "--ntasks=3", *python, env=env),
        "two nodes": launch(*SRUN, "2", "--ntasks=3", *python, env=env | ON_LOOPBACK),
        "no secret": launch(*SRUN, "2", "--ntasks=2", *python, env=env | NO_HOME),
        "batch script": launch(*submit, env=env),
    }


def figures(job: Launch) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((job.folder / "figures.json").read_text())
    return told


@pytest.mark.parametrize("where", ["one node", "two nodes"])
def test_the_tasks_of_a_step_are_one_job(
    cluster: SlurmCluster, jobs: dict[str, Launch], where: str
) -> None:
    job = jobs[where]
    assert job.wait() == 0, job.stderr + cluster.told()
    told = figures(job)
    assert told["workers"] == 3
    assert len(told["weights_sha256"]) == 3
    assert len(set(told["weights_sha256"])) == 1
    assert job.own_lines == []


def test_a_batch_script_is_one_process(cluster: SlurmCluster, jobs: dict[str, Launch]) -> None:
    job = jobs["batch script"]
    assert job.wait() == 0, job.stderr + cluster.told()
    assert figures(job)["workers"] == 1


def test_several_nodes_take_a_secret(jobs: dict[str, Launch]) -> None:
    job = jobs["no secret"]
    assert job.wait() != 0
    assert "MASTER_ADDR=node01 is another host: across hosts a job secret is needed" in job.stderr
