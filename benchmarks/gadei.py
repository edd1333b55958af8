"""GaDei against one process, DDP and torch's Hogwild on one machine.

    python benchmarks/gadei.py --json gadei.json [--data DIR]

- speed: samples a second on the text model at small batches; all in turn, several times
- memory: what the server's update moves a second, against the machine's own triad
- accuracy: 1, 2 and 4 learners and one process after equally many epochs (DIR holds MR or TREC)
- recovery: the same when the server, or all learners, are killed again and again, and how long
  training stands still each time

Run it on a quiet machine. Workers of a run are this script itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import slipstream
from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.bench.data.labelled_text import read_labelled_text
from slipstream.apps.bench.data.vocabulary import encode_text
from slipstream.apps.bench.models import TextNet
from slipstream.planning.segment import DENSE, SegmentPlan, SharedTensor, settings_vector
from slipstream.runtime.shared_memory.optimizer import SharedOptimizer

WORDS, LENGTH, CLASSES = 27_000, 20, 2  # 14 MB
WARM_STEPS = 20
LEARNERS = 2
BATCHES = (1, 2, 4, 32)
BETWEEN_KILLS_S = 1.5
SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))


def net(*, sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = TextNet(WORDS, CLASSES)
    model.embedding.sparse = sparse
    return model


def sentences(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """As words are spread in a language: some often, most seldom."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, WORDS, dtype=torch.float64)
    while True:
        words = 1 + torch.multinomial(weights, 64 * batch * LENGTH, True, generator=generator)
        labels = torch.randint(0, CLASSES, (64 * batch,), generator=generator)
        rows = words.view(-1, LENGTH)
        yield from zip(rows.split(batch), labels.split(batch), strict=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, seed: int, seconds: float
) -> float:
    """Samples a second of this worker."""
    torch.set_num_threads(1)
    data = sentences(batch, seed)
    steps, begun = -WARM_STEPS, time.perf_counter()
    for rows, labels in data:
        if steps == 0:
            begun = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        steps += 1
        if steps > 0 and time.perf_counter() - begun > seconds:
            break
    return steps * batch / (time.perf_counter() - begun)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


# ---- workers, in processes of their own; each prints its samples a second


def tell(rate: float) -> None:
    """In one go: several workers write to one pipe."""
    os.write(1, f"{rate}\n".encode())


def plain_worker(batch: int, seconds: float, sparse: bool) -> None:
    model = net(sparse=sparse)
    tell(train(model, sgd(model), batch, 0, seconds))


def hogwild_worker(batch: int, seconds: float, sparse: bool) -> None:
    model = net(sparse=sparse).share_memory()
    context = mp.get_context("fork")
    told = context.SimpleQueue()

    def learn(rank: int) -> None:
        told.put(train(model, sgd(model), batch, rank, seconds))

    learners = [context.Process(target=learn, args=(rank,)) for rank in range(LEARNERS)]
    for learner in learners:
        learner.start()
    for learner in learners:
        learner.join()
    tell(sum(told.get() for _ in learners))


def ddp_worker(batch: int, seconds: float, sparse: bool) -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(net(sparse=sparse))
    optimizer, rank = sgd(model), torch.distributed.get_rank()
    data = sentences(batch, rank)
    # In lockstep all must take equally many steps: as many as the seconds allow.
    for steps in (WARM_STEPS, 1 << 30):
        begun, done = time.perf_counter(), 0
        goes_on = torch.ones(1)
        while done < steps and goes_on:
            for _ in range(min(steps, 20)):
                rows, labels = next(data)
                optimizer.zero_grad()
                F.cross_entropy(model(rows), labels).backward()
                optimizer.step()
                done += 1
            goes_on[0] = float(time.perf_counter() - begun < seconds)
            torch.distributed.broadcast(goes_on, 0)
    tell(done * batch / (time.perf_counter() - begun))
    torch.distributed.destroy_process_group()


def gadei_worker(batch: int, seconds: float, sparse: bool) -> None:
    with slipstream.init() as job:
        torch.set_num_threads(1)
        model = net(sparse=sparse)
        model, optimizer = job.distribute(model, sgd(model))
        rate = train(model, optimizer, batch, job.rank, seconds)
    tell(rate)


WORKERS: dict[str, Callable[[int, float, bool], None]] = {
    "plain": plain_worker,
    "hogwild": hogwild_worker,
    "ddp": ddp_worker,
    "gadei": gadei_worker,
}


