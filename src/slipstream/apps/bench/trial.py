"""One run of one system, as data: a worker's input and its results."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import msgspec

from slipstream.apps.bench.stragglers import parse_stragglers
from slipstream.apps.bench.tables import Table, table
from slipstream.apps.bench.workloads import Workload, emulated, known, parse_sizes, workload
from slipstream.errors import ConfigError


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a trial: what to train, for how long, and with which delays."""

    workload: str
    system: str = "local"
    batch: int | None = None  # of one worker
    steps: int = 10
    warmup: int = 3
    seed: int = 0
    data: str | None = None
    scale: float | None = None
    sizes: str = ""  # of the workload's net, such as "layers=2,width=64"
    device: str | None = None  # a table's name or file, or milliseconds a step
    straggle: str = ""
    base_s: float | None = None  # the time that stragglers multiply; by default the computation's
    lr: float | None = None
    momentum: float | None = None
    evaluate_every: int = 0  # steps; 0: only at the end
    threads: int = 1

    @property
    def paced_ms(self) -> float | None:
        """The time of a step on the emulated device, if the net itself is a real one."""
        try:
            return None if self.device is None else float(self.device)
        except ValueError:
            return None

    @property
    def table(self) -> Table | None:
        """The emulated net, if nothing is computed."""
        if self.device is None or self.paced_ms is not None:
            return None
        found = table(self.device)
        return found if self.scale is None else found.scaled(self.scale)

    def load(self) -> Workload:
        """Return the workload; raise if it is invalid, before any process starts."""
        parse_stragglers(self.straggle)
        if self.paced_ms is not None and not 0 < self.paced_ms < math.inf:
            raise ConfigError(f"--device-ms {self.device}: a step takes more than 0 ms, and ends")
        if (net := self.table) is not None:
            known(self.workload)
            return emulated(net)
        data = None if self.data is None else Path(self.data)
        return workload(self.workload, data=data, scale=self.scale, sizes=parse_sizes(self.sizes))


def loaded(trial: Trial) -> Workload:
    """Return the trial's workload; data that was read once is not read again."""
    fields = ("workload", "data", "scale", "sizes", "device")
    return _load(Trial(**{name: getattr(trial, name) for name in fields}))


@functools.cache
def _load(bare: Trial) -> Workload:
    return bare.load()


class Snapshot(msgspec.Struct, frozen=True):
    """The model's metric at a time."""

    step: int
    seconds: float
    metric: float


class Timing(msgspec.Struct, frozen=True):
    """One worker's measurements, while only training ran."""

    elapsed_s: float
    cpu_s: float
    steps_s: list[float]
    compute_s: float  # forward and backward alone, the median step's


class Judgement(msgspec.Struct, frozen=True):
    """One worker's evaluation afterwards."""

    metric: float | None
    snapshots: list[Snapshot]
    stats: dict[str, Any]
