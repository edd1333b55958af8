"""What a training job is to learn: the files of a version's directory, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch

from slipstream.apps.service.batches import Examples, hold_out
from slipstream.apps.service.features import Encoder
from slipstream.apps.service.held_out_curve import HeldOutCurve
from slipstream.apps.service.model_file import Array, ModelHead, write_model
from slipstream.apps.service.net import TextBatch, WideAndDeep
from slipstream.apps.service.phases import BUILDING, READING, PhaseFile
from slipstream.apps.service.report import Report, Training, measured, unmeasured
from slipstream.apps.service.rows import WHOLE, Rows, read
from slipstream.apps.service.schedule import Schedule
from slipstream.apps.service.settings import JobSetting, TextSetting
from slipstream.apps.service.temperatures import Scores, Temperatures
from slipstream.runtime.files.whole_files import write_whole

BLOCK_NBYTES = 256 * 1024
EVALUATED = 4  # rows of a batch when nothing is learnt; more would only take memory


class Task:
    """What a version's directory asks for, the same for every learner.

    Args:
        folder: The directory.
        phases: Is told how far the preparations are.
    """

    def __init__(self, folder: Path, phases: PhaseFile | None = None) -> None:
        phases = phases or PhaseFile(None)
        self.folder, self.setting = folder, TextSetting()
        self.job = msgspec.json.decode((folder / "job.json").read_bytes(), type=JobSetting)
        self.rows = _read_rows(folder / "data.csv", phases, self.job.cut_to or WHOLE)
        self.temperatures = Temperatures(*self.setting.temperatures)  # if no rows choose others
        texts, classes = self.rows.texts, len(self.rows.labels)
        phases.begin(BUILDING, f"{BUILDING} of {len(texts):,} rows")
        # Shares of the phase by the time that they take; the rest is for held-out rows.
        self.encoder = Encoder.of(
            texts, classes, self.setting, lambda split: phases.watch(split, 0.05, 0.35)
        )
        self.examples = Examples(
            self.rows, self.encoder, watch=lambda texts: phases.watch(texts, 0.35, 0.9)
        )
        torch.manual_seed(self.job.seed)
        words, features = len(self.encoder.words), len(self.encoder.features)
        self.net = WideAndDeep(words, features, classes, self.setting)
        self.held = hold_out(self.rows.classes, self.setting, self.job.seed)
        trained = len(self.rows.texts) - len(self.held)
        self.schedule = Schedule.of(self.job, self.setting, trained, len(self.held))
        self.curve = HeldOutCurve(folder)

    def __str__(self) -> str:
        encoder, schedule = self.encoder, self.schedule
        return (
            f"{len(self.rows.texts):,} rows ({len(self.held):,} held out), "
            f"{len(self.rows.labels):,} classes, {len(encoder.words):,} words, "
            f"{len(encoder.features):,} features; "
            f"at most {schedule.total:,} updates of {schedule.batch} rows, {schedule.epochs} epochs"
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
        if scores is None:
            found = unmeasured(self.rows, self.temperatures, self.training())
        else:
            held, training = self.held_classes(), self.training()
            found = measured(self.rows, *scores, held, self.temperatures, training)
        write_whole(path, [msgspec.json.encode(found)])
        return found

    def followed(self) -> Schedule:
        """The schedule by the curve as it is now, the same for all learners."""
        return self.schedule.after(self.curve.points(), self.job)

    def training(self) -> Training:
        """When the training ends, and which model is measured, by the curve as it is now."""
        schedule, points = self.followed(), self.curve.points()
        if not self.held:
            return Training(schedule.last_epoch, schedule.epochs)
        # Of what came later, nothing was better when it stopped.
        seen = [point for point in points if schedule.stop is None or point.update <= schedule.stop]
        best = max(seen, key=lambda point: point.accuracy, default=None)
        return Training(
            schedule.last_epoch,
            schedule.epochs,
            measured_epoch=schedule.epoch(schedule.first),
            best_epoch=None if best is None else schedule.epoch(best.update),
            stopped_epoch=None if schedule.stop is None else schedule.epoch(schedule.stop),
        )

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


def _read_rows(path: Path, phases: PhaseFile, cut_to: int) -> Rows:
    phases.begin(READING, READING)
    nbytes = max(path.stat().st_size, 1)
    with path.open("rb") as file:

        def blocks() -> Iterator[bytes]:
            while block := file.read(BLOCK_NBYTES):
                phases.advance(file.tell() / nbytes)
                yield block

        return read(blocks(), cut_to)


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
