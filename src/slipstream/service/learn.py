"""One training job: rows in, a model file and a report out.

    slipstream run --workers N --strategy 'gadei(checkpoints=DIR, every_s=10)' \\
        -m slipstream.service.learn VERSION_DIR

VERSION_DIR has ``data.csv`` and ``job.json``. The job has two phases. In the first, some rows
are held out; at its end rank 0 measures them and writes ``report.json``, for which the other
learners wait. In the second, all rows take part. Then rank 0 writes ``model.safetensors``.

Killed at any moment, the same command continues: gadei's checkpoint has weights and the number of
updates; the report, once written, stays; what is left out follows from the seed. A model that would
be too large is refused before any learner joins: exit code 3, and one line on stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch

import slipstream
from slipstream.errors import RuntimeFault
from slipstream.runtime.files.whole_files import write_whole
from slipstream.service.batches import Examples, Noise, hold_out, random_noise, shuffled
from slipstream.service.features import Encoder
from slipstream.service.model_file import Array, ModelHead, write_model
from slipstream.service.net import TextBatch, WideAndDeep
from slipstream.service.progress import NOTE, ProgressFile
from slipstream.service.report import Report, measured, right_answers, unmeasured
from slipstream.service.rows import WHOLE, read
from slipstream.service.settings import JobSetting, Schedule, TextSetting
from slipstream.service.temperatures import Scores, Temperatures

REFUSED = 3  # the exit code
BLOCK_NBYTES = 256 * 1024
EVALUATED = 4  # rows of a batch when nothing is learnt; more would only take memory
CURVE = 50  # times that held-out rows are measured on the way
SELDOM = 8  # steps between two looks at the loss, and two changes of the rate: both take time
REPORT_LIMIT_S = 600.0  # that learners wait for the report
POLL_S = 0.05


class Task:
    """What a version's directory asks for, the same for every learner."""

    def __init__(self, folder: Path) -> None:
        self.job = msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSetting)
        with (folder / "data.csv").open("rb") as file:
            self.rows = read(iter(lambda: file.read(BLOCK_NBYTES), b""), self.job.cut_to or WHOLE)
        self.folder, self.setting = folder, TextSetting()
        self.temperatures = Temperatures(*self.setting.temperatures)  # if no rows choose others
        classes = len(self.rows.labels)
        self.encoder = Encoder.of(self.rows.texts, classes, self.setting)
        self.examples = Examples(self.rows, self.encoder)
        torch.manual_seed(self.job.seed)
        words, features = len(self.encoder.words), len(self.encoder.features)
        self.net = WideAndDeep(words, features, classes, self.setting)
        self.held = hold_out(self.rows.classes, self.setting, self.job.seed)
        trained = len(self.rows.texts) - len(self.held)
        self.schedule = Schedule.of(self.job, self.setting, trained, len(self.held))

    def __str__(self) -> str:
        encoder, schedule = self.encoder, self.schedule
        return (
            f"{len(self.rows.texts):,} rows ({len(self.held):,} held out), "
            f"{len(self.rows.labels):,} classes, {len(encoder.words):,} words, "
            f"{len(encoder.features):,} features; "
            f"{schedule.total:,} updates of {schedule.batch} rows"
        )

    def refusal(self) -> str | None:
        """Why this is not trained, if it is not."""
        nbytes = sum(tensor.nbytes for tensor in self._tensors().values())
        if nbytes <= self.job.max_model_bytes:
            return None
        return (
            f"the model would have {nbytes:,} bytes, more than the permitted "
            f"{self.job.max_model_bytes:,}: use fewer classes or shorter texts"
        )

    def report(self, scores: tuple[Scores, Scores] | None) -> Report:
        """The report as it is on disk; if it is not there, made of the held-out rows' scores."""
        path = self.folder / "report.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Report)
        found = unmeasured(self.rows, self.temperatures)
        if scores is not None:
            found = measured(self.rows, *scores, self.held_classes(), self.temperatures)
        write_whole(path, [msgspec.json.encode(found)])
        return found

    @cached_property
    def held_batches(self) -> list[TextBatch]:
        """The held-out rows; only rank 0 measures them."""
        return self.examples.held_batches(self.held, EVALUATED)

    def held_classes(self) -> list[list[int]]:
        """The classes of each held-out row."""
        return [self.rows.classes[number] for number in self.held]

    def export(self) -> None:
        """Write the model file."""
        found = self.report(None).calibration
        head = ModelHead(
            labels=self.rows.labels,
            temperatures=(found.deep_temperature, found.wide_temperature),
            mean_temperature=found.mean_temperature,
            setting=self.setting,
        )
        write_model(self.folder / "model.safetensors", head, self._tensors())

    def _tensors(self) -> dict[str, Array]:
        shares = np.zeros(len(self.rows.labels))
        for own in self.rows.classes:
            shares[own] += 1 / len(own)
        return tensors_of(self.net, self.encoder, (shares / shares.sum()).astype(np.float32))


