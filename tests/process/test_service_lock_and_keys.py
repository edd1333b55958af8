"""A database that another process locks, and the first key."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from service_process import ServiceProcess, environment

pytestmark = pytest.mark.process


def test_kill_of_the_trainer_while_the_database_is_locked(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.training()
        other = sqlite3.connect(service.data / "service.db", isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            service.trainer().kill()
            service.wait_for(lambda: "the trainer cannot be run" in service.log.read_text())
            assert service.get("/livez").status_code == 200
            other.execute("ROLLBACK")
        service.go()
        service.wait_status(classifier, "Available")


def test_the_first_key_gets_what_was_made_without_one(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        classifier = service.created()
        command = [sys.executable, "-m", "slipstream", "keys", "add", "--data"]
        made = [
            subprocess.run(
                [*command, str(service.data), name],
                env=environment(),
                capture_output=True,
                text=True,
                check=True,
            )
            for name in ("alice", "bob")
        ]
        assert "alice owns the classifiers that were made without one: 1." in made[0].stderr
        assert made[1].stderr == ""
        path = f"/v1/classifiers/{classifier}"
        answers = [service.get(path, auth=("apikey", one.stdout.strip())) for one in made]
        assert [answer.status_code for answer in answers] == [200, 404]
        assert service.get(path).status_code == 401


def test_a_database_that_does_not_know_the_directory(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "slipstream",
            *arguments,
            "--data",
            str(service.data),
        ]
        return subprocess.run(command, env=environment(), capture_output=True, text=True)

    address = ("--database", str(tmp_path / "other.db"))
    with ServiceProcess(tmp_path / "data", *address) as service:
        classifier = service.created()
        service.wait_status(classifier, "Available")
        assert service.stop() == 0
        model = service.data / "classifiers" / classifier / "1" / "model.safetensors"
        for arguments in (["serve", "--check"], ["serve"], ["keys", "add", "team"], ["serve"]):
            refused = run(*arguments)
            assert refused.returncode == 2
            assert "was --database forgotten?" in refused.stderr
        left = model.parent.parent / "2"
        left.mkdir()
        assert run("serve", "--check", *address).returncode == 0
        assert left.exists()  # a check removes nothing
        service.start()
        assert not left.exists()
        assert model.exists()
        assert service.get(f"/v1/classifiers/{classifier}").json()["status"] == "Available"


def test_nobody_else_may_read(tmp_path: Path) -> None:
    """Also if the directory was made by hand, and if the first command was not ``serve``."""
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "keys",
        "add",
        "team",
        "--data",
        str(data),
    ]
    done = subprocess.run(
        command, env=environment(), capture_output=True, check=True, umask=0o022, text=True
    )
    assert f"{data} was made for this key, and no service uses it yet: start one" in done.stderr

    def modes() -> set[tuple[bool, str]]:
        found = [data, *data.rglob("*")]
        return {(path.is_dir(), oct(path.stat().st_mode & 0o777)) for path in found}

    assert modes() == {(True, "0o700"), (False, "0o600")}
    (data / "service.db").chmod(0o644)  # as made by an earlier version
    with ServiceProcess(data):
        assert modes() == {(True, "0o700"), (False, "0o600")}


def test_messages_name_the_directory_without_keys_and_the_file_that_is_no_model(
    tmp_path: Path,
) -> None:
    (tmp_path / "data" / "classifiers").mkdir(parents=True)
    (tmp_path / "model").write_text("junk")
    said = {
        ("keys", "list", "--data", "data"): "data has no keys: its service takes requests without",
        ("predict", "model", "text"): "slipstream: model: the model file is damaged, or is no",
        ("predict", "absent", "text"): "slipstream: absent: the model file cannot be read: No such",
    }
    for arguments, expected in said.items():
        command = [sys.executable, "-m", "slipstream", *arguments]
        # With the real model's code: the other tests have a stand-in.
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert expected in done.stderr


def test_a_mistyped_directory_is_not_made(tmp_path: Path) -> None:
    for arguments in (["serve", "--check"], ["keys", "list"], ["keys", "revoke", "sk_123456"]):
        command = [sys.executable, "-m", "slipstream", *arguments, "--data", "mistyped"]
        refused = subprocess.run(
            command, env=environment(), capture_output=True, text=True, cwd=tmp_path
        )
        assert refused.returncode == 2
        assert "mistyped is no data directory of a service; give the right one" in refused.stderr
        assert not list(tmp_path.iterdir())


def test_a_wrong_key_is_not_taken_for_none(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", "--no-auth") as service:
        wrong = ("apikey", "sk_" + 43 * "x")
        assert service.get("/v1/classifiers", auth=wrong).status_code == 200  # there are no keys
        command = [sys.executable, "-m", "slipstream", "keys", "add", "alice", "--data"]
        subprocess.run([*command, str(service.data)], env=environment(), check=True)
        assert service.get("/v1/classifiers", auth=wrong).status_code == 401
        assert service.get("/v1/classifiers").status_code == 200
