"""What a test of training asks of workers, and what they wrote down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Asked:
    """One job: what is trained, by whom, and whether every step is looked at."""

    workers: int
    case: str
    strategy: str
    optimizer: str = "sgd"
    servers: int = 1
    look: bool = True  # not: nothing waits for the weights but the model itself
    attempt: int = 0

    def __str__(self) -> str:
        again = f"-{self.attempt}" if self.attempt else ""
        kind, look = self.optimizer, "" if self.look else "-unseen"
        of = f"{self.servers}s" if "push_pull" in self.strategy else ""
        return f"{self.case}-{kind}-{self.strategy}-{self.workers}w{of}{look}{again}"


@dataclass(frozen=True)
class Outcome:
    """What a job's workers wrote down, by rank, and rank 0's weights at the end."""

    digests: list[list[str]]
    notes: list[list[object]]
    summary: list[str]
    nbytes: dict[str, int]  # that travelled, by scheme
    state: dict[str, torch.Tensor]


def read_outcome(folder: Path, number: int, workers: int) -> Outcome:
    """Of the job of this number that workers have run."""
    files = [folder / f"{number}.{rank}.json" for rank in range(workers)]
    told = [json.loads(file.read_text()) for file in files]
    errors = [f"rank {rank}: {t['error']}" for rank, t in enumerate(told) if "error" in t]
    assert not errors, "\n".join(errors)
    return Outcome(
        [t["digests"] for t in told],
        [t["notes"] for t in told],
        told[0]["summary"],
        told[0]["nbytes"],
        torch.load(folder / f"{number}.pt"),
    )


def assert_equal_throughout(outcome: Outcome, looks: int) -> None:
    first = outcome.digests[0]
    assert len(first) == looks
    for rank, digests in enumerate(outcome.digests):
        differ = [step for step in range(looks) if digests[step] != first[step]]
        assert not differ, f"rank {rank} differs from rank 0 after steps {differ}"
    assert len(set(outcome.summary)) == 1
    assert len(outcome.summary) == len(outcome.digests)
