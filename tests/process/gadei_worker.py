"""A learner on shared memory, told what to do by its arguments: CASE FOLDER [MORE].

Gradients are whole numbers and the rate is 1, so that weights count what was applied.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import slipstream
from slipstream.systems import parse

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
GONE_ON = 100  # steps since somebody was struck
LIFE = os.environ.get("SLIPSTREAM_INCARNATION", "0")
# Named in the script, if it is; else the command line's.
STRATEGY = parse(os.environ["NAMED"]) if "NAMED" in os.environ else None


class Counting(nn.Module):
    """The gradient of both tensors is what is fed: everywhere, and in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.zeros(500))
        self.rows = nn.Embedding(10, 4)
        nn.init.zeros_(self.rows.weight)

    def forward(self, number: int, row: int) -> torch.Tensor:
        return number * (self.whole.sum() + self.rows(torch.tensor([row])).sum())


def tell(job: slipstream.Job, **told: Any) -> None:
    (FOLDER / f"{job.rank}.{LIFE}.json").write_text(json.dumps(told))


def digest(model: nn.Module) -> str:
    state = b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())
    return hashlib.sha256(state).hexdigest()


def server() -> psutil.Process:
    for process in psutil.Process(os.getppid()).children():
        if "slipstream.runtime.shared_memory.update_server" in process.cmdline():
            return process
    raise RuntimeError("there is no server")


def counting(job: slipstream.Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Counting()
    return job.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), STRATEGY)


def counted() -> None:
    """Every learner takes STEPS steps; afterwards the weights have all of them."""
    steps = int(sys.argv[3])
    with slipstream.init() as job:
        model, optimizer = counting(job)
        for step in range(steps):
            optimizer.zero_grad()
            model(1 + (job.rank + step) % 5, step % 10).backward()
            optimizer.step()
        shared = job.broadcast(f"of rank {job.rank}")
    tell(
        job,
        whole=sorted(set(model.whole.tolist())),
        rows=[sorted(set(row)) for row in model.rows.weight.tolist()],
        shared=shared,
        summary=job.summary,
    )


def absent() -> None:
    """Rank 1 never joins, and ends AT ONCE or AFTER TRAINING of the other."""
    if os.environ["RANK"] == "1":
        while sys.argv[3] == "after training" and not (FOLDER / "0.0.json").exists():
            time.sleep(0.01)
        return
    with slipstream.init() as job:
        model, optimizer = counting(job)
        for _ in job.steps(20 if sys.argv[3] == "after training" else 10**6):
            optimizer.zero_grad()
            model(1, 0).backward()
            optimizer.step()
        tell(job, steps=job.step)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 20), nn.Flatten(), nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 2)
    )


def right(model: nn.Module) -> float:
    rows = torch.randint(0, 50, (2000, 3), generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        return float((model(rows).argmax(1) == (rows[:, 0] > 25)).float().mean())


def learning() -> None:
    """Train to TOTAL updates; AT some of them, WHOM is killed, stopped or failed by rank 1."""
    total, whom, at = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    kind = sys.argv[6] if len(sys.argv) > 6 else "SGD"
    begun, longest, since = 0, 0.0, 0
    if whom == "learner" and LIFE != "0":
        # Whoever waited for the one that was killed would wait for ever.
        deadline = time.monotonic() + 60
        while not (FOLDER / "gone on").exists():
            assert time.monotonic() < deadline, "rank 0 waits for the one that was killed"
            time.sleep(0.01)
    with slipstream.init() as job:
        model = net()
        rate = 0.1 if kind == "SGD" else 0.01
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=rate)
        model, optimizer = job.distribute(model, optimizer, STRATEGY)
        begun = job.step
        generator = torch.Generator().manual_seed(job.rank)
        done, struck = time.monotonic(), False
        for step in job.steps(total):
            while step > begun and not kept_midway():
                time.sleep(0.01)
            rows = torch.randint(0, 50, (16, 3), generator=generator)
            loss = nn.functional.cross_entropy(model(rows), (rows[:, 0] > 25).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.record(loss=loss.detach(), samples=16)
            longest, done = max(longest, time.monotonic() - done), time.monotonic()
            time.sleep(0.002)
            since += (FOLDER / "struck").exists()
            if since == GONE_ON:
                (FOLDER / "gone on").touch()
            if job.rank == 1 and LIFE == "0" and step >= at and not struck:
                struck = True
                (FOLDER / "struck").touch()
                strike(whom)
    tell(
        job,
        begun=begun,
        steps=job.step,
        right=right(model),
        digest=digest(model),
        longest=longest,
        summary=job.summary,
    )


def kept_midway() -> bool:
    """Whether the directory that was named, if any, has a checkpoint of some updates."""
    if len(sys.argv) <= 7:
        return True
    names = [file.stem for file in Path(sys.argv[7]).glob("weights-*.safetensors")]
    return any(int(name.removeprefix("weights-")) for name in names)


def strike(whom: str) -> None:
    if whom == "learner":
        os.kill(os.getpid(), signal.SIGKILL)
    elif whom == "server":
        server().kill()
    elif whom == "server hangs":
        server().suspend()
    elif whom == "exit 0":
        os._exit(0)
    elif whom == "itself":
        raise ZeroDivisionError("on purpose")
    elif whom == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)


