"""The metrics of a job in one of its processes: recorded, written to outputs, and summed up."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.methods import SharedMemoryUpdates
from slipstream.plan import Plan
from slipstream.runtime.figures.replica_reports import Difference
from slipstream.runtime.figures.summary import WorkerFigures
from slipstream.runtime.figures.telemetry import (
    Prometheus,
    RunLog,
    TensorBoard,
    Watcher,
    Watchers,
    reason_of,
    warn,
)
from slipstream.runtime.files.record_file import write_json
from slipstream.runtime.process.environment import Environment
from slipstream.torch.distribute.training import Training

Figure = float | torch.Tensor | None


class JobFigures:
    """The metrics that the loop records, and their outputs (on rank 0)."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._watchers = Watchers()
        self._given: list[Watcher] = []  # before training begins
        self._begun = time.monotonic()
        self._samples = 0
        self._latest: dict[str, float] = {}
        self.strategy = ""  # its name

    def begin(self, strategy: str) -> None:
        """Training begins: start the clock, and open the outputs."""
        self.strategy = strategy
        if self._env.rank == 0:
            self._open_outputs()
        given, self._given = self._given, []
        for watcher in given:
            self.watch(watcher)
        self._begun = time.monotonic()

    def watch(self, watcher: Watcher) -> None:
        """Add an output of the loop's own; see ``Job.watch``."""
        if self._env.rank > 0:
            return
        if not self.strategy:
            self._given.append(watcher)
            return
        self._watchers.add(lambda: watcher)
        self._watchers.note_event("start", self._header, only=watcher)

    @property
    def _header(self) -> dict[str, Any]:
        return {"strategy": self.strategy, "workers": self._env.world_size}

    def _open_outputs(self) -> None:
        log, board, port = self._env.log, self._env.tensorboard, self._env.prometheus
        again = self._env.started_again
        if log is not None:
            self._watchers.add(
                lambda: RunLog(log, self._header, self._env.incarnation), training=again
            )
        if board is not None:
            self._watchers.add(lambda: TensorBoard(board), training=again)
        if port is not None:
            self._watchers.add(lambda: Prometheus(port), training=again)

    def record(self, training: Training, given: Mapping[str, Figure], samples: int) -> None:
        """Record metrics of a step, and write them to the outputs."""
        self._samples += samples
        now = {
            key: number(f"job.record({key}={value!r})", value)
            for key, value in given.items()
            if value is not None
        }
        self._latest.update(now)
        if self._watchers:
            cost = training.mode.figures()
            now |= {
                "samples": self._samples,
                "sent_bytes": cost.traffic.sent,
                "received_bytes": cost.traffic.received,
                "wait_s": cost.wait_s,
            }
            self._watchers.note(training.mode.committed, now)

    def of_worker(self, training: Training) -> WorkerFigures:
        """This worker's metrics so far."""
        training.mode.wait()  # the fingerprint needs weights that are up to date
        cost, prints = training.mode.figures(), training.fingerprints()
        return WorkerFigures(
            strategy=self.strategy,
            workers=self._env.world_size,
            servers=cost.servers,
            steps=training.mode.committed,
            wall_s=time.monotonic() - self._begun,
            samples=self._samples,
            loss=self._latest.get("loss"),
            accuracy=self._latest.get("accuracy"),
            weights_sha256=prints and prints.whole,
            traffic=cost.traffic,
            wait_s=cost.wait_s,
            faults={"refused_frames": cost.refused},
            rank=self._env.rank,
            parameters_sha256=prints and prints.parameters,
            settings=training.settings(),
            replicas=training.mode.replica_reports(),
        )

    def publish(self, summary: dict[str, Any]) -> None:
        """Write the job's metrics to the outputs, and to the file of ``--json``."""
        for event in ("rounds", "staleness"):
            if event in summary:
                self._watchers.note_event(event, summary[event])
        if self._env.json is None:
            return
        try:
            write_json(self._env.json, summary)
        except OSError as error:
            # The model is trained; at least do not lose the metrics.
            warn(
                f"the figures cannot be written to {self._env.json} ({reason_of(error)}); "
                f"here they are:\n{json.dumps(summary)}"
            )

    def close(self, error: str | None = None) -> None:
        """Close the outputs, after the error that has ended the job, if any."""
        if error is not None:
            self._watchers.note_event("failed", {"error": error})
        self._watchers.close()


def warn_of(summary: Mapping[str, Any], plan: Plan, *, dealt: bool) -> None:
    """Warn about results that are not what the strategy stands for.

    Args:
        dealt: whether the loop's batches came from ``job.sampler``.
    """
    if not (dealt or plan.keeps_dropped):
        warn_of_dropped(summary)
    shared = isinstance(
        plan.strategy.method, SharedMemoryUpdates
    )  # others still train when a learner ends
    lockstep = (
        plan.delivers_every_result and plan.partial_exchange is None and plan.local_steps is None
    )
    if lockstep and not shared:
        warn_of_difference(summary, plan.strategy.name)


def warn_of_difference(summary: Mapping[str, Any], name: str) -> None:
    """Warn about replicas that should be equal and are not, with the first parameter and why."""
    first, *others = summary["per_worker"] or [{}]
    differ = [o["rank"] for o in others if o["parameters_sha256"] != first["parameters_sha256"]]
    found = Difference(**summary["difference"]) if "difference" in summary else None
    if found is None or not found.is_over:
        if not differ or (found is not None and found.is_reported):
            return
    elif found.is_reported:
        return
    rank = differ[0] if found is None else found.rank
    when = "has ended" if differ else "has trained"
    warnings.warn(
        f"rank {rank} {when} with other weights than rank 0, although {name} keeps them equal"
        + ("" if found is None else f": {found.text}"),
        stacklevel=7,
    )


def warn_of_dropped(summary: Mapping[str, Any]) -> None:
    """Warn about workers whose gradients were dropped more often than not."""
    rounds = summary.get("rounds", {"made": {}, "dropped": {}})
    for rank, number in sorted(rounds["dropped"].items()):
        made = rounds["made"].get(rank, 0)
        if number > made:
            warnings.warn(
                f"{number} of rank {rank}'s {number + made} gradients came too late to count: if "
                "data are dealt by rank (DistributedSampler), most of its samples were never "
                "learnt from; job.sampler(dataset) deals them to fast workers",
                stacklevel=7,
            )


def number(call: str, value: float | torch.Tensor) -> float:
    """One number as the user gave it to a call; raises ConfigError for anything else."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{call}: give one number") from error
