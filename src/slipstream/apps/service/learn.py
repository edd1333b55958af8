"""One training job: rows in, a model file and a report out.

    slipstream run --workers N --strategy 'gadei(checkpoints=DIR, every_s=10)' \\
        -m slipstream.apps.service.learn VERSION_DIR

VERSION_DIR has ``data.csv`` and ``job.json``. The job has two parts. In the first, some rows
are held out; rank 0 measures them on the way, and ``schedule.py`` decides by that when the part
ends. At its end rank 0 writes ``report.json``, for which the other learners wait. In the second,
the final pass, all rows take part. Then rank 0 writes ``model.safetensors``.

Killed at any moment, the same command continues: gadei's checkpoint has weights and the number of
updates; the report and the curve of held-out accuracy stay; what is left out follows from the seed.
A model that would be too large is refused before any learner joins: exit code 3, and one line on
stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import slipstream
from slipstream.apps.service.batches import Noise, random_noise, shuffled
from slipstream.apps.service.phases import FINAL, MEASURING, STARTING, TRAINING, PhaseFile
from slipstream.apps.service.progress import FILE, ProgressFile
from slipstream.apps.service.report import right_answers
from slipstream.apps.service.resume import resumed_epoch
from slipstream.apps.service.task import Task
from slipstream.apps.service.temperatures import Scores
from slipstream.errors import RuntimeFault

REFUSED = 3  # the exit code
CURVE = 50  # times that held-out rows are measured on the way
SELDOM = 8  # steps between two looks at the loss, and two changes of the rate: both take time
REPORT_LIMIT_S = 600.0  # that learners wait for the report
POLL_S = 0.05


class Learner:
    """The steps of one learner; rank 0 also measures and tells how far the job is."""

    def __init__(self, task: Task, job: slipstream.Job, phases: PhaseFile) -> None:
        self._task, self._job, self._net, self._phases = task, job, task.net, phases
        self._schedule = task.followed()
        optimizer = torch.optim.SGD(task.net.parameters(), task.setting.rate)
        _, self._optimizer = job.distribute(task.net, optimizer)  # the same net, weights shared
        # The first learner's: others may have trained already when this one is ready.
        self._begun: int = job.broadcast(job.step)
        self._progress: ProgressFile | None = None
        if job.rank == 0:
            self._progress = ProgressFile(task.folder / FILE)
            # The measured model is lost, or an earlier job's: it is measured anew.
            if not task.held or job.step < self._schedule.first:
                (task.folder / "report.json").unlink(missing_ok=True)

    def train(self) -> None:
        """Both parts, and the report between them."""
        every = range(len(self._task.rows.texts))
        self._begin()
        if self._task.held:
            held = set(self._task.held)
            self._run([row for row in every if row not in held], is_first=True)
            self._measure()
        self._tell_stop()
        if self._task.held:
            self._phases.begin(FINAL, f"final pass: all {len(every):,} rows are trained on now")
        self._run(every, is_first=False)
        self._job.wait()
        if self._progress is not None:
            self._progress.write(self._schedule, self._schedule.total)
        self._phases.note("all updates are made")

    def _begin(self) -> None:
        self._phases.note(str(self._task))
        epoch = self._schedule.epoch(self._begun) if self._begun else None
        sentence = f"continuing from epoch {epoch} of {self._schedule.last_epoch}"
        self._phases.resume(epoch)
        self._tell_stop()
        self._phases.begin(TRAINING, sentence if self._begun else "training begins")

    def _tell_stop(self) -> None:
        """Tell whether the job may stop early, or why it does."""
        job, schedule = self._task.job, self._schedule
        why = f"held-out accuracy has not improved for {job.patience_epochs} epochs"
        self._phases.tell_stop(
            may=schedule.may_stop(self._task.curve.points(), job, self._job.step),
            why=None if schedule.stop is None else why,
        )

    def _run(self, numbers: Sequence[int], *, is_first: bool) -> None:
        """Train on these rows until all learners have made the updates of the part."""
        # Another order after a resume: the first epoch's rows are not trained twice as often.
        begun = self._job.step
        rng = np.random.default_rng([self._task.job.seed, self._job.rank, begun])
        batches = shuffled(numbers, self._task.schedule.batch, rng)
        noise = random_noise(rng)
        until = self._schedule.first if is_first else self._schedule.total
        for number, update in enumerate(self._job.steps(until)):
            if number % SELDOM == 0:
                if is_first:
                    self._follow_curve()
                    self._tell_stop()
                    until = self._schedule.first
                    if update >= until:
                        break
                self._set_rate()
                begin = 0 if is_first else self._schedule.first
                self._phases.advance((update - begin) / (until - begin))
            self._step(next(batches), noise, looks=number % SELDOM == 0)

    def _follow_curve(self) -> None:
        """End the first part early, if the curve says so."""
        before, found = self._schedule, self._task.followed()
        if found == before:
            return
        self._schedule, training = found, self._task.training()
        self._phases.note(
            f"epoch {training.stopped_epoch}: held-out accuracy has not improved since epoch "
            f"{training.best_epoch}; the rate falls to 0 until epoch {training.measured_epoch}, "
            f"and the final pass ends at epoch {training.epochs}"
        )

    def _set_rate(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.setting.rate * self._schedule.rate(self._job.step)

    def _step(self, numbers: list[int], noise: Noise, *, looks: bool) -> None:
        batch = self._task.examples.batch(numbers, noise)
        self._optimizer.zero_grad()
        scored = self._net(batch)
        scored.loss.backward()
        self._optimizer.step()
        if looks and self._progress is not None:
            answers = (scored.deep.softmax(1) + scored.wide.softmax(1)).argmax(1)
            right = int((batch.targets[range(len(numbers)), answers] > 0).sum())
            self._progress.record(scored.loss.item(), right, len(numbers))
            if self._progress.due:
                self._progress.write(self._schedule, self._job.step, self._held_accuracy())

    def _held_accuracy(self) -> float | None:
        """Now and then, of held-out rows; None between, and once they are trained on."""
        task, step = self._task, self._job.step
        points = task.curve.points()
        # After a resume from before the last point, the points stay as they are.
        due = points[-1].update + task.schedule.total // CURVE if points else 0
        if not task.held or not due <= step < self._schedule.first:
            return None
        shares = task.temperatures.answer(*self._scores())
        accuracy = float(right_answers(shares, task.held_classes()).mean())
        task.curve.add(step, accuracy)
        epoch, last = self._schedule.epoch(step), self._schedule.last_epoch
        self._phases.note(f"epoch {epoch} of {last}: held-out accuracy {accuracy:.4f}")
        return accuracy

    def _measure(self) -> None:
        """Rank 0 writes the report; the others wait for it, and so do not change the weights."""
        self._job.wait()
        path = self._task.folder / "report.json"
        if self._progress is not None and not path.exists():
            held = len(self._task.held)
            self._phases.begin(MEASURING, f"measuring {held:,} held-out rows", None)
            report = self._task.report(self._scores())
            self._progress.write(self._schedule, self._schedule.first, report.accuracy)
            self._phases.note(f"report: held-out accuracy {report.accuracy:.4f}")
        until = time.monotonic() + REPORT_LIMIT_S
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeFault(f"rank 0 wrote no {path.name} in {REPORT_LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    def _scores(self) -> tuple[Scores, Scores]:
        """The scores of both parts for the held-out rows, without dropout."""
        with torch.no_grad():
            found = [self._net(batch) for batch in self._task.held_batches]
        return (
            torch.cat([scored.deep for scored in found]).numpy(),
            torch.cat([scored.wide for scored in found]).numpy(),
        )


def main() -> None:
    """``python -m slipstream.apps.service.learn VERSION_DIR``."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slipstream.apps.service.learn VERSION_DIR")
    torch.set_num_threads(1)
    folder, is_first = Path(sys.argv[1]), os.environ.get("RANK", "0") == "0"
    phases = PhaseFile(folder if is_first else None)
    phases.resume(resumed_epoch(folder))
    task = Task(folder, phases)
    if reason := task.refusal():
        print(f"refused: {reason}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    if is_first:
        _ = task.held_batches  # a part of the features, so that the first measurement is fast
    phases.begin(STARTING, STARTING, None)
    with slipstream.init() as job:
        Learner(task, job, phases).train()
    if job.rank == 0:
        task.export()


if __name__ == "__main__":
    main()
