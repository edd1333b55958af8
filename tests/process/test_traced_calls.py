"""How far a flush goes, and how many files a gradient passes, in a job of two workers."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from call_trace import CallTrace, Stack
from fork_server import ForkServer

from counters.limits import MEASURED, WRITE, load, trouble
from counters.source import NOT_CORE

WORKER = Path(__file__).with_name("traced_worker.py")
TRAINING, MESSAGES = "MainThread", "slipstream rank 0"  # threads
CHANNEL = "RoundChannel"  # the class that sends contributions over links


def hops_of_flush(stacks: Sequence[Stack]) -> list[str]:
    """Functions from ``job.flush`` to the channel, both included, each once.

    Where several paths lead to the channel, the longest one is taken.
    """
    chains = [
        list(dict.fromkeys(name for _, name in stack))
        for stack in stacks
        if is_of_channel(stack[-1][1]) and not any(is_of_channel(name) for _, name in stack[:-1])
    ]
    return max(chains, key=len)


def files_of_a_gradient(training: Sequence[Stack], messages: Sequence[Stack]) -> list[str]:
    """Files whose functions run at a worker for a gradient, from its hook to its update.

    On the training thread: within ``backward()`` and ``optimizer.step()``. On the thread that
    handles messages: before and after a call of the channel's, so that heartbeats do not count.
    The servers' side does not count.
    """
    handled = [stack for stack in messages if any(is_of_channel(name) for _, name in stack)]
    assert handled, f"no call of {CHANNEL} was traced"
    return sorted({file for stack in (*training, *handled) for file, _ in stack})


def is_of_channel(name: str) -> bool:
    return name.startswith(f"{CHANNEL}.")


@pytest.fixture(scope="module")
def calls(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[Stack]]]:
    folder = tmp_path_factory.mktemp("calls")
    servers = {"SLIPSTREAM_SERVERS": "1"}
    run = fork_server.run(WORKER, str(folder), ",".join(NOT_CORE), ranks=2, env=servers)
    assert set(run.codes.values()) == {0}, run.told()
    told: dict[str, dict[str, list[Stack]]] = json.loads((folder / "calls.0.json").read_text())
    return told


def check(name: str, places: list[str], about: str) -> None:
    assert name in MEASURED
    message = trouble(name, places, load()[name], about, f"{WRITE} {name}={len(places)}")
    assert not message, message


@pytest.mark.process
def test_flush_is_at_most_so_many_calls_from_the_channel(
    calls: dict[str, dict[str, list[Stack]]],
) -> None:
    hops = hops_of_flush(calls["flush"][TRAINING])
    assert hops[0] == "Job.flush"
    check("hops_of_flush", hops, "Calls from job.flush to the channel.")


@pytest.mark.process
def test_gradient_passes_at_most_so_many_files(calls: dict[str, dict[str, list[Stack]]]) -> None:
    updates = calls["updates"]
    files = files_of_a_gradient(updates[TRAINING], updates[MESSAGES])
    assert any("BackwardTap." in name for stack in updates[TRAINING] for _, name in stack)
    check("files_of_a_gradient", files, "Core files that one gradient of push_pull passes.")


# ---- how it is counted


def test_hops_are_those_of_the_longest_path_to_the_channel() -> None:
    path = [("a", "Job.flush"), ("b", "Parts.wait"), ("b", "Parts.wait"), ("c", "Driver.wait")]
    channel = ("d", "RoundChannel.wait")
    stacks = [path[:1], path, (*path[:1], channel), (*path, channel), (*path, channel, channel)]
    found = hops_of_flush([tuple(stack) for stack in stacks])
    assert found == ["Job.flush", "Parts.wait", "Driver.wait", "RoundChannel.wait"]


def test_files_of_other_messages_are_not_the_gradients() -> None:
    training = [(("tap.py", "hook"),), (("tap.py", "hook"), ("driver.py", "Driver.ready"))]
    result = (("pump.py", "run"), ("rounds.py", "RoundChannel.on_result"), ("dense.py", "decode"))
    messages = [(("pump.py", "run"), ("beat.py", "beat")), result]
    found = files_of_a_gradient(training, messages)
    assert found == ["dense.py", "driver.py", "pump.py", "rounds.py", "tap.py"]


def outer(inner: object) -> None:
    assert callable(inner)
    assert sorted(inner(each) for each in range(1)) == [0]


def inner(number: int) -> int:
    return number


def test_trace_has_stacks_of_one_package_by_thread() -> None:
    trace = CallTrace({__file__: "here.py"}.get)
    trace.install()
    try:
        outer(inner)
        with trace.recording():
            outer(inner)
            thread = threading.Thread(target=inner, args=[1], name="other")
            thread.start()
            thread.join()
        inner(2)
    finally:
        trace.remove()
    here = {"here.py"}
    assert {file for stacks in trace.stacks.values() for s in stacks for file, _ in s} == here
    this = {tuple(name for _, name in stack)[1:] for stack in trace.stacks["MainThread"]}
    assert this == {("outer",), ("outer", "inner")}
    assert trace.stacks["other"] == {(("here.py", "inner"),)}
