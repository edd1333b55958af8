"""What a job says that it does, before it trains and after."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from service_requests import ask, prepared
from test_service_classifiers import create

from slipstream.apps.service import learn, phases, queue
from slipstream.apps.service.phases import Phase, PhaseFile, phase_of
from slipstream.apps.service.resume import checkpoints_of


@pytest.fixture(autouse=True)
def every_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "EVERY_S", 0.0)


def test_phase_is_by_the_state_before_the_file(tmp_path: Path) -> None:
    PhaseFile(tmp_path).begin("training", "training begins")
    assert phase_of("waiting", tmp_path) == Phase("waiting")
    assert phase_of("running", tmp_path) == Phase("training", 0)
    for state in ("done", "failed", "cancelled"):
        assert phase_of(state, tmp_path) == Phase(None)


@pytest.mark.parametrize("content", [None, b"", b'{"phase":', b"[]"])
def test_running_job_without_a_whole_file_reads_rows(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / phases.FILE).write_bytes(content)
    assert phase_of("running", tmp_path) == Phase("reading rows", 0)


def test_percent_is_of_the_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = PhaseFile(tmp_path)
    told.begin("building features", "building features of 4 rows")
    seen = []
    for item in told.watch("abcd", 0.2, 0.6):
        seen.append((item, phase_of("running", tmp_path).phase_percent))
    assert seen == [("a", 20), ("b", 30), ("c", 40), ("d", 50)]
    told.advance(1.2)
    assert phase_of("running", tmp_path).phase_percent == 100
    told.begin("starting learners", "starting learners", None)
    assert phase_of("running", tmp_path) == Phase("starting learners", None)
    said = capsys.readouterr().out
    assert said == "job: building features of 4 rows\njob: starting learners\n"


def test_epoch_of_a_restart_stays_for_all_later_phases(tmp_path: Path) -> None:
    told = PhaseFile(tmp_path)
    told.resume(141)
    told.begin("training", "continuing from epoch 141 of 200")
    assert phase_of("running", tmp_path) == Phase("training", 0, 141)
    told.advance(0.5)
    told.begin("final pass", "final pass")
    assert phase_of("running", tmp_path) == Phase("final pass", 0, 141)


def test_learner_says_where_it_continues_before_it_has_read_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints_of(tmp_path).mkdir(parents=True)
    (checkpoints_of(tmp_path) / "weights-000000000000700.safetensors").touch()
    line = queue.Progress(100, 2_000, 10, 200, 1.0, at=1)
    (tmp_path / "progress.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")

    def begin_to_read(folder: Path, told: PhaseFile) -> None:
        told.begin("reading rows", "reading rows")
        sys.exit("far enough")

    monkeypatch.setattr(learn, "Task", begin_to_read)
    monkeypatch.setattr(sys, "argv", ["learn", str(tmp_path)])
    monkeypatch.delenv("RANK", raising=False)
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit, match="far enough"):
        learn.main()
    torch.set_num_threads(threads)
    assert phase_of("running", tmp_path) == Phase("reading rows", 0, 70)


def test_stop_stays_for_all_later_phases(tmp_path: Path) -> None:
    told, why = PhaseFile(tmp_path), "held-out accuracy has not improved for 30 epochs"
    told.tell_stop(may=True, why=None)
    told.begin("training", "training begins")
    assert phase_of("running", tmp_path) == Phase("training", 0, None, True, None)
    told.tell_stop(may=False, why=why)
    told.advance(0.5)
    told.begin("final pass", "final pass")
    assert phase_of("running", tmp_path) == Phase("final pass", 0, None, False, why)


def test_status_says_at_most_while_the_job_may_stop_early(tmp_path: Path) -> None:
    with prepared(tmp_path / "data") as service:
        classifier = create(service)
        held = queue.claim(service.database, "me", 1)
        assert held is not None
        line = queue.Progress(100, 2_000, 10, 200, 1.0, at=1)
        queue.record(service.database, held, [line], 10.0)
        told = PhaseFile(service.directory.version(classifier, 1))
        for may, bound in ((True, "at most"), (False, "about")):
            told.tell_stop(may=may, why=None)
            told.begin("training", "training begins")
            shown = ask(service, f"GET /v1/classifiers/{classifier}").json["status_description"]
            assert f"(5%, {bound} 3 minutes left)" in shown
            state = ask(service, f"GET /api/classifiers/{classifier}").json
            assert (state["may_stop_early"], state["stops_early"]) == (may, None)


def test_other_learners_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = PhaseFile(None)
    other.begin("training", "training begins")
    assert list(other.watch([1, 2], 0, 1)) == [1, 2]
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_api_tells_the_phase_of_a_job(tmp_path: Path) -> None:
    with prepared(tmp_path / "data") as service:
        classifier = create(service)
        folder = service.directory.version(classifier, 1)

        def told() -> list[object]:
            state = msgspec.json.decode(ask(service, f"GET /api/classifiers/{classifier}").body)
            return [state[name] for name in ("phase", "phase_percent", "resumed_epoch")]

        assert told() == ["waiting", None, None]
        held = queue.claim(service.database, "me", 1)
        assert held is not None
        assert told() == ["reading rows", 0, None]
        file = PhaseFile(folder)
        file.resume(141)
        file.begin("training", "continuing from epoch 141 of 200")
        assert told() == ["training", 0, 141]
        queue.finish(service.database, held, "done", None, 3)
        assert told() == [None, None, None]
        events = ask(service, f"GET /api/classifiers/{classifier}/events").body
        assert b'"phase":null,"phase_percent":null,"resumed_epoch":null' in events
