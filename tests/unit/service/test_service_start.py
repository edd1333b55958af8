"""What a start says of where the data is, and the scripts beside the service."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from service_requests import prepared

ROOT = Path(__file__).parents[3]
LONG_TEXTS = ROOT / "benchmarks" / "long_texts.py"


def test_places_of_data_and_database_are_told_at_every_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped address of a database is a path: the file that it makes is named, and is new."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "slipstream.apps.service")
    (tmp_path / "kept").touch()
    for data, database, file, new in (
        ("a", "", "a/service.db", " (new)"),
        ("b", "kept", "kept", ""),
        ("c", "nonsense", "nonsense", " (new)"),
    ):
        caplog.clear()
        with prepared(Path(data), database=database):
            [said] = [line for line in caplog.messages if "database" in line]
        assert said == f"data directory {tmp_path / data}; SQLite database {tmp_path / file}{new}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("given", "options"), [([], "serve"), (["PORT=9"], "serve --port '9'")])
def test_make_serve_takes_a_port(given: list[str], options: str) -> None:
    command = ["make", "--dry-run", "--directory", str(ROOT), "serve", *given]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f".venv/bin/slipstream {options}" in [line.strip() for line in told.splitlines()]


def run_long_texts(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(LONG_TEXTS), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


def test_long_texts_refuses_in_one_line(tmp_path: Path) -> None:
    for options, said in (
        (("--data", tmp_path, "--out", tmp_path / "out.csv", "--rows", -5), "--rows: -5 is less"),
        (("--data", "/nope", "--out", tmp_path / "out.csv"), "/nope/trec: no such folder"),
    ):
        done = run_long_texts(*options)
        assert done.returncode != 0
        assert said in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out.csv").exists()


def test_long_texts_says_what_its_folder_has() -> None:
    told = " ".join(run_long_texts("--help").stdout.split())
    assert "a folder with trec/, which has *.label files" in told
    assert "the CSV to write" in told
