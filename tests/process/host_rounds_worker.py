"""Trains where hosts may miss rounds; writes down which rounds a worker made, and of what."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from mix_worker import RATE, batch, build, weights

import slipstream
from slipstream.torch.modes.networked import NetworkedMode

MOMENTUM, MARK_S = 0.5, 60.0


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def hold_back(folder: Path, rank: int, late: list[int], taken: int) -> None:
    """The late ranks begin when the others have made two rounds without them."""
    if taken == 0 and rank in late:
        deadline = time.monotonic() + MARK_S
        while not (folder / "ahead").exists():
            assert time.monotonic() < deadline, "the others do not go on without this host"
            time.sleep(0.005)
    elif taken == 2 and rank == 0:
        (folder / "ahead").touch()


def note_makers(job: slipstream.Job, told: dict[str, Any]) -> None:
    """On rank 0: who made each round, as all servers say when nothing changes any more."""
    mode = job._training.mode
    assert isinstance(mode, NetworkedMode)
    service, accounts = mode.parts[0].service, mode.accounts
    assert service is not None

    def noted() -> dict[str, Any]:
        told["makers"] = [msgspec.to_builtins(each)["makers"] for each in service.accounts()]
        return accounts()

    mode.accounts = noted  # type: ignore[method-assign]


def main(strategy: str, folder: str, options: str) -> None:
    start_servers_by_fork()
    asked = json.loads(options)
    model = build(torch.float64)
    optimizer = optimizer_of(model)
    rounds: list[int] = []
    limits = {"wait_limit_s": 20, "silence_limit_s": asked.get("silence_s", 10)}
    with slipstream.init(servers=asked.get("servers", 2), start_limit_s=30, **limits) as job:
        model, optimizer = job.distribute(model, optimizer, strategy)
        if asked.get("load"):
            job.load(asked["load"])
        for round_ in job.steps(asked["steps"]):
            hold_back(Path(folder), job.rank, asked["late"], len(rounds))
            if [job.rank, len(rounds)] == asked.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            inputs, targets = batch(job.rank, round_, torch.float64)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            rounds.append(round_)
            if asked.get("save") and round_ + 1 == asked["steps"] // 2:
                job.save(asked["save"])
        told: dict[str, Any] = {}
        note_makers(job, told)
        job.stats()  # asks the servers, on every rank
        if job.plan.update.average is not None:
            with job.averaged_weights():
                told["averaged"] = weights(model)
    told |= {"weights": weights(model), "digest": digest(model), "rounds": rounds, "step": job.step}
    Path(folder, f"{job.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
