"""``job.watch``: the metrics of a job in outputs of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import slipstream
from slipstream.job_figures import JobFigures
from slipstream.runtime.process.environment import Environment

STEPS = 3


class Kept(slipstream.Watcher):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        self.calls.append(("note", step, dict(figures)))

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        self.calls.append((event, dict(content)))

    def close(self) -> None:
        self.calls.append(("close",))

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Broken(slipstream.Watcher):
    """A server that is gone."""

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        raise ConnectionError("no such server")


def train(
    *early: slipstream.Watcher, late: slipstream.Watcher | None = None, fails: bool = False
) -> None:
    model = torch.nn.Linear(2, 1)
    with slipstream.init() as job:
        for watcher in early:
            job.watch(watcher)
        _, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(STEPS):
            if late is not None and step == 1:
                job.watch(late)
            optimizer.step()
            job.record(loss=0.5 / (step + 1), samples=4, perplexity=7.0)
        if fails:
            raise KeyError("the data")


def test_every_step_with_what_was_recorded_and_what_it_cost() -> None:
    kept = Kept()
    train(kept)
    assert kept.names == ["start", *["note"] * STEPS, "close"]
    assert kept.calls[0] == ("start", {"strategy": "push_pull", "workers": 1})
    assert [call[1] for call in kept.calls[1:-1]] == [1, 2, 3]
    assert kept.calls[1][2] == {
        "loss": 0.5,
        "perplexity": 7.0,
        "samples": 4,
        "sent_bytes": 0,
        "received_bytes": 0,
        "wait_s": 0.0,
    }


def test_a_watcher_may_come_in_the_middle() -> None:
    first, second = Kept(), Kept()
    train(first, late=second)
    assert first.names == ["start", "note", "note", "note", "close"]
    assert second.names == ["start", "note", "note", "close"]


def test_a_job_that_fails_says_so() -> None:
    kept = Kept()
    with pytest.raises(KeyError):
        train(kept, fails=True)
    assert kept.names[-2:] == ["failed", "close"]
    assert "the data" in kept.calls[-2][1]["error"]


def test_a_watcher_that_fails_does_not_end_the_training(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    train(Broken(), kept)
    assert kept.names.count("note") == STEPS
    said = caplog.text + capfd.readouterr().err
    assert said.count("Broken cannot be written (ConnectionError: no such server)") == 1


def test_only_rank_0_watches() -> None:
    kept = Kept()
    figures = JobFigures(Environment(rank=1, world_size=2))
    figures.watch(kept)
    figures.begin("push_pull")
    figures.close()
    assert kept.calls == []


def test_something_else_is_refused() -> None:
    with (
        slipstream.init() as job,
        pytest.raises(slipstream.ConfigError, match=r"slipstream\.Watcher, not function: .*note"),
    ):
        job.watch(train)  # type: ignore[arg-type]
