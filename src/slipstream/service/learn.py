"""One training job: rows in, a model file and a report out.

    slipstream run --workers N --strategy 'gadei(checkpoints=DIR, every_s=10)' \\
        -m slipstream.service.learn VERSION_DIR

VERSION_DIR has ``rows.msgpack`` and ``job.json``. The job has two phases. In the first, some rows
are held out; at its end rank 0 measures them and writes ``report.json``, for which the other
learners wait. In the second, all rows take part. Then rank 0 writes ``model.safetensors``.

Killed at any moment, the same command continues: gadei's checkpoint has weights and the number of
updates; the report, once written, stays; what is left out follows from the seed. A model that would
be too large is refused before any learner joins: exit code 3, and one line on stderr.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import slipstream
from slipstream.errors import RuntimeFault
from slipstream.runtime.files.whole_files import write_whole
from slipstream.service.answers import mean_softmax
from slipstream.service.batches import Examples, hold_out, shuffled
from slipstream.service.features import Encoder
from slipstream.service.model_file import Array, ModelHead, nbytes_of, write_model
from slipstream.service.net import WideAndDeep, loss_of
from slipstream.service.progress import ProgressFile
from slipstream.service.report import Facts, Report, measured, right_answers, unmeasured
from slipstream.service.rows import Rows
from slipstream.service.settings import JobSetting, Schedule, TextSetting

REFUSED = 3  # the exit code
EVALUATED = 64  # rows of a batch when nothing is learnt
CURVE = 50  # times that held-out rows are measured on the way
REPORT_LIMIT_S = 600.0  # that learners wait for the report
POLL_S = 0.05


class Trainer:
    """What one learner does.

    Args:
        folder: VERSION_DIR.
    """

    def __init__(self, folder: Path, setting: TextSetting | None = None) -> None:
        self.folder = folder
        self.rows = msgspec.msgpack.decode((folder / "rows.msgpack").read_bytes(), type=Rows)
        self.job = msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSetting)
        self.setting = setting or TextSetting()
        rows = self.rows
        self.encoder = Encoder.of(rows.texts, len(rows.labels), self.setting)
        self.held = hold_out(rows.classes, self.setting, self.job.seed)
        out = set(self.held)
        self.trained = [number for number in range(len(rows.texts)) if number not in out]
        self.schedule = Schedule.of(self.job, self.setting, len(self.trained), len(self.held))
        self.facts = Facts(rows.labels, rows.classes, rows.warnings)

    def refusal(self) -> str | None:
        """Why this is not trained, if it is not."""
        nbytes = nbytes_of(self._head((1.0, 1.0)), len(self.encoder.words), self._features)
        if nbytes <= self.job.max_model_bytes:
            return None
        return (
            f"the model would have {nbytes:,} bytes, more than the permitted "
            f"{self.job.max_model_bytes:,}: use fewer classes or shorter texts"
        )

    def train(self) -> None:
        """Train, measure, and write the model."""
        torch.set_num_threads(1)
        torch.manual_seed(self.job.seed)
        net = WideAndDeep(
            len(self.encoder.words), self._features, len(self.rows.labels), self.setting
        )
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), self.setting.rate)
        examples = Examples(self.rows, self.encoder)
        with slipstream.init() as job:
            _, optimizer = job.distribute(net, optimizer)  # the same net, its weights shared
            loop = _Loop(self, job, net, optimizer, examples)
            if self.held:
                loop.run(self.schedule.first, self.trained)
                loop.measure()
            loop.run(self.schedule.total, range(len(self.rows.texts)))
            loop.end()
        if job.rank == 0:
            self._export(net, self.report(None, examples))

    def report(self, net: nn.Module | None, examples: Examples) -> Report:
        """The report as it is on disk; if it is not there, made by this net."""
        path = self.folder / "report.json"
        if path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Report)
        defaults = (self.setting.deep_temperature, self.setting.wide_temperature)
        if net is None or not self.held:
            found = unmeasured(self.facts, defaults)
        else:
            deep, wide = scores_of(net, examples, self.held)
            classes = [self.rows.classes[number] for number in self.held]
            found = measured(self.facts, deep, wide, classes, defaults)
        write_whole(path, [msgspec.json.encode(found)])
        return found

    def _export(self, net: WideAndDeep, report: Report) -> None:
        found = report.calibration
        head = self._head((found.deep_temperature, found.wide_temperature))
        tensors = tensors_of(net, self.encoder, self._shares())
        write_model(self.folder / "model.safetensors", head, tensors)

    def _head(self, temperatures: tuple[float, float]) -> ModelHead:
        return ModelHead(labels=self.rows.labels, temperatures=temperatures, setting=self.setting)

    def _shares(self) -> Array:
        shares = np.zeros(len(self.rows.labels))
        for own in self.rows.classes:
            shares[own] += 1 / len(own)
        return np.asarray(shares / shares.sum(), np.float32)

    @property
    def _features(self) -> int:
        return len(self.encoder.features)


class _Loop:
    """The steps of one learner; rank 0 also tells how far the job is."""

    def __init__(
        self,
        trainer: Trainer,
        job: slipstream.Job,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        examples: Examples,
    ) -> None:
        self._trainer, self._job, self._net, self._optimizer = trainer, job, net, optimizer
        self._examples = examples
        self._progress: ProgressFile | None = None
        self._curve = job.step
        if job.rank == 0:
            schedule, epochs = trainer.schedule, trainer.job.epochs
            path = trainer.folder / "progress.jsonl"
            self._progress = ProgressFile(path, schedule.total, epochs, schedule.batch)
            if job.step == 0:  # what an earlier job left, of which no checkpoint is there
                (trainer.folder / "report.json").unlink(missing_ok=True)

    def run(self, until: int, numbers: range | list[int]) -> None:
        """Train on these rows until so many updates are made by all learners."""
        # Another order after a resume: the first epoch's rows are not trained twice as often.
        job, trainer = self._job, self._trainer
        rng = np.random.default_rng([trainer.job.seed, job.rank, job.step])
        batches = shuffled(list(numbers), trainer.schedule.batch, rng)
        self._net.train()
        for _ in job.steps(until):
            self._step(next(batches), rng)

    def _step(self, numbers: list[int], rng: np.random.Generator) -> None:
        targets = self._examples.targets(numbers)
        self._optimizer.zero_grad()
        deep, wide = self._net(*self._examples.batch(numbers, rng))
        loss = loss_of(deep, wide, targets)
        loss.backward()
        self._optimizer.step()
        if self._progress is not None:
            answers = (deep.detach().softmax(1) + wide.detach().softmax(1)).argmax(1, True)
            right = int((targets.gather(1, answers) > 0).sum())
            self._progress.record(loss.item(), right, len(numbers))
            if self._progress.due:
                self._progress.write(self._job.step, self._held_accuracy())

    def _held_accuracy(self) -> float | None:
        """Now and then, of held-out rows; None between, and once they are trained on."""
        trainer, step = self._trainer, self._job.step
        if not trainer.held or not self._curve <= step < trainer.schedule.first:
            return None
        self._curve = step + trainer.schedule.total // CURVE
        deep, wide = scores_of(self._net, self._examples, trainer.held)
        setting = trainer.setting
        shares = mean_softmax(deep, wide, setting.deep_temperature, setting.wide_temperature)
        held = [trainer.rows.classes[number] for number in trainer.held]
        return float(right_answers(shares.argmax(1), held).mean())

    def measure(self) -> None:
        """Rank 0 writes the report; the others wait for it, and so do not change the weights."""
        self._job.wait()
        if self._progress is not None:
            report = self._trainer.report(self._net, self._examples)
            self._progress.write(self._job.step, report.accuracy)
            return
        path = self._trainer.folder / "report.json"
        until = time.monotonic() + REPORT_LIMIT_S
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeFault(f"rank 0 wrote no {path.name} in {REPORT_LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Tell that all updates were made."""
        self._job.wait()
        if self._progress is not None:
            self._progress.write(self._trainer.schedule.total)


