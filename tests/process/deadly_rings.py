"""Learners that push whole numbers and are killed anywhere; prints what the weights came to.

    deadly_rings.py LEARNERS KILLS SEED

No torch here: a learner is a fork, so that hundreds of them can die in seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time

import numpy as np

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.planning.segment import DENSE, ROWS, SegmentPlan, SharedTensor, settings_vector
from slipstream.runtime.shared_memory.messages import Start
from slipstream.runtime.shared_memory.update_server import UpdateServer
from slipstream.transports.shared_memory import SharedMemory

ROWS_SHAPE, WIDTH = 40, 50
PLAN = SegmentPlan.of(
    [
        SharedTensor("whole", (3000,), "float32", 4, 0),
        SharedTensor("rows", (ROWS_SHAPE, WIDTH), "float32", 4, 0, in_rows=True),
    ],
    groups=1,
)
SLOTS = 2
LIMIT_S = 60.0
PR_SET_PDEATHSIG = 1


def value(learner: int, number: int) -> int:
    return 1 + (3 * learner + number) % 7


def serve(memory: SharedMemory) -> None:
    settings = [settings_vector("SGD", {"lr": 1.0})]
    start = Start("job", PLAN, "SGD", settings, False, False, "", 1e9)
    server = UpdateServer(start, memory)
    while server.serve_one(0.1) or not server.rings.closing:
        pass
    os._exit(1 if server.refused else 0)


def learn(memory: SharedMemory, learner: int) -> None:
    rings = Rings(memory.memory)
    while True:
        slot = rings.reserve(learner, 1.0)
        if slot is None:
            continue
        number = rings.pushed(learner)
        raw = memory.view(rings.slot_at(learner, slot), PLAN.slot_nbytes)
        amount = value(learner, number)
        whole, rows = PLAN.gradients
        # In pieces, so that there is time to die in between.
        for at in range(0, 3000, 100):
            np.frombuffer(raw, np.float32, 100, whole.at + 4 * at)[:] = amount
        row = number % ROWS_SHAPE
        at = rows.at + 4 * row * WIDTH
        np.frombuffer(raw, np.float32, WIDTH, at)[:] = amount
        np.frombuffer(raw, np.int64, 1, rows.numbers_at)[:] = row
        np.frombuffer(raw, np.float64, 8, PLAN.settings_at)[:] = settings_vector("SGD", {"lr": 1.0})
        np.frombuffer(raw, np.uint64, 2)[:] = [DENSE, ROWS + 1]
        np.frombuffer(raw, np.uint64, 1, PLAN.version_at)[:] = rings.version
        rings.publish(learner)


def fork(run, *args) -> int:  # type: ignore[no-untyped-def]
    pid = os.fork()
    if pid == 0:
        # Whatever ends the script, its learners and its server end with it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            run(*args)
        finally:
            os._exit(2)
    return pid


def main() -> None:
    learners, kills, seed = (int(word) for word in sys.argv[1:])
    random.seed(seed)
    shape = (learners, SLOTS, PLAN.slot_nbytes, PLAN.weights_nbytes)
    memory = SharedMemory.create(segment_nbytes(*shape))
    format_segment(memory.memory, *shape)
    rings = Rings(memory.memory)
    server = fork(serve, memory)
    pids = [fork(learn, memory, learner) for learner in range(learners)]
    begun = time.monotonic()
    while not all(rings.pushed(learner) for learner in range(learners)):
        time.sleep(0.001)  # nobody dies before it has lived
        if time.monotonic() > begun + LIMIT_S:
            sys.exit(f"a learner has pushed nothing for {LIMIT_S} s")
    stalled_s, moved, version = 0.0, time.monotonic(), rings.version
    for _ in range(kills):
        until = time.monotonic() + random.uniform(0.0, 0.01)
        while time.monotonic() < until:
            now = time.monotonic()
            if rings.version != version:
                stalled_s, moved, version = max(stalled_s, now - moved), now, rings.version
            time.sleep(0.0002)
        victim = random.randrange(learners)
        os.kill(pids[victim], signal.SIGKILL)
        os.waitpid(pids[victim], 0)
        pids[victim] = fork(learn, memory, victim)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    rings.close()
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    pushed = [rings.pushed(learner) for learner in range(learners)]
    weights = np.frombuffer(memory.memory, np.float32, PLAN.weights_nbytes // 4, rings.weights_at)
    at = PLAN.weights_at[1] // 4
    expected_rows = [0] * ROWS_SHAPE
    for learner in range(learners):
        for number in range(pushed[learner]):
            expected_rows[number % ROWS_SHAPE] -= value(learner, number)
    table = weights[at : at + ROWS_SHAPE * WIDTH].reshape(ROWS_SHAPE, WIDTH)
    found = {
        "server": code,
        "pushed": pushed,
        "version": rings.version,
        "whole": sorted({float(each) for each in weights[:3000]}),
        "expected": float(sum(expected_rows)),
        "rows_right": bool((table == np.array(expected_rows, np.float32)[:, None]).all()),
        "stalled_s": stalled_s,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
