"""What an early stop costs a classifier of the service in test accuracy, in pairs of one training.

    python benchmarks/service_early_stop.py --data FOLDER --sets mr --models 5 --patience 30 60 90

One process trains each model for all epochs, with the service's own rows, net, batches and
schedule. Where the curve of held-out accuracy lets a job with one of these patiences stop, a copy
of the model ends as that job would: the rate falls to 0, and the final pass over all rows follows.
So all ends of a model have the same beginning, and their differences are those of the stop. The
result does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from service_accuracy import SETS

from slipstream.apps.bench.comparison import machine_facts
from slipstream.apps.bench.data.labelled_text import Sentence
from slipstream.apps.service.batches import Examples, random_noise, shuffled
from slipstream.apps.service.learn import CURVE
from slipstream.apps.service.net import TextBatch, WideAndDeep
from slipstream.apps.service.report import measured, right_answers
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.schedule import Point, Schedule, stalled_at
from slipstream.apps.service.settings import JobSetting
from slipstream.apps.service.task import Task
from slipstream.apps.service.temperatures import Scores, Temperatures

EVALUATED = 30  # rows of a batch of test rows


def scores(net: WideAndDeep, batches: Sequence[TextBatch]) -> tuple[Scores, Scores]:
    """Both parts' scores of these rows."""
    with torch.no_grad():
        found = [net(batch) for batch in batches]
    return (
        torch.cat([scored.deep for scored in found]).numpy(),
        torch.cat([scored.wide for scored in found]).numpy(),
    )


class Training:
    """A model under way in this process.

    Args:
        task: What it learns; its net is trained.
        schedule: Updates and rates.
        net: The model; by default the task's.
    """

    def __init__(self, task: Task, schedule: Schedule, net: WideAndDeep | None = None) -> None:
        self.task, self.schedule, self.net = task, schedule, net or task.net
        self._optimizer = torch.optim.SGD(self.net.parameters(), task.setting.rate)
        self._rng = np.random.default_rng([task.job.seed, schedule.stop or 0])
        self._noise = random_noise(self._rng)

    def run(self, rows: Sequence[int], update: int, until: int) -> None:
        """Make the updates from ``update`` to ``until`` on these rows."""
        batches = shuffled(rows, self.schedule.batch, self._rng)
        for number in range(update, until):
            rate = self.task.setting.rate * self.schedule.rate(number)
            self._optimizer.param_groups[0]["lr"] = rate
            batch = self.task.examples.batch(next(batches), self._noise)
            self._optimizer.zero_grad()
            self.net(batch).loss.backward()
            self._optimizer.step()

    def end(self, first: Sequence[int], update: int, test: list[Sentence]) -> dict[str, Any]:
        """Train to the end, and measure; ``first`` are the rows that are not held out."""
        task, schedule = self.task, self.schedule
        self.run(first, update, schedule.first)
        held, training = task.held_classes(), task.training()
        report = measured(
            task.rows, *scores(self.net, task.held_batches), held, task.temperatures, training
        )
        self.run(range(len(task.rows.texts)), schedule.first, schedule.total)
        found = report.calibration
        chosen = Temperatures(
            found.deep_temperature, found.wide_temperature, found.mean_temperature
        )
        labels = task.rows.labels
        classes = [[labels.index(label)] for _, label in test]
        rows = Rows([text for text, _ in test], classes, labels, [])
        examples, numbers = Examples(rows, task.encoder), range(len(test))
        batches = [examples.batch(numbers[at : at + EVALUATED]) for at in numbers[::EVALUATED]]
        right = right_answers(chosen.answer(*scores(self.net, batches)), classes)
        stopped = None if schedule.stop is None else schedule.epoch(schedule.stop)
        return {
            "stopped_epoch": stopped,
            "epochs": schedule.last_epoch,
            "held_out_accuracy": report.accuracy,
            "accuracy": float(right.mean()),
        }


def model(
    name: str, number: int, data: Path, patiences: list[int], job: JobSetting
) -> dict[str, Any]:
    """All ends of one model of a data set."""
    torch.set_num_threads(1)
    trained, test = SETS[name][0](data, number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with (path / "data.csv").open("w", newline="") as file:
            csv.writer(file).writerows(trained)
        (path / "job.json").write_bytes(msgspec.json.encode(job))
        task = Task(path)
        training, curve = Training(task, task.schedule), [Point(0, -1.0)]
        schedule, held = task.schedule, set(task.held)
        first = [row for row in range(len(task.rows.texts)) if row not in held]
        ends: dict[str, Any] = {}
        update, classes = 0, task.held_classes()
        while update < schedule.first:
            until = min(update + schedule.total // CURVE, schedule.first)
            training.run(first, update, until)
            update = until
            shares = task.temperatures.answer(*scores(training.net, task.held_batches))
            curve.append(Point(update, float(right_answers(shares, classes).mean())))
            for patience in patiences:
                updates = math.ceil(patience * schedule.planned / schedule.epochs)
                stop = stalled_at(curve[1:], updates, job.least_updates_to_stop)
                early = schedule if stop is None else schedule.stopped_from(stop)
                if str(patience) not in ends and early.stop is not None:
                    branch = Training(task, early, copy.deepcopy(training.net))
                    ends[str(patience)] = branch.end(first, update, test)
        whole = training.end(first, update, test)
        ends = {str(patience): ends.get(str(patience), whole) for patience in patiences}
    points = [(schedule.epoch(point.update), point.accuracy) for point in curve[1:]]
    return {"set": name, "model": number, "ends": ends | {"none": whole}, "curve": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    parser.add_argument("--models", type=int, help="models a set; by default 3, for mr 5")
    parser.add_argument("--patience", nargs="*", type=int, default=[30, 60, 90])
    parser.add_argument("--epochs", type=int, default=JobSetting().epochs)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine_facts(), "models": [], "sets": []}
    cells = [
        (name, number, args.data, args.patience, JobSetting(epochs=args.epochs, seed=number))
        for name in args.sets
        for number in range(args.models or SETS[name][1])
    ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(model, *cell) for cell in cells]:
            row = future.result()
            found["models"].append(row)
            print({key: row[key] for key in ("set", "model", "ends")}, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=2) + "\n")
    for name in args.sets:
        rows = [row["ends"] for row in found["models"] if row["set"] == name]
        for end in rows[0]:
            lost = [ends["none"]["accuracy"] - ends[end]["accuracy"] for ends in rows]
            summary = {
                "set": name,
                "patience": end,
                "models": len(rows),
                "accuracy": statistics.mean(ends[end]["accuracy"] for ends in rows),
                "epochs": statistics.mean(ends[end]["epochs"] for ends in rows),
                "lost": statistics.mean(lost),
                "standard_error": statistics.stdev(lost) / len(lost) ** 0.5 if lost[1:] else None,
            }
            found["sets"].append(summary)
            print(summary, flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
