"""A comparison of systems: in turns, each time with new workers, on the same links.

Other load on the machine then affects all of them equally; what counts are ratios.
"""

from __future__ import annotations

import itertools
import os
import platform
import secrets
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from slipstream.apps.bench.bounds import Shape, dense_bytes, exact_bytes, seconds
from slipstream.apps.bench.contestants import check, is_peer, why_missing
from slipstream.apps.bench.fork_server import Place
from slipstream.apps.bench.process_group import ForkServer, TrialFailed
from slipstream.apps.bench.stragglers import parse_stragglers
from slipstream.apps.bench.trial import Judgement, Snapshot, Timing, Trial
from slipstream.apps.bench.workloads import Workload
from slipstream.apps.lab import Lab, Traffic, bits_per_second
from slipstream.errors import ConfigError
from slipstream.runtime.launch.processes import Placement, start_server
from slipstream.transports.credentials import Credentials, stretch

COMPUTE_ALONE = "local"
PORT = 29500
START_LIMIT_S = 180.0
JUDGE_LIMIT_S = 600.0
BUDGET_S = 12.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The systems to compare, and the workload; ``trial`` is the same for all but the system."""

    trial: Trial
    systems: tuple[str, ...]
    workers: int = 4
    servers: int = 0  # dedicated ones, on separate hosts
    rate: str | int | float | None = None
    repetitions: int = 3
    target: float | None = None

    def check(self, workload: Workload) -> None:
        """Check the comparison before any process starts."""
        if not self.systems:
            raise ConfigError("there is no system to measure; name one, such as push_pull")
        for system in self.systems:
            check(system)
        if len(set(self.systems)) < len(self.systems):
            raise ConfigError("a system is named twice in the comparison; name each once")
        parse_stragglers(self.trial.straggle).check(self.workers)
        batch = (self.trial.batch or workload.batch) * self.workers
        workload.batches(0, self.workers, batch, self.trial.seed)
        if self.target is not None and workload.goal is None:
            raise ConfigError(
                f"{workload.name} learns nothing, so it has no target; take mnist, fashion, lr, "
                "mf, alexnet, text, gpt or recommender, or leave the target out"
            )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of a step, by part; None if unknown."""

    dense_s: float | None
    exact_s: float | None
    compute_s: float | None = None

    @property
    def step_s(self) -> float | None:
        known = [value for value in (self.exact_s, self.compute_s) if value is not None]
        return max(known) if known else None


@dataclass(frozen=True, slots=True)
class Run:
    """One trial's outcome."""

    step_s: float
    timings: tuple[Timing, ...]
    judgements: tuple[Judgement, ...]
    links: tuple[Traffic, ...]  # by host: workers first, then servers


@dataclass(slots=True)
class Outcome:
    """All repetitions of one system."""

    system: str
    steps: int
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> list[float]:
        return [run.step_s for run in self.runs]

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.step_s) if self.runs else None

    @property
    def compute_s(self) -> float | None:
        """The time of forward and backward, including any waits of a system within them."""
        times_s = [timing.compute_s for run in self.runs for timing in run.timings]
        return statistics.median(times_s) if times_s else None

    @property
    def link_bytes(self) -> float | None:
        """The busiest link's bytes per step, sent or received."""
        bytes_per_step = [
            max(max(link.sent, link.received) for link in run.links) / self.steps
            for run in self.runs
            if run.links
        ]
        return statistics.median(bytes_per_step) if bytes_per_step else None

    @property
    def metric(self) -> float | None:
        """The metric of the final weights, the mean over workers."""
        metrics = [j.metric for run in self.runs for j in run.judgements if j.metric is not None]
        return statistics.mean(metrics) if metrics else None

    def reached(self, good: Callable[[float], bool]) -> list[Snapshot | None]:
        """Return, by run, the first snapshot that was good enough, or None."""
        return [
            next((s for s in run.judgements[0].snapshots if good(s.metric)), None)
            for run in self.runs
        ]


class Ground:
    """The place of workers: one on each host of a lab, or all on this machine's loopback."""

    def __init__(
        self, workers: int, servers: int, lab: Lab | None, ports: Iterator[int] | None = None
    ) -> None:
        self.workers, self.servers, self._lab = workers, servers, lab
        # A new port for each trial: the first worker of the last trial may not have ended yet.
        self._ports = ports or itertools.count(PORT)

    def places(self, env: dict[str, str]) -> list[Place]:
        port = next(self._ports) if self._lab else free_port()
        return [self._place(rank, port, env) for rank in range(self.workers)]

    def _place(self, rank: int, port: int, env: dict[str, str]) -> Place:
        own = env | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if self._lab is None:
            local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.workers)}
            return Place(own | local | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})
        host = self._lab.hosts[rank]
        own |= {"MASTER_ADDR": self._lab.hosts[0].address, "GLOO_SOCKET_IFNAME": host.interface}
        return Place(own, host.name)

    def server_places(self) -> list[Placement]:
        if self._lab is None:
            return [Placement()] * self.servers
        return [Placement(h.prefix, h.address) for h in self._lab.hosts[self.workers :]]

    def bytes(self) -> tuple[Traffic, ...]:
        return self._lab.bytes() if self._lab else ()


@contextmanager
def ground(comparison: Comparison) -> Iterator[Ground]:
    """Yield a lab for the block, or plain loopback."""
    workers, servers = comparison.workers, comparison.servers
    if comparison.rate is None:
        yield Ground(workers, servers, None)
    else:
        with Lab(hosts=workers + servers, rate=comparison.rate) as lab:
            yield Ground(workers, servers, lab)


