import io
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pytest

from slipstream.errors import (
    EXIT_PEER_FAILED,
    CheckpointError,
    ConfigError,
    LaunchError,
    NonFiniteGradient,
    PeerFailed,
    PeerLost,
    SlipstreamError,
    UnknownStrategy,
    WaitLimit,
)
from slipstream.runtime.launch.process_group import log_line
from slipstream.runtime.process.error_reporting import (
    REPORT_S,
    describe_error,
    failed_line,
    learner_reports,
    location,
    report_errors,
    reporting_rank,
)


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (UnknownStrategy("x"), 0),
        (WaitLimit("results", 3, ["rank 0"]), 0),
        (PeerLost("rank 2", 6.0), 0),
        (PeerLost("rank 0", 6.0), 1),
        (PeerFailed("rank 0", "boom"), 1),
        (PeerFailed("server 0", "boom"), 0),
        (LaunchError("nobody there", missing=["rank 0"]), 1),
        (LaunchError("nobody there", missing=["rank 2"]), 0),
    ],
)
def test_one_rank_speaks_for_all(error: SlipstreamError, rank: int) -> None:
    assert reporting_rank(error) == rank


def test_what_was_told_already_is_not_said_again() -> None:
    assert reporting_rank(PeerFailed("rank 0", "boom", reported=True)) == -1


@pytest.fixture(autouse=True)
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def error_reporting(rank: int, error: BaseException) -> None:
    report_errors(rank)
    try:
        raise error
    except BaseException as caught:
        sys.excepthook(type(caught), caught, caught.__traceback__)


def test_an_error_is_one_line_and_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    error_reporting(0, ConfigError("no such thing"))
    said = capsys.readouterr().err
    assert said.startswith("slipstream: no such thing\n  at ")
    assert "raise error" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PeerFailed("rank 1", "KeyError: 'x'"), "rank 1 failed: KeyError: 'x'"),
        (PeerFailed("rank 1", "KeyError: 'x'", where="train.py, line 7: y = seen['x']"),
         "rank 1 failed: KeyError: 'x'\n  on rank 1, at train.py, line 7: y = seen['x']"),
    ],
)  # fmt: skip
def test_the_line_of_a_rank_that_waited_is_not_the_place_of_a_peers_failure(
    error: SlipstreamError, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        error_reporting(0, error)
    assert capsys.readouterr().err == f"slipstream: {says}\n"


def test_where_this_rank_waited_for_a_lost_peer_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        error_reporting(0, PeerLost("rank 1", 6.0))
    said = capsys.readouterr().err
    assert said.startswith("slipstream: rank 1 is lost: nothing heard from it for 6.0 s (killed, ")
    assert f"\n  this rank waited at {__file__}, line " in said


def test_every_exit_has_pythons_name() -> None:
    class Exit(SystemExit):
        pass

    assert describe_error(Exit(3)) == "SystemExit: 3"


def test_names_of_files_that_are_no_utf_8_can_be_sent() -> None:
    name = os.fsdecode(b"/data/d\xff/train.py")
    assert describe_error(FileNotFoundError(name)) == "FileNotFoundError: /data/d\\udcff/train.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", name, "exec"))
    assert "/data/d\\udcff/train.py, line 1" in failed_line(raised.tb)
    for text in (describe_error(CheckpointError(name)), failed_line(raised.tb)):
        assert msgspec.msgpack.encode(text)


def test_what_a_peer_said_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        error_reporting(0, PeerFailed("rank 1", "first\nsecond\x1b[2J\rslipstream: all is well"))
    said = capsys.readouterr().err
    assert "rank 1 failed: first\nsecond\\x1b[2J\\rslipstream: all is well\n" in said
    log_line("\x1b[2J")
    assert capsys.readouterr().err == "slipstream: \\x1b[2J\n"


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    error_reporting(2, ConfigError("no such thing"))
    assert capsys.readouterr().err == ""


def test_anothers_failure_has_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        error_reporting(1, PeerLost("rank 2", 6.0))
    assert ended.value.code == EXIT_PEER_FAILED
    assert capsys.readouterr().err == ""


def test_the_users_own_errors_are_shown_as_python_shows_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error_reporting(1, ZeroDivisionError("theirs"))
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ZeroDivisionError: theirs" in said


def test_the_place_is_the_users_own_line_where_a_framework_has_called() -> None:
    framework = "/env/lib/python3.11/site-packages/transformers/trainer.py"
    made: dict[str, Any] = {}
    exec(compile("def train(fail): fail()", framework, "exec"), made)

    def fail() -> None:
        exec(compile("raise ValueError", framework, "exec"))

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text does not matter
        made["train"](fail)
    assert Path(__file__).name in failed_line(caught.value.__traceback__)


def test_without_a_trace_there_is_no_place() -> None:
    assert location(ConfigError("no such thing"), None) == ""


def test_a_line_of_the_script_comes_before_a_line_of_its_framework() -> None:
    framework = compile("def call(f): return f()", "/lib/site-packages/framework/loop.py", "exec")
    names: dict[str, Any] = {}
    exec(framework, names)
    with pytest.raises(TypeError) as raised:
        names["call"](lambda: names["call"](None))
    *_, last = traceback.walk_tb(raised.tb)
    assert Path(__file__).name in failed_line(raised.tb)
    assert "framework/loop.py" in failed_line(
        TracebackType(None, last[0], last[0].f_lasti, last[1])
    )


def test_a_line_is_printed_though_torchs_hook_collects_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch puts the rank in front of each line, in a hook that it sets with its default group."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit):
        error_reporting(0, PeerFailed("rank 1", "ValueError: broken"))
    assert capfd.readouterr().err.startswith("slipstream: rank 1 failed: ValueError: broken\n")


def test_a_learner_says_its_own_faults_which_nobody_else_hears_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_errors(1, lambda error: learner_reports(error, rank=1))
    for error in (NonFiniteGradient(1, "w", 3), UnknownStrategy("no such system")):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("slipstream: rank 1: the gradient of 'w' is not finite at step 3;")


@pytest.mark.parametrize(("rank", "waits"), [(0, []), (1, [REPORT_S])])
def test_under_torchrun_rank_0_reports_and_others_do_if_it_has_not_ended_them(
    rank: int,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("slipstream.runtime.process.error_reporting.time.sleep", slept.append)
    error_reporting(rank, ConfigError("alike on all ranks"))
    assert slept == []
    capsys.readouterr()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    error_reporting(rank, ConfigError("alike on all ranks"))
    assert slept == waits
    assert capsys.readouterr().err.startswith("slipstream: alike on all ranks\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_under_torchrun_the_rank_that_failed_ends_first(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun names the first one as the cause."""
    slept: list[float] = []
    monkeypatch.setattr("slipstream.runtime.process.error_reporting.time.sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit):
        error_reporting(rank, PeerFailed("rank 2", "ValueError: theirs"))
    assert slept == [REPORT_S]


def test_under_torchrun_what_was_reported_already_is_not_reported_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(SystemExit):
        error_reporting(1, PeerFailed("rank 0", "reported there", reported=True))
    assert capsys.readouterr().err == ""
