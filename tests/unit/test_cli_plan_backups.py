"""``slipstream plan-backups``: what it reads, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

STEADY = {str(worker): [0.1] * 20 for worker in range(5)}
ONE_SLOW = STEADY | {"4": [0.5] * 20}


@pytest.fixture
def runlog(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def write(runlog: Path, *durations: Any) -> Path:
    """A log as a run leaves it, with a line about rounds for each."""
    lines: list[dict[str, Any]] = [{"event": "start", "workers": 5}, {"event": "step", "step": 1}]
    lines += [{"event": "rounds", "durations_s": given} for given in durations]
    runlog.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"event": "end"}]))
    return runlog


def test_a_row_for_every_split_and_the_best_in_words(slipstream, runlog: Path) -> None:
    code, out, _ = slipstream("plan-backups", write(runlog, ONE_SLOW))
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert rows[3] == ["4", "1", "100", "5%", "1.20", "0.24", "best"]
    assert rows[4] == ["5", "0", "500", "0%", "1.00", "1.00"]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    # 5 iterations of 0.5 s against 6 of 0.1 s
    last = out.splitlines()[-1]
    assert last == "best: first=4 (1 backup): 4.17 x faster than waiting for all 5"


def test_no_backups_may_be_best(slipstream, runlog: Path) -> None:
    code, out, _ = slipstream("plan-backups", write(runlog, STEADY))
    assert code == 0
    assert out.endswith("best: first=5 (no backups): nothing beats waiting for all 5\n")


def test_the_last_line_about_rounds_counts(slipstream, runlog: Path) -> None:
    assert "first=5" in slipstream("plan-backups", write(runlog, ONE_SLOW, STEADY))[1]


def test_given_iterations_decide(slipstream, runlog: Path) -> None:
    log = write(runlog, {"0": [0.1] * 20, "1": [0.15] * 20})
    # Half as many iterations with two as with one are worth a round 1.5 times as long; as many,
    # whoever makes the round, are not.
    assert "best: first=2" in slipstream("plan-backups", log, "--iterations", "1:1000, 2:500")[1]
    assert "best: first=1" in slipstream("plan-backups", log, "--iterations=1:1000,2:1000")[1]


def test_json(slipstream, runlog: Path, tmp_path: Path) -> None:
    file = tmp_path / "plans" / "backups.json"
    options = ("--rounds=50", "--seed=3", f"--json={file}", "--iterations=2:800,4:500")
    assert slipstream("plan-backups", write(runlog, ONE_SLOW), *options)[0] == 0
    report = json.loads(file.read_text())
    assert (report["rounds"], report["seed"]) == (50, 3)
    assert report["iterations"] == [[2, 800], [4, 500]]
    assert [split["first"] for split in report["splits"]] == [1, 2, 3, 4, 5]
    assert report["best"] == report["splits"][3]
    assert report["best"]["round_s"] == pytest.approx(0.1)


def refused(slipstream, *arguments: object) -> str:
    code, out, err = slipstream("plan-backups", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("slipstream: ")
    assert len(err.splitlines()) == 1
    return str(err)


def test_no_such_log(slipstream, runlog: Path) -> None:
    assert f"there is no run log {runlog}" in refused(slipstream, runlog)


def test_a_folder(slipstream, tmp_path: Path) -> None:
    assert "cannot read the run log" in refused(slipstream, tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"event": "start"}\nepoch 1\n', "line 2: not a JSON object"),
        (b"[1, 2]\n", "line 1: not a JSON object"),
        (b"\xff\xfe\x00", "is not text"),
        (b"", "was it a run with backup_workers?"),
        (b'{"event": "start"}\n\n', "only those record arrival times"),
    ],
)
def test_what_is_no_log_of_such_a_run(slipstream, runlog: Path, content: bytes, says: str) -> None:
    runlog.write_bytes(content)
    assert says in refused(slipstream, runlog)


@pytest.mark.parametrize(
    ("durations", "says"),
    [
        ({}, "arrival times of 0 workers"),
        ({"0": [0.1] * 20}, "arrival times of 1 worker:"),
        (ONE_SLOW | {"3": [0.1] * 7}, "7 steps of worker 3: too few"),
        (ONE_SLOW | {"3": [0.1] * 9 + [0.0]}, "worker 3, step 9: a duration of 0.0 s"),
        (ONE_SLOW | {"3": 0.1}, "cannot be read"),
        (ONE_SLOW | {"three": [0.1] * 9}, "cannot be read"),
        ([0.1, 0.2], "cannot be read"),
    ],
)
def test_durations_of_no_use(slipstream, runlog: Path, durations: Any, says: str) -> None:
    assert says in refused(slipstream, write(runlog, durations))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", "cannot read '4'; write N:ITERATIONS"),
        ("4:1200,x:3", "cannot read 'x:3'"),
        ("4:1200", "two different N"),
        ("4:1200,8:-3", "iterations 8:-3"),
    ],
)
def test_iterations_of_no_use(slipstream, runlog: Path, text: str, says: str) -> None:
    assert says in refused(slipstream, write(runlog, ONE_SLOW), f"--iterations={text}")
