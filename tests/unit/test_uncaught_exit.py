"""Exits of scripts: which of them end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.uncaught_exit import UncaughtExit

PROGRAM = """
import argparse, atexit, contextlib, sys
from slipstream.uncaught_exit import UncaughtExit

exit_ = UncaughtExit()
exit_.watch()
atexit.register(lambda: print(repr(exit_.failure)))

def leave(code=3):
    sys.exit(code)

def parse():
    argparse.ArgumentParser(exit_on_error=True).parse_args(["--unknown"])

@contextlib.contextmanager
def passing():
    yield

def caught():
    try:
        leave()
    except SystemExit:
        pass

def raised_again():
    try:
        leave()
    except BaseException as error:
        raise

"""
CASES = {
    "leave()": "SystemExit(3)",
    "leave('bad data')": "SystemExit('bad data')",
    "leave(0)": "None",
    "leave(None)": "None",
    "sys.exit()": "None",
    "sys.exit(SystemExit(0))": "None",
    "sys.exit(SystemExit(4))": "SystemExit(4)",
    "sys.exit((5,))": "SystemExit(5)",
    "with passing(): leave()": "SystemExit(3)",
    "raised_again()": "SystemExit(3)",
    "with contextlib.suppress(SystemExit): leave(5)\nleave()": "SystemExit(3)",
    "caught()": "None",
    "with contextlib.suppress(SystemExit): parse()": "None",
    "try: leave()\nexcept SystemExit: pass": "None",
    "try: leave()\nexcept SystemExit as error: kept = error": "None",
    "parse()": "SystemExit(2)",
}


@pytest.mark.parametrize("as_module", [False, True])
def test_only_an_exit_that_nobody_catches_is_noted(tmp_path: Path, as_module: bool) -> None:
    started = []
    for number, last in enumerate(CASES):
        (tmp_path / f"case{number}.py").write_text(PROGRAM + last)
        how = ["-m", f"case{number}"] if as_module else [f"case{number}.py"]
        command = [sys.executable, *how]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
    told = [process.communicate(timeout=60)[0].strip() for process in started]
    assert dict(zip(CASES, told, strict=True)) == CASES


PLACE = """
import pickle, sys
from concurrent.futures import ThreadPoolExecutor
from slipstream.uncaught_exit import UncaughtExit

before, exit_ = sys.exit, UncaughtExit()
exit_.watch()
assert sys.exit is not before
assert sys.exit.__name__ == "exit"
assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(sys.exit, 3).exception().code == 3
try:
    sys.exit(4)
except SystemExit as error:
    assert error.code == 4
    assert type(again := pickle.loads(pickle.dumps(error))) is SystemExit
    assert again.code == 4
exit_.close()
assert sys.exit is before
assert exit_.failure is None
"""


def test_threads_end_alone_and_the_function_stays_what_it_was() -> None:
    """In a process of its own: other libraries replace the function, too."""
    subprocess.run([sys.executable, "-c", PLACE], check=True, timeout=60)


def test_the_line_of_an_exit_is_known(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    last = "traceback.extract_tb(exit_.failure.__traceback__)[-1].line"
    shown = f"atexit.register(lambda: print({last}))"
    script.write_text(f"{PROGRAM}\nimport traceback\n{shown}\nleave()")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 3
    assert "sys.exit(code)" in done.stdout, done.stderr


def test_what_others_put_in_its_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, exit_ = sys.exit, UncaughtExit()
    exit_.watch()
    monkeypatch.setattr(sys, "exit", other := lambda code=None: before(code))
    exit_.close()
    assert sys.exit is other
    monkeypatch.undo()
    sys.exit = before
