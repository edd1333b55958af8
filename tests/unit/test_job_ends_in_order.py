"""The order in which a job ends in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import slipstream
from slipstream.errors import PeerFailed
from slipstream.job_end import JobEnd, end_open_jobs


def ending(told: list[str], finish: Any) -> JobEnd:
    def note(name: str) -> Any:
        return lambda *_: told.append(name)

    env: Any = SimpleNamespace(rank=0)
    session: Any = SimpleNamespace(abort=note("abort"), close=note("session"))
    presence: Any = SimpleNamespace(leave=note("leave"))
    figures: Any = SimpleNamespace(close=note("outputs"))
    group = SimpleNamespace(close=note("group"))
    return JobEnd(env, session, presence, figures, group, finish)  # type: ignore[arg-type]


def test_others_learn_of_an_error_before_outputs_are_closed() -> None:
    told: list[str] = []
    end = ending(told, lambda: told.append("finish"))
    end.end(ValueError("broken"))
    end.end(None)  # it is over
    assert told == ["abort", "outputs", "group", "session"]


def test_an_error_at_the_end_is_told_like_one_of_the_loop() -> None:
    told: list[str] = []

    def finish() -> None:
        raise ValueError("the last weights did not come")

    with pytest.raises(ValueError, match="did not come"):
        ending(told, finish).end(None)
    assert told == ["abort", "outputs", "group", "session"]


def test_a_good_end() -> None:
    told: list[str] = []
    ending(told, lambda: told.append("finish")).end(None)
    assert told == ["finish", "leave", "outputs", "group", "session"]


def test_a_process_that_goes_on_ends_its_open_jobs() -> None:
    told: list[str] = []
    ending(told, lambda: told.append("finish"))
    ending([], lambda: None).end(None)
    end_open_jobs()
    end_open_jobs(ValueError("too late to count"))
    assert told == ["finish", "leave", "outputs", "group", "session"]


def test_ctrl_c_while_the_reason_of_an_error_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others learn of it, and the job is left."""
    told: list[str] = []

    def interrupted(error: BaseException) -> None:
        raise KeyboardInterrupt

    def loop() -> None:
        with slipstream.init() as job:
            monkeypatch.setattr(job._session, "fault_behind", interrupted)
            monkeypatch.setattr(job._session, "abort", lambda e: told.append(type(e).__name__))
            monkeypatch.setattr(job._session, "close", lambda: told.append("session"))
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert told == ["KeyboardInterrupt", "session"]


def test_the_reason_of_an_error_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework may ask before the end of the job does."""
    asked: list[BaseException] = []
    fault, error = PeerFailed("rank 1", "it broke"), RuntimeError("Connection closed by peer")

    def fault_behind(error: BaseException) -> PeerFailed:
        asked.append(error)
        return fault

    def loop() -> None:
        with slipstream.init() as job:
            monkeypatch.setattr(job._session, "fault_behind", fault_behind)
            assert job.fault_behind(error) is fault
            raise error

    with pytest.raises(PeerFailed):
        loop()
    assert asked == [error]


def test_what_cannot_be_sent_does_not_keep_a_job_open() -> None:
    told: list[str] = []
    end = ending(told, lambda: None)

    def abort(error: BaseException) -> None:
        raise OSError("the link is gone")

    end._session.abort = abort  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"):
        end.end(ValueError("broken"))
    assert told == ["outputs", "group", "session"]
