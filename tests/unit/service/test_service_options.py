"""The options of ``serve``, ``keys`` and ``predict``: what is refused, and how."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from service_models import write_random_model
from typer.testing import CliRunner

from slipstream.apps.cli import app, predict, serve
from slipstream.printable import printable_lines

COMMAND = [sys.executable, "-m", "slipstream"]
COMMANDS = [
    (("serve", "--check"), serve.serve),
    (("keys", "add", "name"), serve.add),
    (("predict", "absent"), predict.predict),
]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(command, f"--{name.replace('_', '-')}", id=f"{command[0]} {name}")
        for command, function in COMMANDS
        for name, kind in get_type_hints(function).items()
        if int in (kind, *get_args(kind))
    ],
)
def test_a_number_out_of_range_is_refused(command: tuple[str, ...], name: str) -> None:
    """Before anything is done, by the name of its option."""
    for number in (-1, 10**30):
        done = CliRunner().invoke(app, [*command, name, str(number)])
        assert done.exit_code == 2, done.output
        assert f"Invalid value for '{name}'" in done.output
        assert "Traceback" not in done.output


def test_a_port_that_does_not_exist() -> None:
    done = CliRunner().invoke(app, ["serve", "--port", "99999"])
    assert done.exit_code == 2
    assert "Invalid value for '--port'" in done.output
    assert "65535" in done.output


def test_no_option_is_negated_twice() -> None:
    for command, _ in COMMANDS:
        shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output
        assert set(re.findall("--no-[a-z-]+", shown)) <= {"--no-auth"}


def test_predict_without_a_text(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model")
    done = subprocess.run(
        [*COMMAND, "predict", "model"], cwd=tmp_path, input=" \n\n", capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no text to classify: give TEXT, or lines of texts on stdin" in done.stderr


def test_predict_at_a_terminal_says_what_it_waits_for(tmp_path: Path) -> None:
    write_random_model(tmp_path / "model")
    outer, terminal = pty.openpty()
    with os.fdopen(outer, "r+b", buffering=0) as keyboard:
        process = subprocess.Popen(
            [*COMMAND, "predict", "model"],
            cwd=tmp_path,
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(terminal)
        assert process.stderr is not None
        assert "type texts, one a line; Ctrl-D ends" in printable_lines(process.stderr.readline())
        keyboard.write(b"hot\n\x04")
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said.startswith("class ")
