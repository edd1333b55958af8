"""Dense training side by side: DDP over gloo and slipstream's systems on a 10M-parameter conv net.

    python benchmarks/dense.py --rates 200mbit,1gbit,none --json dense.json
    python benchmarks/dense.py --world-of-one

Every rate but "none" is a lab of its own, one worker on each host (needs root); "none" is plain
loopback. The systems take turns, each time with fresh processes, so that what else this machine
does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import queue
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import torch
from dense_worker import BATCH, IMAGE, conv_net
from rich.console import Console
from rich.table import Table

from slipstream.errors import LaunchError
from slipstream.lab import Lab, bits_per_second

WORKER = Path(__file__).with_name("dense_worker.py")
SYSTEMS = (
    "ddp",
    "allreduce",
    "push_pull",
    "push_pull(overlap=False)",
    "push_pull(update='server')",
)
RUN_BUDGET_S = 12.0  # of timed and warm-up steps, as far as can be told beforehand
START_LIMIT_S = 180.0
END_LIMIT_S = 60.0
TAIL_LINES = 20

Run = dict[str, Any]  # step_s, cpu_s_per_step, steps_s and link_bytes, as the JSON has them

console = Console(width=None if sys.stdout.isatty() else 110)


class RunFailed(Exception):
    """A worker failed or was too slow; the text shows what it said."""


def drain(pipe: IO[str], work: Callable[[str], None]) -> None:
    """Every line a worker writes, and an empty one for the end."""
    with pipe:
        for line in pipe:
            work(line)
    work("")


class Crew:
    """The worker processes of one run; none outlives the block."""

    def __init__(self, commands: Sequence[Sequence[str]], env: Sequence[dict[str, str]]) -> None:
        self._commands, self._env = commands, env
        self._processes: list[subprocess.Popen[str]] = []
        self._tails: list[deque[str]] = []
        self._heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def __enter__(self) -> Self:
        try:
            for rank, (command, env) in enumerate(zip(self._commands, self._env, strict=True)):
                self._start(rank, command, env)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank: int, command: Sequence[str], env: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._processes.append(process)
        self._tails.append(tail)
        for work, pipe in ((self._listen(rank), process.stdout), (tail.append, process.stderr)):
            threading.Thread(target=drain, args=(pipe, work), daemon=True).start()

    def _listen(self, rank: int) -> Callable[[str], None]:
        def hear(line: str) -> None:
            if line.startswith('{"event"'):
                self._heard.put((rank, json.loads(line)))
            elif not line:
                self._heard.put((rank, None))

        return hear

    def hear(self, event: str, limit_s: float) -> list[dict[str, Any]]:
        """One message from every worker, by rank."""
        until = time.monotonic() + limit_s
        said: dict[int, dict[str, Any]] = {}
        while len(said) < len(self._processes):
            try:
                rank, message = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                silent = [str(r) for r in range(len(self._processes)) if r not in said]
                raise RunFailed(
                    f"no {event!r} from rank {', '.join(silent)} within {limit_s:.0f} s\n"
                    + self.tails()
                ) from None
            if message is None:
                raise RunFailed(f"rank {rank} ended before {event!r}\n" + self.tails())
            said[rank] = message
        return [said[rank] for rank in sorted(said)]

    def tell(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.flush()

    def end(self, limit_s: float) -> None:
        """Every worker must leave by itself, and without complaint."""
        until = time.monotonic() + limit_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(timeout=max(0.0, until - time.monotonic()))
        if any(process.poll() != 0 for process in self._processes):
            raise RunFailed("not every worker ended well\n" + self.tails())

    def tails(self) -> str:
        # The first to end is not always the one at fault: give the others a moment to say so.
        time.sleep(1.0)
        return "".join(
            f"--- rank {rank}, exit code {process.poll()}\n{''.join(tuple(tail))}"
            for rank, (process, tail) in enumerate(zip(self._processes, self._tails, strict=True))
        )

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(timeout=END_LIMIT_S)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


@dataclass(frozen=True)
class Place:
    """Where workers run: on the hosts of a lab, or all on this machine's loopback."""

    rate: str
    workers: int
    lab: Lab | None

    def prefix(self, rank: int) -> tuple[str, ...]:
        return self.lab.hosts[rank].prefix if self.lab else ()

    def interface(self, rank: int) -> str:
        return self.lab.hosts[rank].interface if self.lab else "lo"

    def environment(self, rank: int, *, port: int) -> dict[str, str]:
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": self.lab.hosts[0].address if self.lab else "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if self.lab is None:  # as torchrun has it; on hosts of one worker each there is no need
            env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.workers)}
        return env

    def bytes(self) -> list[tuple[int, int]]:
        """Sent and received by each host so far; nothing where there are no links."""
        return [(t.sent, t.received) for t in self.lab.bytes()] if self.lab else []


