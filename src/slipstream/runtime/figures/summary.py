"""The metrics of a run: of one worker, and of all workers together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slipstream.runtime.figures.replica_reports import ReplicaReport


class Traffic(msgspec.Struct, frozen=True):
    """Bytes of one worker. ``local`` went to the colocated server; ``control`` is everything except
    training payload: headers, heartbeats, the first copy of the weights."""

    sent: int = 0
    received: int = 0
    local: int = 0
    control: int = 0
    by_scheme: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """The cost of one worker's training so far; ``refused`` counts frames."""

    servers: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    wait_s: float = 0.0
    refused: int = 0


class WorkerFigures(msgspec.Struct, frozen=True):
    """The metrics of one worker."""

    strategy: str
    workers: int
    servers: int
    steps: int
    wall_s: float
    samples: int
    loss: float | None
    accuracy: float | None
    weights_sha256: str | None
    traffic: Traffic
    wait_s: float
    faults: dict[str, int]
    rank: int = 0
    parameters_sha256: str | None = None
    settings: list[dict[str, str]] = []  # of the optimizers, by parameter group
    replicas: list[ReplicaReport | None] = []  # by model, where all workers' are equal

    def encode(self) -> bytes:
        """Return the metrics as bytes, for another rank."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> WorkerFigures:
        """Decode what ``encode`` returned."""
        return msgspec.json.decode(content, type=cls)


def combine(figures: Sequence[WorkerFigures]) -> dict[str, Any]:
    """Combine all workers' metrics: totals of bytes and samples, the mean of time waited."""
    first = figures[0]
    wall_s = max(worker.wall_s for worker in figures)
    samples = sum(worker.samples for worker in figures)
    by_scheme: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    traffic = dict.fromkeys(("sent", "received", "local", "control"), 0)
    for worker in figures:
        for way in traffic:
            traffic[way] += getattr(worker.traffic, way)
        by_scheme.update(worker.traffic.by_scheme)
        faults.update(worker.faults)
    return {
        "strategy": first.strategy,
        "workers": first.workers,
        "servers": first.servers,
        "steps": first.steps,
        "wall_s": wall_s,
        "samples": samples,
        "samples_per_s": samples / wall_s if wall_s > 0 else 0.0,
        "loss": first.loss,
        "accuracy": first.accuracy,
        "weights_sha256": [worker.weights_sha256 for worker in figures],
        "bytes": {**traffic, "by_scheme": dict(by_scheme)},
        "wait_s": sum(worker.wait_s for worker in figures) / len(figures),
        "faults": dict(faults),
        "per_worker": [per_worker(worker) for worker in figures] if len(figures) > 1 else [],
    }


def per_worker(figures: WorkerFigures) -> Mapping[str, Any]:
    """Return one worker's entry in the summary."""
    plain: dict[str, Any] = msgspec.to_builtins(figures)
    fields = (
        "rank",
        "steps",
        "wall_s",
        "samples",
        "loss",
        "wait_s",
        "parameters_sha256",
        "settings",
    )
    return {**{key: plain[key] for key in fields}, "bytes": plain["traffic"]}