class Learner:
    """The steps of one learner; rank 0 also measures and tells how far the job is."""

    def __init__(self, task: Task, job: slipstream.Job) -> None:
        self._task, self._job, self._net = task, job, task.net
        optimizer = torch.optim.SGD(task.net.parameters(), task.setting.rate)
        _, self._optimizer = job.distribute(task.net, optimizer)  # the same net, weights shared
        self._progress: ProgressFile | None = None
        self._curve = job.step  # when held-out rows are measured next
        if job.rank == 0:
            path, schedule = task.folder / "progress.jsonl", task.schedule
            self._progress = ProgressFile(path, schedule.total, task.job.epochs, schedule.batch)
            if job.step == 0:  # what an earlier job left, of which no checkpoint is there
                (task.folder / "report.json").unlink(missing_ok=True)

    def train(self) -> None:
        """Both phases, and the report between them."""
        every = range(len(self._task.rows.texts))
        self._note(f"{self._task}; begins at update {self._job.step:,}")
        if self._task.held:
            held = set(self._task.held)
            self._run(self._task.schedule.first, [row for row in every if row not in held])
            self._measure()
        self._run(self._task.schedule.total, every)
        self._job.wait()
        if self._progress is not None:
            self._progress.write(self._task.schedule.total)
        self._note("all updates are made")

    def _note(self, text: str) -> None:
        """A line of the job's log."""
        if self._progress is not None:
            print(f"{NOTE}{text}", flush=True)

    def _run(self, until: int, numbers: Sequence[int]) -> None:
        """Train on these rows until so many updates are made by all learners."""
        # Another order after a resume: the first epoch's rows are not trained twice as often.
        rng = np.random.default_rng([self._task.job.seed, self._job.rank, self._job.step])
        batches = shuffled(numbers, self._task.schedule.batch, rng)
        noise = random_noise(rng)
        for number, _ in enumerate(self._job.steps(until)):
            if number % SELDOM == 0:
                self._set_rate()
            self._step(next(batches), noise, looks=number % SELDOM == 0)

    def _set_rate(self) -> None:
        left = max(1 - self._job.step / self._task.schedule.total, 0.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._task.setting.rate * left

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
                self._progress.write(self._job.step, self._held_accuracy())

    def _held_accuracy(self) -> float | None:
        """Now and then, of held-out rows; None between, and once they are trained on."""
        task, step = self._task, self._job.step
        if not task.held or not self._curve <= step < task.schedule.first:
            return None
        self._curve = step + task.schedule.total // CURVE
        shares = task.temperatures.answer(*self._scores())
        accuracy = float(right_answers(shares, task.held_classes()).mean())
        self._note(f"update {step:,} of {task.schedule.total:,}: held-out accuracy {accuracy:.4f}")
        return accuracy

    def _measure(self) -> None:
        """Rank 0 writes the report; the others wait for it, and so do not change the weights."""
        self._job.wait()
        if self._progress is not None:
            report = self._task.report(self._scores())
            self._progress.write(self._job.step, report.accuracy)
            self._note(f"report: held-out accuracy {report.accuracy}; all rows are trained on now")
            return
        path = self._task.folder / "report.json"
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


def tensors_of(net: WideAndDeep, encoder: Encoder, shares: Array) -> dict[str, Array]:
    """A model file's tensors: the net's as numpy multiplies them, and the encoder's."""
    tensors: dict[str, Array] = {
        "words": encoder.words,
        "features": encoder.features,
        "idf": encoder.idf,
        "shares": shares,
        "embedding": net.embedding.weight.detach().numpy(),
        "wide": net.wide.weight.detach().numpy(),
    }
    layers = {f"window{w}": net.windows[i] for i, w in enumerate(encoder.setting.windows)}
    for name, layer in {**layers, "classifier": net.classifier}.items():
        state = layer.state_dict()
        tensors[name], tensors[f"{name}.bias"] = state["weight"].t().numpy(), state["bias"].numpy()
    return tensors


def main() -> None:
    """``python -m slipstream.service.learn VERSION_DIR``."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slipstream.service.learn VERSION_DIR")
    torch.set_num_threads(1)
    task = Task(Path(sys.argv[1]))
    if reason := task.refusal():
        print(f"refused: {reason}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    with slipstream.init() as job:
        Learner(task, job).train()
    if job.rank == 0:
        task.export()


if __name__ == "__main__":
    main()