def rate_of(command: list[str], **env: str) -> float:
    """The sum of what the workers of a command print."""
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return sum(float(line.split()[-1]) for line in done.stdout.splitlines() if line.strip())


def contestants(batch: int, seconds: float) -> dict[str, Callable[[], float]]:
    def told(kind: str, sparse: bool) -> list[str]:
        return [str(Path(__file__)), "--worker", kind, str(batch), str(seconds), str(int(sparse))]

    def alone(kind: str, *, sparse: bool = False) -> Callable[[], float]:
        return lambda: rate_of([sys.executable, *told(kind, sparse)])

    def ddp() -> float:
        runner = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return rate_of([*runner, f"--nproc-per-node={LEARNERS}", *told("ddp", False)])

    def gadei(strategy: str) -> Callable[[], float]:
        run = [SLIPSTREAM, "run", "--workers", str(LEARNERS), "--strategy", strategy]
        return lambda: rate_of([*run, *told("gadei", False)])

    return {
        "plain": alone("plain"),
        "plain, sparse": alone("plain", sparse=True),
        "DDP": ddp,
        "Hogwild": alone("hogwild"),
        "Hogwild, sparse": alone("hogwild", sparse=True),
        "gadei": gadei("gadei"),
        "gadei, direct": gadei("gadei(apply='direct')"),
    }


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for batch in args.batches:
        found: dict[str, list[float]] = {}
        for _ in range(args.repetitions):
            for name, run in contestants(batch, args.seconds).items():
                found.setdefault(name, []).append(run())
        rates = {name: statistics.median(each) for name, each in found.items()}
        rows.append({"batch": batch, "samples_s": rates, "all": found})
        shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        print(f"batch {batch}: {shown} samples/s", flush=True)
    return rows


# ---- memory


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """a ← b + s·c over arrays that no cache holds reads two and writes one; so does an update."""
    count = 25_000_000  # 100 MB
    tensor = SharedTensor("w", (count,), "float32", 4, 0)
    plan = SegmentPlan.of([tensor], 1)
    optimizer = SharedOptimizer(plan, "SGD", [settings_vector("SGD", {"lr": 0.01})])
    weights, slot = (np.zeros(n, np.uint8) for n in (plan.weights_nbytes, plan.slot_nbytes))
    weights[:], slot[:] = 0, 0
    slot[:8].view(np.uint64)[0] = DENSE
    slot[plan.settings_at :][:64].view(np.float64)[:] = settings_vector("SGD", {"lr": 0.01})
    torch.set_num_threads(1)
    a, b, c = (torch.zeros(count) for _ in range(3))
    moved = 3 * 4 * count
    rates: dict[str, list[float]] = {"update": [], "triad": [], "triad in place": []}
    for _ in range(args.repetitions * 4):
        for name, run in {
            "update": lambda: optimizer.apply(memoryview(weights), memoryview(slot)),
            "triad": lambda: torch.add(b, c, alpha=0.01, out=a),
            "triad in place": lambda: b.add_(c, alpha=-0.01),
        }.items():
            begun = time.perf_counter()
            run()
            rates[name].append(moved / (time.perf_counter() - begun))
    found = {name: max(each[1:]) for name, each in rates.items()}
    print("GB/s:", {name: round(rate / 1e9, 2) for name, rate in found.items()}, flush=True)
    return found


# ---- accuracy


def accuracy_worker(data: str, epochs: int, folder: str) -> None:
    """Writes when each of its steps was done; and at the end how good the model is."""
    with slipstream.init() as job:
        torch.set_num_threads(1)
        encoded = encode_text(read_labelled_text(Path(data)))
        torch.manual_seed(0)
        model: nn.Module = TextNet(encoded.words, encoded.split.classes)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = job.distribute(model, optimizer)
        examples, test = encoded.split.train, encoded.split.test
        batches = job.sampler(examples, 4)
        with (Path(folder) / f"steps.{job.rank}.{os.getpid()}").open("w", buffering=1) as told:
            for _ in range(epochs):
                for numbers in batches:
                    rows, labels = examples.take(torch.tensor(numbers))
                    optimizer.zero_grad()
                    F.cross_entropy(model(rows), labels).backward()
                    optimizer.step()
                    told.write(f"{time.monotonic()}\n")
    if job.rank == 0:
        model.eval()
        right = 0
        with torch.no_grad():
            for numbers in torch.arange(len(test)).split(500):
                rows, labels = test.take(numbers)
                right += int((model(rows).argmax(1) == labels).sum())
        told_at_the_end = {"accuracy": right / len(test), "updates": job.step}
        (Path(folder) / "told").write_text(json.dumps(told_at_the_end))


