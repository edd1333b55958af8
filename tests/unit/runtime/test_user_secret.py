"""A user's own secret: made once, for its owner only, and refused if others may know it."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import SecretError
from slipstream.runtime.process import user_secret as user_secrets
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.user_secret import user_secret, user_secret_path

ACROSS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "29500"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = user_secret_path({"XDG_CONFIG_HOME": str(tmp_path)})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HOME": "/home/me"}, Path("/home/me/.config/slipstream/secret")),
        ({"HOME": "/home/me", "XDG_CONFIG_HOME": "/etc/me"}, Path("/etc/me/slipstream/secret")),
        (
            {"HOME": "/home/me", "XDG_CONFIG_HOME": "relative"},
            Path("/home/me/.config/slipstream/secret"),
        ),
        ({}, None),
        ({"HOME": ""}, None),
    ],
)
def test_path_follows_home_and_xdg(env: dict[str, str], expected: Path | None) -> None:
    assert user_secret_path(env) == expected


def test_secret_is_made_once_and_for_its_owner_only(path: Path) -> None:
    before = os.umask(0)
    try:
        made = user_secret(path)
    finally:
        os.umask(before)
    assert len(made) == 64
    assert user_secret(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_processes_that_make_it_at_the_same_time_get_the_same(path: Path) -> None:
    def make_one(_: int) -> None:
        user_secrets.make(path)  # none has seen the others' file

    path.parent.mkdir(mode=0o700)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_one, range(16)))
        assert len(set(pool.map(lambda _: user_secret(path), range(16)))) == 1
    assert os.listdir(path.parent) == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_secret_that_others_may_read_is_refused(mode: int, path: Path) -> None:
    user_secret(path)
    path.chmod(mode)
    with pytest.raises(SecretError, match=rf"others may read or write .*mode {mode:o}.*chmod 600"):
        user_secret(path)


def test_folder_that_others_may_write_is_refused(path: Path) -> None:
    user_secret(path)
    path.parent.chmod(0o777)
    with pytest.raises(SecretError, match=r"others may write to .*chmod 700"):
        user_secret(path)


def test_symbolic_link_is_refused(path: Path, tmp_path: Path) -> None:
    user_secret(path)
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(SecretError, match=r"is a symbolic link.*SLIPSTREAM_SECRET_FILE"):
        user_secret(path)
    (tmp_path / "other").unlink()
    with pytest.raises(SecretError, match="is a symbolic link"):
        user_secret(path)


def test_secret_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_secret(path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SecretError, match=r"belongs to user .* runs as"):
        user_secret(path)


def test_none_is_made_in_another_users_home(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise ``sudo`` would leave a file that its owner cannot read."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SecretError, match=rf"would be made in {path.parent}; set HOME .*sudo"):
        user_secret(path)
    assert not path.parent.exists()


def test_pipe_is_refused_without_waiting(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path, 0o600)
    with pytest.raises(SecretError, match="is no file"):
        user_secret(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (bytes(range(128, 160)), "is not text"),
        (b"short\n", "shorter than 16"),
        (b"x" * 100_000, "more than 65536 bytes"),
    ],
)
def test_content_that_is_no_secret_is_refused(content: bytes, says: str, path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    env = Environment.read({**ACROSS, "XDG_CONFIG_HOME": str(path.parent.parent)})
    with pytest.raises(SecretError, match=says) as refused:
        env.with_secret()
    assert "across hosts a job secret is needed; your own cannot be used" in str(refused.value)


def test_environment_takes_the_users_secret_only_where_one_is_needed(path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(path.parent.parent)}
    here = Environment.read({**ACROSS, **home, "MASTER_ADDR": "localhost"})
    assert here.with_secret() == here
    given = Environment.read({**ACROSS, **home, "SLIPSTREAM_SECRET": "x" * 20})
    assert given.with_secret() == given
    assert not path.exists()
    agent = replace(here, agent_store=True).with_secret()
    assert agent.secret == user_secret(path).encode()
    assert Environment.read({**ACROSS, **home}).with_secret().secret_from == path


def test_home_that_cannot_be_written_is_named() -> None:
    env = Environment.read({**ACROSS, "HOME": "/dev/null"})
    with pytest.raises(SecretError, match=r"/dev/null/.config/slipstream/secret cannot be used"):
        env.with_secret()
