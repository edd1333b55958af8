from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Says what it was given."""
    file = tmp_path / "script.py"
    file.write_text(
        "import json, os, sys\nprint(json.dumps({'argv': sys.argv[1:], **dict(os.environ)}))"
    )
    return file


def test_help_names_the_commands(slipstream) -> None:
    code, out, _ = slipstream("--help")
    assert code == 0
    assert "run" in out
    assert "train" in out


@pytest.mark.parametrize("command", [("run",), ("train", "digits")])
def test_help_of_commands_that_start_jobs(slipstream, command: tuple[str, ...]) -> None:
    code, out, _ = slipstream(*command, "--help")
    assert code == 0
    for option in ("workers", "strategy", "servers", "json", "log", "no-encrypt", "port"):
        assert f"--{option}" in out


def test_version(slipstream) -> None:
    code, out, _ = slipstream("--version")
    assert code == 0
    assert out.startswith("slipstream ")


def test_the_command_line_does_without_torch() -> None:
    check = "import slipstream.apps.cli, slipstream.systems, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_arguments_reach_the_script_untouched(slipstream, script: Path) -> None:
    arguments = ["--workers", "9", "-m", "x y", "--help", "--", "-j3", "", "--lr=1", "*"]
    code, out, _ = slipstream("run", script, *arguments)
    assert code == 0
    assert json.loads(out)["argv"] == arguments


def test_module(slipstream, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    code, out, _ = slipstream("run", "--workers", "1", "-m", "script", "--flag", "-m")
    assert code == 0
    assert json.loads(out)["argv"] == ["--flag", "-m"]


def test_options_reach_the_worker(slipstream, script: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length\n")
    code, out, _ = slipstream(
        "run",
        "--strategy=push_pull(overlap=False)",
        f"--json={tmp_path}/out.json",
        f"--log={tmp_path}/log.jsonl",
        f"--tensorboard={tmp_path}/events",
        "--prometheus=9100",
        f"--secret-file={secret}",
        "--no-encrypt",
        "--interface=lo",
        script,
    )
    assert code == 0
    env = json.loads(out)
    told = {key: env.get(f"SLIPSTREAM_{key}") for key in ("STRATEGY", "JSON", "LOG", "TENSORBOARD")}
    assert told == {
        "STRATEGY": "push_pull(overlap=False)",
        "JSON": f"{tmp_path}/out.json",
        "LOG": f"{tmp_path}/log.jsonl",
        "TENSORBOARD": f"{tmp_path}/events",
    }
    assert env["SLIPSTREAM_PROMETHEUS"] == "9100"
    assert env["SLIPSTREAM_SECRET"] == "a secret of some length"
    assert env["SLIPSTREAM_ENCRYPT"] == "0"
    assert env["SLIPSTREAM_INTERFACE"] == "lo"


def test_strategy_and_secret_may_come_from_the_environment(
    slipstream, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_STRATEGY", "allreduce")
    monkeypatch.setenv("SLIPSTREAM_SECRET", "sixteen letters!")
    env = json.loads(slipstream("run", script)[1])
    assert (env["SLIPSTREAM_STRATEGY"], env["SLIPSTREAM_SECRET"]) == (
        "allreduce",
        "sixteen letters!",
    )


def test_exit_code_is_the_scripts(slipstream, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    assert slipstream("run", script) == (7, "", "slipstream: rank 0 exited with code 7\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--strategy=push_pul"], "push_pull"),
        (["--strategy=push_pull(speed=9)"], "speed"),
        (["--strategy=push_pull("], "cannot read strategy"),
        (["--json=script.py/out.json"], "no such folder can be made"),
        (["--json=."], "that is a folder"),
        (["--secret-file=no-such-file"], "no-such-file"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(
    slipstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    started = tmp_path / "started"
    script = tmp_path / "script.py"
    script.write_text(f"open({str(started)!r}, 'w')")
    code, out, err = slipstream("run", *arguments, script)
    assert (code, out) == (2, "")
    assert err.startswith("slipstream: ")
    assert len(err.splitlines()) == 1
    assert says in err
    assert not started.exists()


def test_missing_script(slipstream) -> None:
    code, _, err = slipstream("run", "nowhere.py")
    assert code == 2
    assert err.startswith("slipstream: there is no script 'nowhere.py'")


def test_batch_smaller_than_the_workers(slipstream) -> None:
    code, _, err = slipstream("train", "digits", "--workers=4", "--batch=3")
    assert code == 2
    assert "--batch 3" in err


def test_missing_scikit_learn_names_the_extra(slipstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.apps.cli.train.find_spec", lambda name: None)
    code, _, err = slipstream("train", "digits")
    assert code == 2
    assert "slipstream[train]" in err


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-m", "slipstream", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("slipstream ")