def compare(
    comparison: Comparison, workload: Workload, note: Callable[[str], None]
) -> tuple[list[Outcome], Bounds]:
    """Run all trials; ``note`` gets a line about each. Failed trials are in the outcomes."""
    bounds = wire_bounds(comparison, workload)
    steps = comparison.trial.steps or fitting_steps(bounds, comparison)
    ready = [system for system in comparison.systems if why_missing(system) is None]
    for system in comparison.systems:
        if (reason := why_missing(system)) is not None:
            note(f"{system} is left out: {reason}")
    alone = Outcome(COMPUTE_ALONE, min(steps, 10))
    outcomes = [Outcome(system, steps) for system in ready]
    with ground(comparison) as where, ForkServer() as fork_server:
        for repetition in range(comparison.repetitions):
            for outcome in (alone, *outcomes):
                result = _run_once(outcome, comparison, where, fork_server, bounds, alone.compute_s)
                note(f"{outcome.system:32} {repetition + 1}/{comparison.repetitions}  {result}")
    return outcomes, Bounds(bounds.dense_s, bounds.exact_s, alone.median_s)


def _run_once(
    outcome: Outcome,
    comparison: Comparison,
    where: Ground,
    fork_server: ForkServer,
    bounds: Bounds,
    base_s: float | None,
) -> str:
    # All delays are multiples of the pure computation: a backward that waits for others is longer.
    trial = msgspec.structs.replace(
        comparison.trial, system=outcome.system, steps=outcome.steps, base_s=base_s
    )
    try:
        run = measure(trial, where, fork_server, bounds)
    except TrialFailed as failure:
        outcome.failures.append(str(failure))
        return f"failed: {failure}"
    outcome.runs.append(run)
    return f"{run.step_s:.3f} s/step"


def measure(trial: Trial, where: Ground, fork_server: ForkServer, bounds: Bounds) -> Run:
    """Run one trial: warm up, then time from a common start until all rounds are done.

    If workers miss rounds, the median worker's end counts: another may still be busy with a
    gradient that will not count.
    """
    step_limit_s = 20.0 + 10.0 * (bounds.dense_s or 0.0)
    env = {
        "SLIPSTREAM_SECRET": secrets.token_hex(16),
        "SLIPSTREAM_JOB": secrets.token_hex(8),
        "SLIPSTREAM_ENCRYPT": "0",
    }
    with ExitStack() as stack:
        if where.servers and not is_peer(trial.system):
            addresses = _start_servers(stack, where, env)
            env["SLIPSTREAM_SERVER_ADDRESSES"] = ",".join(addresses)
        process_group = stack.enter_context(fork_server.process_group(trial, where.places(env)))
        process_group.hear("ready", START_LIMIT_S + trial.warmup * step_limit_s)
        before = where.bytes()
        process_group.tell()
        timed = process_group.hear("timed", trial.steps * step_limit_s)
        after = where.bytes()
        process_group.tell()
        judged = process_group.hear("judged", JUDGE_LIMIT_S)
        process_group.tell()
        process_group.end()
    timings = tuple(msgspec.convert(each, Timing) for each in timed)
    everybody = all(len(timing.steps_s) == trial.steps for timing in timings)
    until_all_are_done = max if everybody else statistics.median
    return Run(
        step_s=until_all_are_done(timing.elapsed_s for timing in timings) / trial.steps,
        timings=timings,
        judgements=tuple(msgspec.convert(each, Judgement) for each in judged),
        links=tuple(b - a for a, b in zip(before, after, strict=True)),
    )


def _start_servers(stack: ExitStack, where: Ground, env: dict[str, str]) -> list[str]:
    addresses = []
    master, run = stretch(env["SLIPSTREAM_SECRET"].encode()), env["SLIPSTREAM_JOB"].encode()
    credentials = Credentials.for_run(master, run, encrypt=False)
    for index, placement in enumerate(where.server_places()):
        server = start_server(
            index=index,
            credentials=credentials,
            bind=placement.address or "127.0.0.1",
            placement=placement,
        )
        stack.callback(server.close)
        addresses.append(server.address)
    return addresses


def wire_bounds(comparison: Comparison, workload: Workload) -> Bounds:
    if comparison.rate is None:
        return Bounds(None, None)
    bps = bits_per_second(comparison.rate)
    shapes = model_shapes(workload, comparison.trial.batch or workload.batch)
    workers = comparison.workers
    return Bounds(
        dense_s=seconds(dense_bytes(shapes, workers), bps),
        exact_s=seconds(exact_bytes(shapes, workers), bps),
    )


def model_shapes(workload: Workload, batch: int) -> list[Shape]:
    """Return every parameter of the workload's model; matrices of linear layers with their rows."""
    from torch import nn

    model = workload.model()
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    # If a matrix is also an embedding, its linear layer's rows do not give its whole gradient.
    matrices -= {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return [
        Shape(
            p.numel(),
            p.element_size(),
            matrix=(p.shape[0], p.shape[1]) if id(p) in matrices else None,
            rows=batch * workload.rows_per_sample,
        )
        for p in model.parameters()
        if p.requires_grad
    ]


def fitting_steps(bounds: Bounds, comparison: Comparison) -> int:
    """Return as many steps as fit the budget, between 4 and 20."""
    likely_s = 1.1 * (bounds.dense_s or 0.0) + 0.3
    return min(20, max(4, round(BUDGET_S / likely_s) - comparison.trial.warmup))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine_facts() -> dict[str, Any]:
    """Return facts about the machine that a reader needs to interpret the results."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    models = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "load_at_start": os.getloadavg()[0],
    }
