"""Trains several pairs of a model and an optimizer, a job a case, and writes down the end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from pair_cases import CASES, ROUNDS, Loop, Pair, state_of

import slipstream


def distributed(job: Any, pairs: list[Pair], asked: dict[str, Any]) -> list[Pair]:
    strategy = asked["strategy"]
    if asked.get("calls"):
        return [job.distribute(*pair, strategy if n == 0 else None) for n, pair in enumerate(pairs)]
    return job.distribute(pairs, strategy)


def train(asked: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    case = CASES[asked["case"]]
    told: dict[str, Any] = {}
    limits = {"start_limit_s": 90, "wait_limit_s": 60, "silence_limit_s": 10}
    with slipstream.init(servers=asked.get("servers"), **limits) as job:
        given = case.pairs(seed=job.rank)  # rank 0's weights are what counts
        for group in given[1][1].param_groups if not asked.get("momentum", True) else ():
            group["momentum"] = 0.0
        pairs = distributed(job, given, asked)
        assert [model for model, _ in pairs] == [model for model, _ in given]
        loop = Loop(pairs, asked.get("ranks") or (job.rank,))
        if asked.get("live"):
            loop.backward_for = job.backward_for
        if asked.get("wait"):
            loop.wait = job.wait
        if asked.get("load"):
            told["refused"] = [refusal(job, path) for path in asked.get("misfits", ())]
            job.load(asked["load"])
            loop.drawn = asked["drawn"]
        for number in range(asked.get("from", 0), asked.get("until", ROUNDS)):
            if number == asked.get("die") and job.rank == job.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case.round(loop, number)
        if asked.get("save"):
            job.save(asked["save"])
        job.wait()
        told |= {"step": job.step, "drawn": loop.drawn, "table": job.plan_table()}
        if asked.get("averaged"):
            with job.averaged_weights():
                told["averaged"] = digest(pairs)
        told["stats"] = job.stats()
    told["digest"] = digest(pairs)
    told["parts"] = {name: tensor.sum().item() for name, tensor in state_of(pairs).items()}
    if job.summary is not None:
        told["summary"] = job.summary
    return told, state_of(pairs)


def refusal(job: Any, path: str) -> str:
    try:
        job.load(path)
    except slipstream.ConfigError as error:
        return str(error)
    return "none"


def digest(pairs: list[Pair]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(state_of(pairs).items()):
        total.update(name.encode())
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    folder, rank = Path(sys.argv[1]).parent, os.environ.get("RANK", "0")
    warnings.simplefilter("error")
    # Rounds that are closed by time drop as much as the machine is slow.
    warnings.filterwarnings("ignore", "[0-9]+ of rank [0-9]+'s [0-9]+ gradients came too late")
    start_servers_by_fork()
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        try:
            outcome, state = train(asked)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            state = {}
        (folder / f"{asked['name']}.{rank}.json").write_text(json.dumps(outcome))
        if rank == "0":
            torch.save(state, folder / f"{asked['name']}.pt")


if __name__ == "__main__":
    main()
