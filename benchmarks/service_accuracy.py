"""Test accuracy of the service's classifiers on four public data sets, with the one setting.

    python benchmarks/service_accuracy.py --data FOLDER [--sets trec mr] [--epochs 200]

FOLDER has trec/, clinc150/ and mr/. Each model is trained through a running ``slipstream serve``: a
CSV is uploaded, and the test rows are classified over HTTP. TREC and clinc150 have test files of
their own (out-of-scope rows of clinc150 are left out); MR takes random splits of 90/10.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_client import Client, serving

from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.bench.data.labelled_text import Sentence, read_labelled_text

COLLECTION = 30  # texts of a request
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


def one(name: str, number: int, client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """One model of a data set: its accuracy on the test rows."""
    trained, test = SETS[name][0](args.data, number)
    text = io.StringIO()
    csv.writer(text).writerows(trained)
    begun = time.monotonic()
    classifier = client.create(text.getvalue().encode())
    client.wait(classifier, lambda state: state["state"] == "done", args.limit_s)
    seconds = time.monotonic() - begun
    report = client.send("GET", f"/api/classifiers/{classifier}/report")[1]
    right = 0
    for start in range(0, len(test), COLLECTION):
        some = test[start : start + COLLECTION]
        code, found = client.classify_collection(classifier, [text for text, _ in some])
        assert code == 200, found
        right += sum(
            answer["top_class"] == label
            for answer, (_, label) in zip(found["collection"], some, strict=True)
        )
    client.send("DELETE", f"/v1/classifiers/{classifier}")
    training = report["training"]
    return {
        "set": name,
        "model": number,
        "rows": len(trained),
        "accuracy": right / len(test),
        "held_out_accuracy": report["accuracy"],  # of the model before the final pass
        "epochs": training["epochs"],
        "stopped_epoch": training["stopped_epoch"],
        "seconds": seconds,
        "samples_s": training["epochs"] * len(trained) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=7200.0, help="of one model")
    parser.add_argument("--models", type=int, help="models a set; by default 3, for mr 5")
    parser.add_argument("--first", type=int, default=0, help="number of the first model")
    parser.add_argument("--learners", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine_facts(), "epochs": args.epochs}
    found |= {"models": [], "sets": []}
    options = ["--epochs", str(args.epochs), "--learners", str(args.learners), "--rate", "1000000"]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), options) as (url, _, _):
        measure(args, Client(url), found)


def measure(args: argparse.Namespace, client: Client, found: dict[str, Any]) -> None:
    """Add the figures of every model and every set, and write them as they come."""
    for name in args.sets:
        _, models, bar, goal = SETS[name]
        rows = []
        for number in range(args.first, args.models or models):
            rows.append(one(name, number, client, args))
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