class Training:
    """A run of accuracy_worker, and what it wrote."""

    def __init__(self, command: list[str], data: Path, epochs: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        script = [str(Path(__file__)), "--accuracy", str(data), str(epochs), str(self.folder)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, *script], env=env)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=30)
        self._folder.cleanup()

    def moments(self) -> list[float]:
        """When steps were done; the last line of one that was killed may be a part of one."""
        files = [file.read_text().splitlines(keepends=True) for file in self.folder.glob("steps.*")]
        return sorted(float(line) for lines in files for line in lines if line.endswith("\n"))

    def latest(self) -> float:
        """When the last step was done."""
        ends = [file.read_bytes()[-100:].split(b"\n") for file in self.folder.glob("steps.*")]
        return max((float(lines[-2]) for lines in ends if len(lines) > 2), default=0.0)

    def outcome(self) -> dict[str, Any]:
        if self.process.wait():
            sys.exit(f"training failed with {self.process.returncode}")
        moments = self.moments()
        told: dict[str, Any] = json.loads((self.folder / "told").read_text())
        return told | {"seconds": moments[-1] - moments[0]}


def accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.data is None:
        return []
    rows = []
    run = [SLIPSTREAM, "run", "--strategy", "gadei", "--workers"]
    for name, command in {
        "one process": [sys.executable],
        **{f"{n} learners": [*run, str(n)] for n in (1, 2, 4)},
    }.items():
        with Training(command, args.data, args.epochs) as training:
            rows.append({"name": name, **training.outcome()})
        print(rows[-1], flush=True)
    return rows


# ---- recovery


def recovery(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Killed again and again, each time when it has trained for a while: how long it stands still,
    and whether it still learns what it would have learnt."""
    if args.data is None:
        return []
    rows = []
    command = [SLIPSTREAM, "run", "--workers", str(LEARNERS), "--restarts", "100000"]
    command += ["--strategy", "gadei(every_s=1)"]
    for whom in ("nobody", "server", "all learners"):
        with Training(command, args.data, args.long_epochs) as training:
            killed: list[float] = []
            trained_since(training, 0.0)
            while whom != "nobody" and len(killed) < args.kills:
                time.sleep(BETWEEN_KILLS_S)
                if training.process.poll() is not None:
                    break
                killed.append(time.monotonic())
                strike(training.process.pid, whom)
                trained_since(training, killed[-1] + 0.05)
            row: dict[str, Any] = {"killed": whom, "times": len(killed), **training.outcome()}
            stood = [gap_after(training.moments(), moment) for moment in killed]
        if stood:
            row |= {"longest_s": max(stood), "median_s": statistics.median(stood)}
        rows.append(row)
        print(row, flush=True)
    return rows


def trained_since(training: Training, moment: float) -> None:
    """Wait until there is a step later than this, or the training has ended."""
    until = time.monotonic() + 60.0
    while training.process.poll() is None and training.latest() <= moment:
        if time.monotonic() > until:
            sys.exit("training does not go on")
        time.sleep(0.02)


def strike(launcher: int, whom: str) -> None:
    children = psutil.Process(launcher).children()
    servers = [
        c for c in children if "slipstream.runtime.shared_memory.update_server" in c.cmdline()
    ]
    learners = [c for c in children if "--accuracy" in c.cmdline()]
    for victim in {"server": servers, "all learners": learners}[whom]:
        victim.kill()


def gap_after(moments: list[float], moment: float) -> float:
    """How long there was no step, around a moment or soon after: slots may have been free."""
    near = [m for m in moments if moment - 0.5 < m < moment + 30.0]
    gaps = [b - a for a, b in itertools.pairwise(near) if a < moment + 1.0]
    return max(gaps)


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "speed": speed,
    "memory": memory,
    "accuracy": accuracy,
    "recovery": recovery,
}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        kind, batch, seconds, sparse = sys.argv[2:]
        WORKERS[kind](int(batch), float(seconds), sparse == "1")
        return
    if sys.argv[1:2] == ["--accuracy"]:
        accuracy_worker(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--long-epochs", type=int, default=25, help="of training with kills")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine_facts()}
    for part in args.parts:
        report[part] = PARTS[part](args)
        if args.json:
            args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
