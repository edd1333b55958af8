"""Life-cycle events: one line with fields, as data too, and nothing unless somebody asks."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.runtime.figures.telemetry import has_handlers
from slipstream.runtime.process.event_log import Field, log_event, shown

SCRIPT = """
import logging, sys, torch, slipstream
if "ask" in sys.argv:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
with slipstream.init() as job:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = job.distribute(model, optimizer, "push_pull")
    job.save("checkpoint")
    job.load("checkpoint")
"""


def ran(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout


def test_a_script_that_asks_is_told_of_the_jobs_life(tmp_path: Path) -> None:
    assert ran(tmp_path, "ask").splitlines() == [
        "slipstream.sessions.alone joined rank=0 size=1 host=localhost",
        "slipstream.job plan_chosen rank=0 strategy=push_pull tensors=2 chunks=1 servers=1",
        "slipstream.job checkpoint_written rank=0 path=checkpoint step=0",
        "slipstream.job checkpoint_loaded rank=0 path=checkpoint step=0",
        "slipstream.job left rank=0 error=none",
    ]


def test_a_script_that_does_not_ask_sees_nothing(tmp_path: Path) -> None:
    assert ran(tmp_path) == ""


def test_an_event_has_its_fields_as_text_and_as_data(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("slipstream.example")
    caplog.set_level(logging.INFO, logger="slipstream")
    log_event(logger, "member_lost", member="rank 2", silent_s=5.25)
    log_event(logger, "unseen", level=logging.DEBUG)
    (record,) = caplog.records
    assert record.getMessage() == 'member_lost member="rank 2" silent_s=5.25'
    assert record.__dict__["event"] == "member_lost"
    assert record.__dict__["fields"] == {"member": "rank 2", "silent_s": 5.25}
    assert record.filename == Path(__file__).name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ako", "ako"),
        ("rank 2", '"rank 2"'),
        ("ako(p=2)", '"ako(p=2)"'),
        ("", '""'),
        ('say "no"', '"say \\"no\\""'),
        ("\x1b[31m", '"\\u001b[31m"'),
        ("two\nlines", '"two\\nlines"'),
        (7, "7"),
        (5.123456789, "5.12346"),
        (None, "none"),
    ],
)
def test_values_cannot_be_mistaken_for_other_fields(value: Field, text: str) -> None:
    assert shown(value) == text


def test_a_null_handler_shows_nothing() -> None:
    parent, child = logging.getLogger("example"), logging.getLogger("example.child")
    parent.propagate = False
    assert not has_handlers(child)
    parent.addHandler(logging.NullHandler())
    assert not has_handlers(child)
    parent.addHandler(logging.StreamHandler())
    assert has_handlers(child)
