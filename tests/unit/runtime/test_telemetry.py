import json
import os
import socket
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import LaunchError
from slipstream.runtime.figures.telemetry import Prometheus, RunLog, TensorBoard, Watchers
from slipstream.runtime.files.record_file import write_json


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_log_is_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    log = RunLog(path, {"strategy": "push_pull", "workers": 4})
    log.note(1, {"loss": 2.5, "samples": 64})
    log.note(2, {"loss": 2.0})
    log.close()
    start, first, second, end = lines(path)
    assert (start["event"], start["strategy"], start["workers"]) == ("start", "push_pull", 4)
    assert (first["event"], first["step"], first["loss"], first["samples"]) == ("step", 1, 2.5, 64)
    assert (second["step"], second["loss"]) == (2, 2.0)
    assert end["event"] == "end"
    times = [entry["elapsed_s"] for entry in lines(path)]
    assert times == sorted(times, key=float)


def test_a_run_log_can_be_followed_while_it_is_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl", {})
    log.note(7, {"loss": 1.0})
    assert [entry["event"] for entry in lines(tmp_path / "run.jsonl")] == ["start", "step"]
    log.close()


def test_a_second_run_begins_a_new_log(tmp_path: Path) -> None:
    for name in ("first", "second"):
        RunLog(tmp_path / "run.jsonl", {"strategy": name}).close()
    start, end = lines(tmp_path / "run.jsonl")
    assert (start["strategy"], end["event"]) == ("second", "end")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "run.jsonl"):
        with pytest.raises(LaunchError, match=f"cannot write the run log {path}: "):
            RunLog(path, {})


def test_prometheus_shows_the_latest_figures() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gauges = Prometheus(port)
    try:
        gauges.note(1, {"loss": 2.5})
        gauges.note(2, {"loss": 1.5, "samples": 10})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        gauges.close()
    assert "slipstream_loss 1.5" in text
    assert "slipstream_step 2.0" in text
    assert "slipstream_samples 10.0" in text


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Prometheus cannot listen on port {port}"):
            Prometheus(port)


def test_tensorboard_gets_a_scalar_for_each_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.note(1, {"loss": 2.5})
    board.note(2, {"loss": 1.5})
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("slipstream/loss")
    assert [(s.step, s.value) for s in scalars] == [(1, 2.5), (2, 1.5)]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("tensorboard.summary.writer.record_writer", "tensorboard"),
        ("prometheus_client", "prometheus"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(LaunchError, match=rf"slipstream\[{extra}\]"):
        TensorBoard(tmp_path) if extra == "tensorboard" else Prometheus(0)


# ---- what cannot be written


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Room for 16 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "small", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.filterwarnings("default")  # tensorboard's own
def test_a_full_disk_costs_figures_and_no_more(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ballast, log, board = disk / "ballast", disk / "run.jsonl", disk / "board"
    watchers = Watchers()
    watchers.add(lambda: RunLog(log, {}))
    watchers.add(lambda: TensorBoard(board))
    watchers.note(1, {"loss": 1.0})
    ballast.write_bytes(bytes(8192))  # no page is free now
    for step in range(2, 500):
        watchers.note(step, {"loss": 1.0})
    ballast.unlink()
    watchers.note(500, {"loss": 1.0})
    watchers.note_event("rounds", {"made": 3})
    watchers.close()

    said = [f"the run log {log}", f"TensorBoard's events in {board}"]
    assert warnings_of(caplog) == [
        f"slipstream: {name} cannot be written (No space left on device). Training continues; what "
        "cannot be written is missing there, and later figures are tried again"
        for name in said
    ]
    steps = [line["step"] for line in lines(log) if line["event"] == "step"]
    assert steps == [*range(1, len(steps)), 500]
    assert len(steps) < 400
    assert [line["event"] for line in lines(log)][-2:] == ["rounds", "end"]
    shown = [s.step for s in EventAccumulator(str(board)).Reload().Scalars("slipstream/loss")]
    assert shown == [*range(1, len(shown)), 500]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and /dev/fd as Linux has them")
def test_a_log_that_nobody_reads_any_more(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    watchers = Watchers()
    watchers.add(lambda: RunLog(Path(f"/dev/fd/{writer}"), {}))
    os.close(writer)
    os.close(reader)
    for step in range(3):
        watchers.note(step, {"loss": 1.0})
    watchers.close()
    assert len(caplog.records) == 1
    assert f"the run log /dev/fd/{writer} cannot be written (Broken pipe)" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full as Linux has it")
def test_a_disk_that_is_full_from_the_start_is_an_error(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    watchers = Watchers()
    with pytest.raises(LaunchError, match="cannot write the run log /dev/full: No space left"):
        watchers.add(lambda: RunLog(Path("/dev/full"), {}))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot write TensorBoard's events in "):
        watchers.add(lambda: TensorBoard(tmp_path / "file"))
    assert not caplog.records
    # Who was started again in the midst of training does without.
    watchers.add(lambda: RunLog(Path("/dev/full"), {}), training=True)
    assert warnings_of(caplog) == [
        "slipstream: cannot write the run log /dev/full: No space left on device. Training "
        "continues without it"
    ]
    assert not watchers


class Failing:
    """Raises whatever it is given, wherever it is called."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def note(self, *_: Any) -> None:
        raise self.error

    tell = close = note


def test_whatever_a_watcher_raises_the_others_are_told_and_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "run.jsonl"
    watchers = Watchers()
    watchers.add(lambda: Failing("the first", RuntimeError("\x1b[31mno\n")))
    watchers.add(lambda: RunLog(log, {}))
    watchers.add(lambda: Failing("the last", OSError("odd")))
    watchers.note(1, {"loss": 1.0})
    watchers.note_event("rounds", {})
    watchers.close()
    watchers.close()
    assert [line["event"] for line in lines(log)] == ["start", "step", "rounds", "end"]
    first, last = warnings_of(caplog)
    assert "slipstream: the first cannot be written (RuntimeError: \\x1b[31mno\\n)" in first
    assert "slipstream: the last cannot be written (OSError: odd)" in last


def test_warnings_as_errors_do_not_end_training(tmp_path: Path) -> None:
    watchers = Watchers()
    watchers.add(lambda: Failing("one", RuntimeError("no")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watchers.note(1, {})


def test_interrupting_is_not_held_up() -> None:
    watchers = Watchers()
    watchers.add(lambda: Failing("one", KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        watchers.note(1, {})


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full as Linux has it")
def test_json_is_written_whole_or_raises(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "figures.json", {"steps": 3})
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == {"steps": 3}
    with pytest.raises(OSError, match="No space left"):
        write_json(Path("/dev/full"), {"steps": 3})


def test_json_on_a_full_disk_leaves_no_half(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_json(disk / "figures.json", {str(i): i for i in range(4000)})
    assert (disk / "figures.json").read_bytes() == b""
