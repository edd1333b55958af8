"""What srun says, read as a launcher's variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import LaunchError
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.slurm import PORTS, hosts, slurm_variables, tasks_by_node

# As Slurm 22.05 sets them for the second task on the first of two nodes.
TASK = {
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "login,node[01-02]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def test_a_task_of_a_step() -> None:
    found = slurm_variables(TASK)
    assert int(found.pop("MASTER_PORT")) in PORTS
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node01",
        "OMP_NUM_THREADS": "4",
    }
    env = Environment.read({**TASK, **slurm_variables(TASK)})
    assert (env.rank, env.world_size, env.one_host) == (1, 3, False)


def test_a_step_on_one_node_stays_on_loopback() -> None:
    one = {"SLURM_STEP_NODELIST": "node07", "SLURM_STEP_TASKS_PER_NODE": "3"}
    env = Environment.read(slurm_variables({**TASK, **one}))
    assert (env.one_host, env.store_address, env.local_world_size) == (True, "127.0.0.1", 3)


def test_a_batch_script_is_one_process() -> None:
    """It has the number of tasks that srun would start, but no step."""
    batch = {name: text for name, text in TASK.items() if "_STEP_" not in name}
    assert slurm_variables(batch) == {}


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"RANK": "0", "WORLD_SIZE": "8"},  # torchrun, on each node
        {"WORLD_SIZE": "1"},  # how a user says that the tasks train each for itself
    ],
)
def test_other_launchers_and_single_tasks_have_their_way(more: dict[str, str]) -> None:
    assert slurm_variables({**TASK, **more}) == {}


def test_what_is_set_stays() -> None:
    given_by_user = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "5"}
    found = slurm_variables({**TASK, **given_by_user})
    assert not found.keys() & given_by_user.keys()
    assert found["RANK"] == "1"
    assert slurm_variables({**TASK, "RANK": "", "MASTER_ADDR": ""})["MASTER_ADDR"] == "node01"


@pytest.mark.parametrize(
    ("more", "threads"),
    [
        ({}, "4"),
        ({"SLURM_CPUS_PER_TASK": "3"}, "3"),
        ({"SLURM_NODEID": "1"}, "8"),
        ({"SLURM_CPUS_ON_NODE": "1"}, "1"),
        ({"SLURM_CPUS_ON_NODE": ""}, "1"),
    ],
)
def test_tasks_of_a_node_share_no_core(more: dict[str, str], threads: str) -> None:
    assert slurm_variables({**TASK, **more})["OMP_NUM_THREADS"] == threads


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = {
        slurm_variables({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[
            "MASTER_PORT"
        ]
        for job in range(4711, 4761)
        for step in range(50)
    }
    assert len(ports) == 50 * 50


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("gpu2", ["gpu2"]),
        ("gpu2,node7", ["gpu2", "node7"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[7]", ["node7"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a[1-2],b,c[3,5-6]", ["a1", "a2", "b", "c3", "c5", "c6"]),
        ("rack[1-2]n[08-09]", ["rack1n08", "rack1n09", "rack2n08", "rack2n09"]),
        ("n[1-2].cluster-a.example", ["n1.cluster-a.example", "n2.cluster-a.example"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert list(hosts(text)) == names


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=6))
def test_tasks_of_nodes(groups: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups)
    assert tasks_by_node(text) == [tasks for tasks, nodes in groups for _ in range(nodes)]


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("SLURM_PROCID", "first", "SLURM_PROCID='first' is not a whole number"),
        ("SLURM_STEP_NUM_TASKS", "3x", "SLURM_STEP_NUM_TASKS='3x'"),
        ("SLURM_STEP_NODELIST", "node[a-b]", r"SLURM_STEP_NODELIST has \[a-b\]"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(3)", r"SLURM_STEP_TASKS_PER_NODE='2\(3\)'"),
    ],
)
def test_what_slurm_never_sets_is_quoted(variable: str, text: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        slurm_variables({**TASK, variable: text})