def scores_of(
    net: nn.Module, examples: Examples, numbers: list[int]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The scores of both parts for some rows, without dropout."""
    net.eval()
    found = []
    with torch.no_grad():
        for start in range(0, len(numbers), EVALUATED):
            found.append(net(*examples.batch(numbers[start : start + EVALUATED])))
    net.train()
    deep, wide = zip(*found, strict=True)
    return torch.cat(deep).numpy(), torch.cat(wide).numpy()


def tensors_of(net: WideAndDeep, encoder: Encoder, shares: Array) -> dict[str, Array]:
    """A model file's tensors."""
    tensors: dict[str, Array] = {
        "words": encoder.words,
        "features": encoder.features,
        "idf": encoder.idf,
        "shares": shares,
        "embedding": net.embedding.weight.detach().numpy(),
        "classifier": net.classifier.weight.detach().t().numpy(),
        "classifier.bias": net.classifier.bias.detach().numpy(),
        "wide": net.wide.weight.detach().numpy(),
    }
    for width, layer in zip(encoder.setting.windows, net.windows, strict=True):
        state = layer.state_dict()
        tensors[f"window{width}"] = state["weight"].t().numpy()
        tensors[f"window{width}.bias"] = state["bias"].numpy()
    return tensors


def main() -> None:
    """``python -m slipstream.service.learn VERSION_DIR``."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m slipstream.service.learn VERSION_DIR")
    trainer = Trainer(Path(sys.argv[1]))
    if reason := trainer.refusal():
        print(f"refused: {reason}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    trainer.train()


if __name__ == "__main__":
    main()