def sampled() -> None:
    """Two epochs of a data set of numbers; each counts itself."""
    with slipstream.init() as job:
        model, optimizer = counting(job)
        seen = []
        batches = job.sampler(range(101), 5)
        for _ in range(2):
            for numbers in batches:
                optimizer.zero_grad()
                model(1, 0).backward()
                optimizer.step()
                seen += numbers
    tell(job, seen=seen, updates=-model.whole[0].item())


def dealt() -> None:
    """Two epochs of SAMPLES batches, slowly until there is a file ``enough``; weights count."""
    samples = int(sys.argv[3])
    with slipstream.init() as job:
        model, optimizer = counting(job)
        batches = job.sampler(range(samples), 1)
        for _ in range(2):
            for numbers in batches:
                optimizer.zero_grad()
                model(1, numbers[0] % 10).backward()
                optimizer.step()
                (FOLDER / f"progress.{job.rank}").touch()
                if not (FOLDER / "enough").exists():
                    # So slowly that there are batches left when all have been killed, also where
                    # processes take long to start again.
                    time.sleep(0.02)
    tell(
        job,
        whole=sorted(set(model.whole.tolist())),
        rows=[sorted(set(row)) for row in model.rows.weight.tolist()],
    )


def saved() -> None:
    """Rank 0 saves on the way; a job of another kind can load it."""
    with slipstream.init() as job:
        model = net()
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = job.distribute(model, optimizer, STRATEGY)
        if len(sys.argv) > 3:
            job.load(sys.argv[3])
        begun = job.step
        for _ in range(50):
            rows = torch.randint(0, 50, (16, 3))
            loss = nn.functional.cross_entropy(model(rows), (rows[:, 0] > 25).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        job.save(FOLDER / "saved")
        stats = job.stats()
    tell(job, begun=begun, steps=job.step, staleness=stats.get("staleness"))


def mistaken() -> None:
    """What cannot work: WHAT."""
    what = sys.argv[3]
    with slipstream.init() as job:
        model: nn.Module = nn.Linear(4, 3 if what == "models" and job.rank == 1 else 2)
        if what == "dtype":
            model = model.to(torch.bfloat16)
        kind = torch.optim.Adadelta if what == "optimizer" else torch.optim.SGD
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1)
        other = what == "strategy" or (what == "one strategy" and job.rank == 1)
        strategy = slipstream.push_pull() if other else STRATEGY
        if what == "share first":
            job.broadcast(job.rank)
        if what == "exception" and job.rank == 1:
            raise ZeroDivisionError("on purpose")
        model, optimizer = job.distribute(model, optimizer, strategy)
        for _ in job.steps(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()


def again() -> None:
    """Another job in the same processes, when the first has ended."""
    counted()
    counted()


CASES = {
    "again": again,
    "absent": absent,
    "counted": counted,
    "learning": learning,
    "sampled": sampled,
    "dealt": dealt,
    "saved": saved,
    "mistaken": mistaken,
}

if __name__ == "__main__":
    CASES[CASE]()
