"""Test accuracy of the service's classifiers on four public data sets, with the one setting.

    python benchmarks/service_accuracy.py --data FOLDER [--sets trec mr] [--epochs 200]

FOLDER has trec/, clinc150/ and mr/. Each model is trained as the service trains it: ``rows.read``
reads a CSV, and ``slipstream run -m slipstream.service.learn`` learns. TREC and clinc150 have test
files of their own (out-of-scope rows of clinc150 are left out); MR takes random splits of 90/10.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from slipstream.bench.data.labelled_text import Sentence, read_labelled_text
from slipstream.service.answers import Model
from slipstream.service.report import Report
from slipstream.service.rows import Limits, read
from slipstream.service.settings import JobSetting

SLIPSTREAM = str(Path(sys.executable).with_name("slipstream"))
Split = tuple[list[Sentence], list[Sentence]]


def trec(data: Path, number: int, *, fine: bool = False) -> Split:
    text = read_labelled_text(data / "trec", fine=fine)
    return list(text.train), list(text.test)


def clinc150(data: Path, number: int) -> Split:
    text = read_labelled_text(data / "clinc150")
    return list(text.train), list(text.test)


def mr(data: Path, number: int) -> Split:
    rows = list(read_labelled_text(data / "mr").train)
    random.Random(number).shuffle(rows)
    cut = len(rows) // 10
    return rows[cut:], rows[:cut]


# The bars and goals of the specification.
SETS: dict[str, tuple[Callable[[Path, int], Split], int, float, float]] = {
    "trec": (trec, 3, 0.914, 0.925),
    "trec-fine": (lambda data, number: trec(data, number, fine=True), 3, 0.834, 0.850),
    "clinc150": (clinc150, 3, 0.925, 0.935),
    "mr": (mr, 5, 0.785, 0.800),
}


def train(rows: list[Sentence], folder: Path, args: argparse.Namespace, seed: int) -> float:
    """Train a classifier in a folder; returns how many seconds it took."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    job = JobSetting(epochs=args.epochs, batch=args.batch, seed=seed)
    accepted = read([text.getvalue().encode()], Limits())
    (folder / "rows.msgpack").write_bytes(msgspec.msgpack.encode(accepted))
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    strategy = f'gadei(checkpoints="{folder / "checkpoints"}", every_s=10)'
    command = [SLIPSTREAM, "run", "--workers", str(args.learners), "--strategy", strategy]
    begun = time.monotonic()
    with (folder / "train.log").open("w") as log:
        run = subprocess.run(
            [*command, "-m", "slipstream.service.learn", str(folder)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if run.returncode:
        sys.exit(f"training failed with {run.returncode}:\n{(folder / 'train.log').read_text()}")
    return time.monotonic() - begun


def one(name: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """One model of a data set: its accuracy on the test rows."""
    trained, test = SETS[name][0](args.data, number)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        seconds = train(trained, folder, args, number)
        report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
        model = Model.load(folder / "model.safetensors")
    begun = time.monotonic()
    answers = model.classify([text for text, _ in test])
    per_text = (time.monotonic() - begun) / len(test)
    right = sum(answer[0][0] == label for answer, (_, label) in zip(answers, test, strict=True))
    return {
        "set": name,
        "model": number,
        "rows": len(trained),
        "accuracy": right / len(test),
        "held_out_accuracy": report.accuracy,
        "seconds": seconds,
        "bytes": model.nbytes,
        "ms_a_text": 1000 * per_text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--epochs", type=int, default=JobSetting().epochs)
    parser.add_argument("--batch", type=int, help="rows an update; by default by rows")
    parser.add_argument("--models", type=int, help="models a set; by default 3, for mr 5")
    parser.add_argument("--learners", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = {"processor": platform.processor(), "cores": os.cpu_count()}
    found: dict[str, Any] = {"machine": machine, "epochs": args.epochs, "models": [], "sets": []}
    for name in args.sets:
        _, models, bar, goal = SETS[name]
        rows = []
        for number in range(args.models or models):
            rows.append(one(name, number, args))
            print(rows[-1], flush=True)
        mean = statistics.mean(row["accuracy"] for row in rows)
        summary = {"set": name, "accuracy": mean, "bar": bar, "goal": goal, "above": mean >= bar}
        print(summary, flush=True)
        found["models"] += rows
        found["sets"].append(summary)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
