"""How fast the service trains, against gadei's bare loop on the same net and the same rows.

    python benchmarks/service_speed.py --data FOLDER [--set trec] [--json speed.json]

FOLDER has trec/, clinc150/ and mr/. The bare loop is that of ``benchmarks/gadei.py``: batches are
ready before the clock starts, nothing is recorded or measured. The service reads, encodes, drops
words and features, records and writes checkpoints. Both take turns, with two learners. Run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from service_accuracy import SETS
from service_client import Client, serving

import slipstream
from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.service.batches import random_noise, shuffled
from slipstream.apps.service.settings import JobSetting
from slipstream.apps.service.task import Task

LEARNERS = 2
READY = 2_000  # batches that are made before the clock starts
WARM_STEPS = 50
WARM_S = 10.0  # of a job of the service, before it is measured
ROWS, EPOCHS = 10_000, 200  # of the training whose time is estimated
SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))


def bare_worker(folder: Path, seconds: float) -> None:
    """Prints this learner's samples a second."""
    torch.set_num_threads(1)
    task = Task(folder)
    with slipstream.init() as job:
        rng = np.random.default_rng(job.rank)
        numbers = shuffled(range(len(task.rows.texts)), task.schedule.batch, rng)
        noise = random_noise(rng)
        batches = [task.examples.batch(some, noise) for some in itertools.islice(numbers, READY)]
        optimizer = torch.optim.SGD(task.net.parameters(), task.setting.rate / 2)
        net, optimizer = job.distribute(task.net, optimizer)
        job.broadcast(None)  # all begin together
        steps, begun = -WARM_STEPS, time.perf_counter()
        for batch in itertools.cycle(batches):
            if steps == 0:
                begun = time.perf_counter()
            optimizer.zero_grad()
            net(batch).loss.backward()
            optimizer.step()
            steps += 1
            if steps > 0 and time.perf_counter() - begun > seconds:
                break
        rate = steps * task.schedule.batch / (time.perf_counter() - begun)
    os.write(1, f"{rate}\n".encode())  # at once: two learners write to one pipe


def bare(rows: bytes, args: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "data.csv").write_bytes(rows)
        (folder / "job.json").write_bytes(msgspec.json.encode(JobSetting()))
        run = [SLIPSTREAM, "run", "--workers", str(LEARNERS), "--strategy", "gadei"]
        done = subprocess.run(
            ["nice", "-n", "10", *run, __file__, "--worker", place, str(args.seconds)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        )
    return sum(float(line.split()[-1]) for line in done.stdout.splitlines() if line.strip())


def served(rows: bytes, args: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        with serving(Path(folder), ["--learners", str(LEARNERS)]) as (url, _, _):
            client = Client(url)
            classifier = client.create(rows)
            client.wait(classifier, lambda state: state["updates"] > 0)
            time.sleep(WARM_S)
            path = next(Path(folder).glob("data/classifiers/*/1/progress.jsonl"))
            time.sleep(args.seconds)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        last = lines[-1]
        first = min(lines, key=lambda line: abs(last["at"] - 1000 * args.seconds - line["at"]))
        updates = last["updates"] - first["updates"]
        return 1000 * updates * args.batch / (last["at"] - first["at"])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        bare_worker(Path(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", default="trec", choices=list(SETS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = io.StringIO()
    sentences = SETS[args.set][0](args.data, 0)[0]
    csv.writer(text).writerows(sentences)
    args.batch = 2 if len(sentences) < 10_000 else 4
    rates: dict[str, list[float]] = {"bare": [], "service": []}
    for _ in range(args.repetitions):
        rates["bare"].append(bare(text.getvalue().encode(), args))
        rates["service"].append(served(text.getvalue().encode(), args))
        print(rates, flush=True)
    found: dict[str, Any] = {name: statistics.median(each) for name, each in rates.items()}
    found["ratio"] = found["service"] / found["bare"]
    found["minutes_of_10000_rows"] = ROWS * EPOCHS / found["service"] / 60
    found |= {"machine": machine_facts(), "set": args.set, "batch": args.batch, "all": rates}
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
