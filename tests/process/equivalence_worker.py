"""Trains cases one after the other, a job each, and writes down what every step led to."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import CASES, STEPS, Loop, digest, state_of
from forked_servers import start_servers_by_fork

import slipstream
from slipstream.strategy import Strategy

SYSTEMS: dict[str, Callable[[], Strategy]] = {}  # those that no text can say
BEFORE_EACH: list[Callable[[], None]] = []  # case


def train(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    for prepare in BEFORE_EACH:
        prepare()
    case = CASES[asked["case"]]
    digests: list[str] = []
    with slipstream.init(
        servers=asked["servers"], start_limit_s=60, wait_limit_s=60, silence_limit_s=10
    ) as job:
        model = case.distributed_model()
        if job.rank > 0:
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.add_(1)  # rank 0's weights are what counts
        optimizer = case.optimizer(model, asked["optimizer"])
        schedulers: list[Any] = []
        if case.schedule_before_distribute:
            schedulers = case.schedulers(optimizer, asked["optimizer"])
        name = asked["strategy"]
        strategy = SYSTEMS[name]() if name in SYSTEMS else name
        same, optimizer = job.distribute(model, optimizer, strategy)
        assert same is model
        if not case.schedule_before_distribute:
            schedulers = case.schedulers(optimizer, asked["optimizer"])
        model = case.after_distribute(model)
        ranks = (job.rank,)
        loop = Loop(model, optimizer, schedulers, ranks, job.world_size, job.accumulate)
        for step in range(STEPS):
            case.step(loop, step)
            if asked["look"]:
                job.wait()
                digests.append(digest(model))
        job.wait()
        digests.append(digest(model))
    told = {"digests": digests, "notes": loop.notes}
    if job.summary:
        told["summary"] = job.summary["weights_sha256"]
        told["nbytes"] = job.summary["bytes"]["by_scheme"]
    return told, state_of(model)


def main() -> None:
    plan, folder, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("RANK", "0")
    warnings.simplefilter("error")
    start_servers_by_fork()
    # torch's compiler looks at every attribute of what crosses a graph break.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    for number, asked in enumerate(json.loads(plan.read_text())):
        try:
            outcome, state = train(asked)
        except Exception:
            outcome, state = {"error": traceback.format_exc()}, {}
        (folder / f"{number}.{rank}.json").write_text(json.dumps(outcome))
        if rank == "0":
            torch.save(state, folder / f"{number}.pt")


if __name__ == "__main__":
    main()
