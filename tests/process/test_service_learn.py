"""A training job of the service: it learns, survives, and refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from launches import SLIPSTREAM, Launch, until
from service_process import PACED
from service_sentences import TOPICS, sentences

from slipstream.apps.service.answers import Model
from slipstream.apps.service.held_out_curve import HeldOutCurve
from slipstream.apps.service.phases import phase_of
from slipstream.apps.service.report import Report
from slipstream.apps.service.settings import JobSetting

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name is Linux's"),
]

STARTED: list[Launch] = []


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().close()


def prepare(folder: Path, forms: int, job: JobSetting) -> None:
    folder.mkdir(parents=True)
    (folder / "data.csv").write_text("\n".join(sentences(3, forms)))
    (folder / "job.json").write_bytes(msgspec.json.encode(job))


def start(folder: Path, name: str, *, paced_by: Path | None = None) -> Launch:
    """A job; while the file ``paced_by`` is there, it trains slowly."""
    strategy = f'gadei(checkpoints="{folder / "checkpoints"}", every_s=0.2)'
    command = [SLIPSTREAM, "run", "--workers", "2", "--strategy", strategy]
    program = (
        ["-m", "slipstream.apps.service.learn"] if paced_by is None else [str(PACED / "learn.py")]
    )
    env = {"SERVICE_HOLD": str(paced_by)}
    launch = Launch([*command, *program, str(folder)], folder.with_name(name), env)
    STARTED.append(launch)
    return launch


def progress(folder: Path) -> list[dict[str, float]]:
    try:
        lines = (folder / "progress.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


def test_a_job_whose_processes_are_all_killed_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "version"
    prepare(folder, 6, JobSetting(epochs=400))
    (pace := tmp_path / "pace").touch()  # so that the kill comes before the end
    first = start(folder, "first", paced_by=pace)
    until(
        lambda: bool(progress(folder)) and any((folder / "checkpoints").glob("*.safetensors")),
        "progress and a checkpoint",
    )
    launcher = psutil.Process(first.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # the kernel ends what the launcher started
            process.kill()
    first.wait()
    with (folder / "progress.jsonl").open("a") as lines:
        lines.write('{"updates":')  # a line that the kill cut off
    before = progress(folder)[-1]["updates"]
    assert (first.folder / "out").read_text().count("job: continuing from") == 0
    second = start(folder, "second")
    assert second.wait() == 0, (second.folder / "err").read_text()
    assert "job: continuing from epoch " in (second.folder / "out").read_text()
    assert "goes on from a checkpoint" in (second.folder / "err").read_text()
    after = progress(folder)
    assert 0 < before < after[-1]["updates"] == after[-1]["total"]
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert (report.rows, report.classes, report.held_out) == (90, 3, 9)
    model = Model.load(folder / "model.safetensors")
    for topic, words in TOPICS.items():
        for word in words:
            assert model.classify([f"tell me about {word}"])[0][0][0] == topic


def curve(folder: Path) -> list[list[float]]:
    try:
        found: list[list[float]] = json.loads(HeldOutCurve(folder).path.read_bytes())
    except FileNotFoundError:
        return []
    return found


def test_a_job_stops_early_and_does_not_forget_it(tmp_path: Path) -> None:
    """Killed after the decision, every learner of the next attempt follows it from the start."""
    folder = tmp_path / "version"
    prepare(folder, 6, JobSetting(epochs=600, patience_epochs=24, least_updates_to_stop=0))
    first = start(folder, "first")
    until(
        lambda: "held-out accuracy has not improved" in (first.folder / "out").read_text(),
        "the decision to stop",
    )
    first.close()
    decided = curve(folder)
    assert phase_of("running", folder).phase in ("training", "measuring", "final pass")
    second = start(folder, "second")
    assert second.wait() == 0, (second.folder / "err").read_text()
    out = (second.folder / "out").read_text()
    assert "held-out accuracy has not improved" not in out  # it is known from the start
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    training = report.training
    assert training is not None
    assert training.stopped_epoch is not None
    assert training.measured_epoch is not None
    assert training.stopped_epoch < training.measured_epoch < training.epochs < 600
    assert curve(folder)[: len(decided)] == decided
    last = progress(folder)[-1]
    assert (last["epoch"], last["epochs"]) == (training.epochs, training.epochs)
    assert last["updates"] == last["total"] < 300 * 90 / 2
    assert phase_of("running", folder).phase == "final pass"


def test_few_rows_are_all_trained_and_nothing_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "version"
    prepare(folder, 2, JobSetting(epochs=1, cut_to=60))
    with (folder / "data.csv").open("a") as data:
        data.write(f"\nis there snow {20 * 'or not '},weather")
    launch = start(folder, "job")
    assert launch.wait() == 0, (launch.folder / "err").read_text()
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    assert (report.rows, report.held_out, report.accuracy) == (31, 0, None)
    assert report.cut == 1
    log = (launch.folder / "out").read_text()
    told = [
        "job: reading rows",
        "job: building features of 31 rows",
        "job: starting learners",
        "job: 31 rows (0 held out), 3 classes",
        "job: training begins",
        "job: all updates are made",
    ]
    assert [log.count(line) for line in told] == [1] * len(told)  # by rank 0 alone
    assert [log.index(line) for line in told] == sorted(log.index(line) for line in told)
    assert phase_of("running", folder).phase == "training"
    model = Model.load(folder / "model.safetensors")
    assert model.classify(["is there snow"])[0][0][0] == "weather"


def test_a_model_that_would_be_too_large_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "version"
    prepare(folder, 2, JobSetting(max_model_bytes=100_000))
    launch = start(folder, "job")
    assert launch.wait() == 3
    lines = (launch.folder / "err").read_text().splitlines()
    assert [line for line in lines if line.startswith("refused: the model would have")]
    assert not (folder / "model.safetensors").exists()
