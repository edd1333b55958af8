"""A job step of Slurm: the variables of ``srun``, as those that other launchers set.

Only ``SLURM_STEP_*`` counts. A batch script has ``SLURM_NTASKS`` too, but is one process; so is a
program that it starts without ``srun``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from slipstream.errors import LaunchError

PORTS = range(12288, 32768)  # below those that Linux gives to outgoing connections
STEPS_APART = 101  # consecutive jobs on one node have ports apart, and so have their steps


def slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and so on for a task in a step of several tasks; empty for any other process.

    MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS are left out if they are set already.

    >>> step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_STEP_NODELIST": "n[07-08]"}
    >>> found = slurm_variables({**step, "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"})
    >>> found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"], found["MASTER_PORT"]
    ('2', '3', 'n07', '14005')

    Raises:
        LaunchError: A variable is not what Slurm sets.
    """
    tasks = number(env, "SLURM_STEP_NUM_TASKS", 1)
    if env.get("RANK") or env.get("WORLD_SIZE") or tasks == 1:
        return {}
    step = STEPS_APART * number(env, "SLURM_JOB_ID", 0) + number(env, "SLURM_STEP_ID", 0)
    variables = {
        "RANK": str(number(env, "SLURM_PROCID", 0)),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(number(env, "SLURM_LOCALID", 0)),
        "MASTER_ADDR": next(hosts(env.get("SLURM_STEP_NODELIST", "")), ""),
        "MASTER_PORT": str(PORTS[step % len(PORTS)]),
    }
    by_node = tasks_by_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = number(env, "SLURM_NODEID", 0)
    if node < len(by_node):
        variables["LOCAL_WORLD_SIZE"] = str(by_node[node])
        variables["OMP_NUM_THREADS"] = str(cores(env, by_node[node]))
    return {name: text for name, text in variables.items() if text and not env.get(name)}


def cores(env: Mapping[str, str], tasks: int) -> int:
    """Return the number of cores of a task, so that the tasks of a node do not share any."""
    on_node = number(env, "SLURM_CPUS_ON_NODE", tasks)
    return number(env, "SLURM_CPUS_PER_TASK", max(1, on_node // tasks))


def hosts(text: str) -> Iterator[str]:
    """Yield the names in a list of nodes.

    >>> list(hosts("node[01-03,7],gpu2"))
    ['node01', 'node02', 'node03', 'node7', 'gpu2']
    """
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", pattern)  # text and ranges in turn
        choices = [[part] if place % 2 == 0 else spread(part) for place, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def spread(ranges: str) -> list[str]:
    """Return the numbers in ``01-03,7``, with their leading zeros."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise LaunchError(f"SLURM_STEP_NODELIST has [{ranges}], which is no list of numbers")
        numbers += [f"{each:0{len(first)}d}" for each in range(int(first), int(last or first) + 1)]
    return numbers


def tasks_by_node(text: str) -> list[int]:
    """Return the numbers of tasks, node by node.

    >>> tasks_by_node("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        LaunchError: The text is no such list.
    """
    tasks: list[int] = []
    for part in filter(None, text.split(",")):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if matched is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is no list such as 2(x3),1")
        tasks += [int(matched[1])] * int(matched[2] or 1)
    return tasks


def number(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable that is a whole number, from 0; the default if it is not set."""
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise LaunchError(f"{name}={text!r} is not a whole number")
    return int(text)
