"""Trains a job twice; the second time rank 1 sends rank 0 compact gradients that it must refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from poseidon_cases import SYSTEMS
from torch import nn

import slipstream
from slipstream.job import Job
from slipstream.transports.wire import Compact, Early, Rows, checksum
from slipstream.types import Buffer

STEPS, FORGED_STEP, ROWS = 12, 5, 3
WORDS, WIDTH, OUTPUTS = 20, 16, 4
EMBEDDING, LINEAR = 0, 1
FLOATS = ("float32", "float32")
KINDS: list[tuple[int, int, tuple[str, str], list[Buffer]]] = [
    (7, ROWS, FLOATS, []),
    (LINEAR, ROWS, FLOATS, [bytes(ROWS * WIDTH * 4)]),
    (LINEAR, ROWS, FLOATS, [bytes(ROWS * WIDTH * 4), bytes(ROWS * OUTPUTS * 4 + 4)]),
    (LINEAR, 2**61, FLOATS, [bytes(ROWS * WIDTH * 4), bytes(ROWS * OUTPUTS * 4)]),
    (LINEAR, ROWS, ("int64", "float32"), [bytes(ROWS * WIDTH * 8), bytes(ROWS * OUTPUTS * 4)]),
    (EMBEDDING, ROWS, ("float32", "float32"), [bytes(ROWS * 4), bytes(ROWS * WIDTH * 4)]),
    (EMBEDDING, 1, ("int64", "float32"), [np.array([WORDS]).tobytes(), bytes(WIDTH * 4)]),
    (EMBEDDING, 1, ("int64", "float32"), [np.array([-1]).tobytes(), bytes(WIDTH * 4)]),
]


def forge(member: Any) -> int:
    """How many messages that fit nothing."""
    for layer, rows, dtypes, frames in KINDS:
        crc = checksum(frames)
        body = Compact(layer, FORGED_STEP, FORGED_STEP, True, rows, dtypes, crc)
        member.send("rank 0", body, frames)
    good: list[Buffer] = [bytes(ROWS * WIDTH * 4), bytes(ROWS * OUTPUTS * 4)]
    crc = checksum(good)
    member.send("rank 0", Compact(LINEAR, FORGED_STEP, 5, True, ROWS, FLOATS, crc ^ 1), good)
    member.send("rank 0", Compact(LINEAR, FORGED_STEP + 9, 5, True, ROWS, FLOATS, crc), good)
    member.send("rank 0", Compact(LINEAR, FORGED_STEP, 5, False, 0, ("", ""), crc), good)
    far = FORGED_STEP + 9  # beyond what rank 1 itself is about to say
    inputs = checksum(good[:1])
    for early in (
        Early(LINEAR, far, ROWS, "float32", inputs),
        Early(LINEAR, FORGED_STEP, 2**61, "float32", inputs),
        Early(EMBEDDING, FORGED_STEP, ROWS, "float32", inputs),
        Early(LINEAR, FORGED_STEP, ROWS, "float32", inputs ^ 1),
    ):
        member.send("rank 0", early, good[:1])
    counting = Compact(EMBEDDING, FORGED_STEP, 5, True, ROWS, FLOATS, crc, early=True)
    member.send("rank 0", counting, good)
    member.send("rank 0", Rows(FORGED_STEP, [1, 1]))
    beat_at, member._beat_at = member._beat_at, float("inf")  # a beat would be rank 2's, too
    member.name, own = "rank 2", member.name
    member.transport.name = "rank 2"
    member.send("rank 0", Compact(LINEAR, FORGED_STEP, 5, True, ROWS, FLOATS, crc), good)
    member.transport.name = member.name = own
    member._beat_at = beat_at
    return len(KINDS) + 10


def train(forging: bool) -> tuple[Job, int]:
    forged = 0
    with slipstream.init(servers=1) as job:
        torch.manual_seed(1)
        embedding, linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        model: nn.Module = nn.Sequential(embedding, nn.Tanh(), linear)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.distribute(model, optimizer, SYSTEMS["everything"])
        if forging and job.rank == 0:
            # Else its own gradients that do not fit would end the job.
            assert job._membership is not None
            del job._membership.member._processes["rank 1"]
        data = torch.Generator().manual_seed(job.rank)
        for step in range(STEPS):
            optimizer.zero_grad()
            words = torch.randint(WORDS, (ROWS,), generator=data)
            F.mse_loss(model(words), torch.ones(ROWS, OUTPUTS)).backward()
            optimizer.step()
            if forging and step == FORGED_STEP - 1 and job.rank == 1:
                assert job._membership is not None
                forged = forge(job._membership.member)
    return job, forged


if __name__ == "__main__":
    undisturbed, _ = train(forging=False)
    disturbed, forged = train(forging=True)
    if undisturbed.rank == 1:
        print(forged)
    else:
        for job in (undisturbed, disturbed):
            assert job.summary is not None
            print(job.summary["weights_sha256"], job.summary["faults"]["refused_frames"])
