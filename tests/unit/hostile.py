"""Files that nobody should have written, and the command line that reads them."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

import typer.main

from slipstream.apps.cli import main

ESCAPE = "\x1b[2J\x1b[31m"
# Typer makes all commands anew whenever it is called, which takes longer than most of them.
get_command = cache(typer.main.get_command)

# Whatever is expected, these are not it.
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(1000),
    "not text": b"\xff\xfe\x00\x80",
    "escapes": f"{ESCAPE}boo".encode(),
    "a formula": b"=1+1",
    "a word without end": b"a" * 900_000,
    "brackets": b"[" * 100_000,
    "deep JSON": b'{"a":' * 100_000,
    "deep JSON that ends": b'{"event":"rounds","durations_s":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep TOML": b"hosts = " + b"[" * 100_000,
    "deep TOML tables": b"hosts = " + b"{a=" * 50_000,
    "deep TOML that ends": b"rate" + b".a" * 400 + b" = 1\n[[hosts]]\nworkers=[0]",
    "a key of many parts": b"a" + b".a" * 300_000 + b" = 1",
    "a long number": b"[" + b"9" * 5000 + b"]",
    "a long number in TOML": b"rate = " + b"9" * 5000,
    "a longer number in TOML": b"rate = 0x" + b"f" * 50_000,
    "a long date": b"rate = 2020-01-01T00:00:00." + b"9" * 50_000,
    "a list": b"[1, 2]",
    "null": b"null",
    "lone surrogates": b'{"event": "rounds", "durations_s": {"\\ud800": "\\ud800"}}',
    "a long field": b"layer,shape,forward_ms,backward_ms\n" + b"x" * 200_000,
    "fields of nothing": b"," * 100_000,
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def special_files(folder: Path, suffix: str = "") -> dict[str, Path]:
    """What opens and is no file, or no file that can be held in memory."""
    vast = folder / f"vast{suffix}"
    vast.touch()
    os.truncate(vast, 1 << 40)  # takes no room
    pipe = folder / f"pipe{suffix}"
    os.mkfifo(pipe)
    inside = folder / f"folder{suffix}"
    inside.mkdir()
    endless = folder / f"endless{suffix}"
    endless.symlink_to("/dev/zero")
    return {
        "a vast file": vast,
        "a pipe that nobody fills": pipe,
        "a folder": inside,
        "a device": endless,
        "nothing": folder / f"missing{ESCAPE}{suffix}",
    }


def slipstream(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; an exception that is not the command's own comes through."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["slipstream", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(typer.main, "get_command", get_command),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    return int(code or 0), out.getvalue(), err.getvalue()


def assert_clear(result: tuple[int, str, str]) -> str:
    """Output, or one line that says what is wrong; nothing that a terminal would act on."""
    code, out, err = result
    assert (out + err).replace("\n", "").isprintable(), repr(out + err)
    if code == 0:
        assert out
        assert "nan" not in out.split()
        assert "inf" not in out.split()
        return out
    assert code == 2, err
    assert out == ""
    return assert_one_line(err)


def assert_one_line(err: str) -> str:
    assert err.startswith("slipstream: "), err
    assert len(err.splitlines()) == 1, err
    assert len(err) < 1500
    return err


def assert_refused(result: tuple[int, str, str]) -> str:
    assert result[0] == 2, result
    return assert_clear(result)
