"""Trials of the bench from one fork server: those that fail, and what is timed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from slipstream.apps.bench.comparison import Bounds, Ground, Run, measure
from slipstream.apps.bench.fork_server import Place
from slipstream.apps.bench.process_group import ForkServer, TrialFailed
from slipstream.apps.bench.tables import table
from slipstream.apps.bench.trial import Trial

pytestmark = pytest.mark.process

SHORT = Trial(workload="text", steps=3, warmup=1)
UNBOUND = Bounds(None, None)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def parent(fork_server: ForkServer) -> psutil.Process:
    return psutil.Process(fork_server._process.pid)


def workers_left(parent: psutil.Process) -> list[int]:
    _, left = psutil.wait_procs(parent.children(), timeout=LIMIT_S)
    return [child.pid for child in left]


def run(fork_server: ForkServer, trial: Trial, workers: int) -> Run:
    return measure(trial, Ground(workers, 0, None), fork_server, UNBOUND)


def test_an_emulated_step_takes_the_tables_time(fork_server: ForkServer) -> None:
    expected_s = table("googlenet").step_ms / 1000
    trial = Trial(workload="vgg", device="googlenet", steps=3, warmup=1)
    # Others may want the machine's cores, and a step that was held up makes the next one shorter:
    # one undisturbed run is enough.
    tries: list[float] = []
    while len(tries) < 25:
        tries.append(run(fork_server, trial, 1).step_s)
        if 0.999 * expected_s < tries[-1] < 1.03 * expected_s:
            return
    raise AssertionError(f"no step took {expected_s} s: {tries}")


def test_a_worker_that_cannot_start_fails_the_trial_and_the_others_go(
    fork_server: ForkServer, parent: psutil.Process
) -> None:
    good, *_ = Ground(2, 0, None).places({})
    bad = Place(good.env | {"RANK": "1"}, namespace="no-such-namespace")
    waiting = Trial(workload="text", system="ddp")
    with (
        pytest.raises(TrialFailed, match="not every worker started") as failure,
        fork_server.process_group(waiting, [good, bad]),
    ):
        pass
    assert "no-such-namespace" in str(failure.value)
    assert workers_left(parent) == []


def test_a_worker_that_fails_says_why_and_the_next_trial_is_not_disturbed(
    fork_server: ForkServer, parent: psutil.Process
) -> None:
    failing = Trial(workload="text", system="no_such_system")
    with pytest.raises(TrialFailed, match="ended before 'ready'") as failure:
        run(fork_server, failing, 2)
    assert "--- rank 1" in str(failure.value)
    assert "UnknownStrategy" in str(failure.value)
    assert workers_left(parent) == []
    assert len(run(fork_server, SHORT, 2).timings) == 2


def test_a_killed_worker_fails_the_trial(fork_server: ForkServer, parent: psutil.Process) -> None:
    endless = Trial(workload="text", steps=10**9, warmup=1)
    places = Ground(2, 0, None).places({})
    with fork_server.process_group(endless, places) as process_group:
        process_group.hear("ready", LIMIT_S)
        process_group.tell()
        os.kill(process_group._pids[1], signal.SIGKILL)
        with pytest.raises(TrialFailed, match="rank 1 ended before 'timed'"):
            process_group.hear("timed", LIMIT_S)
    assert workers_left(parent) == []


def test_a_process_that_has_the_number_of_an_ended_worker_lives(fork_server: ForkServer) -> None:
    endless = Trial(workload="text", steps=10**9, warmup=1)
    newcomer = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        with fork_server.process_group(endless, Ground(1, 0, None).places({})) as process_group:
            process_group.hear("ready", LIMIT_S)
            os.kill(process_group._pids[0], signal.SIGKILL)
            with pytest.raises(TrialFailed, match="rank 0 ended before 'timed'"):
                process_group.hear("timed", LIMIT_S)
            process_group._pids[0] = newcomer.pid  # as if the kernel had given it the number
        run(fork_server, SHORT, 1)  # what the trial before had left is dealt with by then
        assert newcomer.poll() is None
    finally:
        newcomer.kill()
        newcomer.wait()


def test_silent_workers_are_not_waited_for_for_ever(
    fork_server: ForkServer, parent: psutil.Process
) -> None:
    places = Ground(2, 0, None).places({})
    with fork_server.process_group(SHORT, places) as process_group:
        process_group.hear("ready", LIMIT_S)
        # Nobody told them to go on.
        with pytest.raises(TrialFailed, match="no 'timed' from rank 0, 1 within 0 s"):
            process_group.hear("timed", 0.2)
    assert workers_left(parent) == []
