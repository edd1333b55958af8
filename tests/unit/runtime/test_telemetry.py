import json
import socket
import urllib.request
from pathlib import Path

import pytest

from slipstream.errors import LaunchError
from slipstream.runtime.telemetry import Prometheus, RunLog, TensorBoard


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
    [("torch.utils.tensorboard", "tensorboard"), ("prometheus_client", "prometheus")],
)
def test_what_is_not_installed_is_named_with_its_extra(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(LaunchError, match=rf"slipstream\[{extra}\]"):
        TensorBoard(tmp_path) if extra == "tensorboard" else Prometheus(0)
