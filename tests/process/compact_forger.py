"""Trains a job twice; the second time rank 1 sends rank 0 compact gradients that it must refuse."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from poseidon_cases import SYSTEMS
from torch import nn

import slipstream
from slipstream.job import Job
from slipstream.plan import Plan
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.transports.wire import Early, Push, Rows, checksum
from slipstream.types import Buffer

STEPS, FORGED_STEP, ROWS = 12, 5, 3
WORDS, WIDTH, OUTPUTS = 20, 16, 4
FLOAT, IDS = 1, 5  # how a matrix's header numbers its dtype


def matrix(rows: int, width: int, dtype: int = FLOAT, content: bytes | None = None) -> list[Buffer]:
    """As one travels, with a header of its own."""
    size = 8 if dtype == IDS else 4
    header = struct.pack("<QB7x", rows, dtype)
    return [header, bytes(rows * width * size) if content is None else content]


def layers(plan: Plan) -> tuple[int, int]:
    """The units of the embedding and of the linear layer."""
    found = {unit.layer.form: unit.index for unit in plan.units if unit.layer is not None}
    return found["rows"], found["factors"]


def forge(member: Any, plan: Plan) -> int:
    """How many messages that fit nothing."""
    embedding, linear = layers(plan)
    good = [*matrix(ROWS, WIDTH), *matrix(ROWS, OUTPUTS)]
    huge = struct.pack("<QB7x", 2**61, FLOAT)
    kinds: list[tuple[int, list[Buffer]]] = [
        (999, []),
        (linear, matrix(ROWS, WIDTH)),
        (linear, [*matrix(ROWS, WIDTH), *matrix(ROWS, OUTPUTS, content=bytes(4))]),
        (linear, [huge, good[1], huge, good[3]]),
        (linear, [*matrix(ROWS, WIDTH, IDS), *matrix(ROWS, OUTPUTS)]),
        (linear, [*matrix(ROWS, WIDTH), *matrix(ROWS + 1, OUTPUTS)]),
        (linear, [b"", *good[1:]]),
        (embedding, [*matrix(ROWS, 1), *matrix(ROWS, WIDTH)]),
        (embedding, [*matrix(1, 1, IDS, np.array([WORDS]).tobytes()), *matrix(1, WIDTH)]),
        (embedding, [*matrix(1, 1, IDS, np.array([-1]).tobytes()), *matrix(1, WIDTH)]),
    ]
    bodies: list[tuple[Any, list[Buffer]]] = [
        (Push(unit, FORGED_STEP, FORGED_STEP, [len(frames)], checksum(frames)), frames)
        for unit, frames in kinds
    ]
    crc, first = checksum(good), good[:2]
    inputs = checksum(first)
    bodies += [
        (Push(linear, FORGED_STEP, 5, [4], crc ^ 1), good),
        (Push(linear, FORGED_STEP + 9, 5, [4], crc), good),
        (Push(linear, FORGED_STEP, 5, [3], crc), good),
        (Push(embedding, FORGED_STEP, 5, [4], crc, early=True), good),
        (Early(linear, FORGED_STEP + 9, inputs), first),
        (Early(embedding, FORGED_STEP, inputs), first),
        (Early(linear, FORGED_STEP, inputs ^ 1), first),
        (Rows(FORGED_STEP, [1, 1]), []),
    ]
    for body, frames in bodies:
        member.send("rank 0", body, frames)
    # A heartbeat would be sent in rank 2's name, too.
    tick_at, member.pump.tick_at = member.pump.tick_at, float("inf")
    member.transport.name = "rank 2"
    member.send("rank 0", Push(linear, FORGED_STEP, 5, [4], crc), good)
    member.transport.name = member.name
    member.pump.tick_at = tick_at
    return len(bodies) + 1


def train(forging: bool) -> tuple[Job, int]:
    forged = 0
    with slipstream.init(servers=1) as job:
        torch.manual_seed(1)
        embedding, linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        model: nn.Module = nn.Sequential(embedding, nn.Tanh(), linear)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.distribute(model, optimizer, SYSTEMS["everything"]())
        if forging and job.rank == 0:
            # Else its own gradients that do not fit would end the job.
            assert isinstance(job._training.mode, NetworkedMode)
            del job._training.mode.membership.member.coordination.processes["rank 1"]
        data = torch.Generator().manual_seed(job.rank)
        for step in range(STEPS):
            optimizer.zero_grad()
            words = torch.randint(WORDS, (ROWS,), generator=data)
            F.mse_loss(model(words), torch.ones(ROWS, OUTPUTS)).backward()
            optimizer.step()
            if forging and step == FORGED_STEP - 1 and job.rank == 1:
                assert isinstance(job._training.mode, NetworkedMode)
                forged = forge(job._training.mode.membership.member, job.plan)
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