@contextlib.contextmanager
def place(rate: str, workers: int) -> Iterator[Place]:
    if rate == "none":
        yield Place(rate, workers, None)
    else:
        with Lab(hosts=workers, rate=rate) as lab:
            yield Place(rate, workers, lab)


@dataclass
class Outcome:
    """All repetitions of one system at one rate."""

    rate: str
    system: str
    steps: int
    bound_s: float | None
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> list[float]:
        return [run["step_s"] for run in self.runs]

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.step_s) if self.runs else None

    @property
    def link_mb(self) -> float | None:
        """The busiest link's bytes a step, sent or received; the median over runs, in MB."""
        moved = [
            max(max(link) for link in run["link_bytes"]) for run in self.runs if run["link_bytes"]
        ]
        return statistics.median(moved) / 1e6 if moved else None


def measure(wanted: Outcome, where: Place, *, warmup: int, servers: int | None) -> Run:
    """One run: fresh workers, warmed up, then timed from a standing start to the last arrival."""
    system, steps = wanted.system, wanted.steps
    port = 29500 if where.lab else free_port()
    shared = {"SLIPSTREAM_SECRET": secrets.token_hex(16), "SLIPSTREAM_ENCRYPT": "0"}
    if servers is not None:
        shared["SLIPSTREAM_SERVERS"] = str(servers)
    commands, environments = [], []
    for rank in range(where.workers):
        env = where.environment(rank, port=port) | shared
        if system == "ddp":
            env["GLOO_SOCKET_IFNAME"] = where.interface(rank)
        options = ["--warmup", str(warmup), "--steps", str(steps)]
        commands.append([*where.prefix(rank), sys.executable, str(WORKER), system, *options])
        environments.append(env)
    with Crew(commands, environments) as crew:
        crew.hear("ready", START_LIMIT_S + warmup * step_limit_s(wanted.bound_s))
        before = where.bytes()
        crew.tell()
        done = crew.hear("done", steps * step_limit_s(wanted.bound_s))
        after = where.bytes()
        crew.tell()
        crew.end(END_LIMIT_S)
    moved = [
        ((b[0] - a[0]) / steps, (b[1] - a[1]) / steps) for a, b in zip(before, after, strict=True)
    ]
    return {
        "step_s": max(report["elapsed_s"] for report in done) / steps,
        "cpu_s_per_step": [report["cpu_s"] / steps for report in done],
        "steps_s": [report["steps_s"] for report in done],
        "link_bytes": moved,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lower_bound_s(rate: str, workers: int, nbytes: int) -> float | None:
    """2(n-1)/n · bytes / rate: what any exact dense exchange has to move over each link."""
    if rate == "none":
        return None
    return 2 * (workers - 1) / workers * nbytes * 8 / bits_per_second(rate)


def step_limit_s(bound_s: float | None) -> float:
    """A step that takes longer is taken for hung."""
    return 10.0 + 5.0 * (bound_s or 0.0)


def steps_for(bound_s: float | None, warmup: int) -> int:
    """As many as fit the budget, between 4 and 20."""
    likely_s = 1.1 * (bound_s or 0.0) + 0.3
    return min(20, max(4, round(RUN_BUDGET_S / likely_s) - warmup))


def compare(args: argparse.Namespace, nbytes: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for rate in args.rates:
        bound_s = lower_bound_s(rate, args.workers, nbytes)
        steps = args.steps or steps_for(bound_s, args.warmup)
        here = [Outcome(rate, system, steps, bound_s) for system in args.systems]
        outcomes += here
        with place(rate, args.workers) as where:
            for repetition in range(args.repetitions):
                for outcome in here:
                    run_once(outcome, where, repetition, args)
        console.print(table(here))
    return outcomes


def run_once(outcome: Outcome, where: Place, repetition: int, args: argparse.Namespace) -> None:
    label = f"{outcome.rate:>8}  {outcome.system:28} {repetition + 1}/{args.repetitions}"
    try:
        run = measure(outcome, where, warmup=args.warmup, servers=args.servers)
    except RunFailed as failure:
        outcome.failures.append(str(failure))
        console.print(f"{label}  [red]failed[/red]")
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return
    outcome.runs.append(run)
    console.print(f"{label}  {run['step_s']:.3f} s/step", highlight=False)


def table(outcomes: Sequence[Outcome]) -> Table:
    first, bound_s = outcomes[0], outcomes[0].bound_s
    title = f"links: {first.rate}, {first.steps} steps a run"
    if bound_s is not None:
        title += f"; the wire alone takes at least {bound_s:.3f} s"
    shown = Table(title=title, title_justify="left")
    shown.add_column("system", no_wrap=True)
    for heading in ("s/step", "min", "max", "to ddp", "to wire", "MB/link", "runs"):
        shown.add_column(heading, justify="right", no_wrap=True)
    reference = ddp_median(outcomes)
    for outcome in outcomes:
        median = outcome.median_s
        shown.add_row(
            outcome.system,
            *(number(value) for value in spread(outcome)),
            number(median / reference if median and reference else None),
            number(median / bound_s if median and bound_s else None),
            number(outcome.link_mb, digits=1),
            f"{len(outcome.runs)}" + (f", {len(outcome.failures)} failed" * bool(outcome.failures)),
        )
    return shown


def spread(outcome: Outcome) -> tuple[float | None, float | None, float | None]:
    if not outcome.runs:
        return (None, None, None)
    return (outcome.median_s, min(outcome.step_s), max(outcome.step_s))


def ddp_median(outcomes: Sequence[Outcome]) -> float | None:
    return next((outcome.median_s for outcome in outcomes if outcome.system == "ddp"), None)


def number(value: float | None, *, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def as_json(outcome: Outcome, everyone: Sequence[Outcome]) -> dict[str, Any]:
    reference = ddp_median([other for other in everyone if other.rate == outcome.rate])
    median, least, most = spread(outcome)
    return {
        "rate": outcome.rate,
        "system": outcome.system,
        "steps_per_run": outcome.steps,
        "median_s": median,
        "min_s": least,
        "max_s": most,
        "ratio_to_ddp": median / reference if median and reference else None,
        "wire_lower_bound_s": outcome.bound_s,
        "busiest_link_mb_per_step": outcome.link_mb,
        "runs": outcome.runs,
        "failures": outcome.failures,
    }


def world_of_one(args: argparse.Namespace) -> dict[str, Any]:
    """The plain loop against the same loop with slipstream alone, in turns within one process."""
    ratios = []
    steps = args.steps or 100
    for repetition in range(args.repetitions):
        options = ["--alone", "--warmup", "10", "--steps", str(steps)]
        command = [sys.executable, str(WORKER), "push_pull", *options]
        with Crew([command], [{"OMP_NUM_THREADS": "1"}]) as crew:
            crew.hear("ready", START_LIMIT_S)
            crew.tell()
            (done,) = crew.hear("done", 2 * steps * step_limit_s(None))
            crew.tell()
            crew.end(END_LIMIT_S)
        plain, ours = (statistics.median(done[key]) for key in ("plain", "slipstream"))
        ratios.append({"plain_s": plain, "slipstream_s": ours, "ratio": ours / plain})
        console.print(
            f"world of one {repetition + 1}/{args.repetitions}: plain {plain:.4f} s, "
            f"slipstream {ours:.4f} s, ratio {ours / plain:.3f}",
            highlight=False,
        )
    median = statistics.median(entry["ratio"] for entry in ratios)
    console.print(f"median ratio {median:.3f}", highlight=False)
    return {"median_ratio": median, "runs": ratios}


def machine_facts() -> dict[str, Any]:
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_at_start": os.getloadavg()[0],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="200mbit,1gbit,none", type=lambda text: text.split(","))
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, help='"local" has no exchange')
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, help="parameter servers; by default one a host")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed steps a run; by default what fits 12 s")
    parser.add_argument("--world-of-one", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    parameters = sum(p.numel() for p in conv_net().parameters())
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "machine": machine_facts(),
        "model": {"parameters": parameters, "batch": BATCH, "image": IMAGE},
    }
    failed = False
    try:
        if args.world_of_one:
            report["world_of_one"] = world_of_one(args)
        else:
            outcomes = compare(args, 4 * parameters)
            failed = any(outcome.failures for outcome in outcomes)
            report["workers"] = args.workers
            report["results"] = [as_json(outcome, outcomes) for outcome in outcomes]
    except (LaunchError, RunFailed) as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
