"""The examples of models as they are run: two workers on generated data, alone on given files."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (SLIPSTREAM, "run", "--workers=2", "--strategy=parameter_flow(delta='90%')")
EPOCH = re.compile(r"^epoch (\d+): loss ([\d.]+), (?:accuracy|rmse) ([\d.]+)%?$", re.MULTILINE)
END = re.compile(r"^(.*), (\d+) steps, ([\d.]+) MB sent$", re.MULTILINE)


class Epoch(NamedTuple):
    number: int
    loss: float
    metric: float


def epochs(stdout: str) -> list[Epoch]:
    found = EPOCH.findall(stdout)
    return [Epoch(int(number), float(loss), float(metric)) for number, loss, metric in found]


def ending(stdout: str) -> tuple[str, int, float]:
    """The last line: what was trained, for how many steps, and megabytes sent."""
    ((what, steps, sent_mb),) = END.findall(stdout)
    return what, int(steps), float(sent_mb)


@pytest.fixture(scope="module")
def trained(launch: Callable[..., Launch]) -> dict[str, Launch]:
    """All started at a time: most of each is spent importing torch."""
    asked = {
        "logistic_regression": ("--epochs=4",),
        "matrix_factorisation": ("--epochs=3", "--rank=8"),
        "alexnet": ("--epochs=4", "--scale=0.004"),
    }
    runs = {
        name: launch(*RUN, str(EXAMPLES / f"{name}.py"), *options)
        for name, options in asked.items()
    }
    for name, run in runs.items():
        assert run.wait() == 0, f"{name}: {run.stdout}{run.stderr}"
    return runs


@pytest.mark.parametrize(("name", "least"), [("logistic_regression", 70.0), ("alexnet", 40.0)])
def test_accuracy_rises_from_epoch_to_epoch(
    trained: dict[str, Launch], name: str, least: float
) -> None:
    told = epochs(trained[name].stdout)
    assert [epoch.number for epoch in told] == [1, 2, 3, 4]
    assert told[-1].loss < told[0].loss
    assert told[-1].metric > told[0].metric
    assert told[-1].metric > least


def test_error_falls_from_epoch_to_epoch(trained: dict[str, Launch]) -> None:
    told = epochs(trained["matrix_factorisation"].stdout)
    assert [epoch.number for epoch in told] == [1, 2, 3]
    assert told[-1].loss < told[0].loss
    assert told[-1].metric < 0.8 * told[0].metric


# Without a filter each step would take 4 bytes a parameter from the worker that has no server
# beside it. A tenth travels, and a bit for every one that does not.
@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("logistic_regression", "100000 features", 100_001),
        ("matrix_factorisation", "1000 users, 1500 items", 2500 * (8 + 1)),
    ],
)
def test_bytes_sent_are_those_of_a_filter(
    trained: dict[str, Launch], name: str, size: str, parameters: int
) -> None:
    what, steps, sent_mb = ending(trained[name].stdout)
    assert what == size
    assert 0 < sent_mb < 0.2 * 4e-6 * parameters * steps


def test_a_share_of_alexnets_parameters_sends_a_tenth_of_them(trained: dict[str, Launch]) -> None:
    what, steps, sent_mb = ending(trained["alexnet"].stdout)
    parameters = int(what.removesuffix(" parameters"))
    assert parameters == pytest.approx(0.004 * 61.1e6, rel=0.05)
    assert 0 < sent_mb < 0.2 * 4e-6 * parameters * steps


def test_nothing_is_said_but_figures_and_nothing_is_left(trained: dict[str, Launch]) -> None:
    for name, run in trained.items():
        assert len(run.stdout.splitlines()) == len(epochs(run.stdout)) + 1, name
        assert run.stderr == "", name
        assert run.remains.left() == [], name


def write_rows(folder: Path) -> None:
    """A row has the first feature or the second, which decides, and one that does not matter."""
    rows = [f"{1 if i % 2 else -1} {1 + i % 2}:1 {3 + i % 5}:1" for i in range(60)]
    (folder / "rows").write_text("\n".join(rows))


def write_ratings(folder: Path) -> None:
    """Each user has one opinion of everything."""
    rows = [f"u{i % 7},m{i % 9},{1 + i % 7 % 5},0" for i in range(300)]
    (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]))


def write_images(folder: Path) -> None:
    """Stripes, across or down."""
    across, down = bytes(28 * [200] + 28 * [55]) * 14, bytes([200, 55] * 14) * 28
    for part, count in (("train", 64), ("t10k", 16)):
        labels = bytes(i % 2 for i in range(count))
        pixels = b"".join(down if label else across for label in labels)
        sizes = struct.pack(">III", count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + pixels)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + struct.pack(">I", count) + labels
        )


@pytest.mark.parametrize(
    ("name", "write", "options", "what"),
    [
        ("logistic_regression", write_rows, ("--batch=8",), "7 features"),
        ("matrix_factorisation", write_ratings, ("--batch=32", "--lr=0.5"), "7 users, 9 items"),
        ("alexnet", write_images, ("--batch=8", "--scale=0.004"), r"\d+ parameters"),
    ],
)
def test_given_files_are_learnt_from_alone(
    fork_server: ForkServer,
    tmp_path: Path,
    name: str,
    write: Callable[[Path], None],
    options: tuple[str, ...],
    what: str,
) -> None:
    write(tmp_path)
    unset = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    asked = (f"--data={tmp_path}", "--epochs=3", *options)
    run = fork_server.run(EXAMPLES / f"{name}.py", *asked, ranks=[unset])
    assert run.codes == {0: 0}, run.told()
    told = epochs(run.stdout(0))
    assert told[-1].loss < told[0].loss
    said, steps, sent_mb = ending(run.stdout(0))
    assert re.fullmatch(what, said)
    assert steps > 0
    assert sent_mb == 0


def test_a_folder_without_data_is_refused_in_one_line(launch: Callable[..., Launch]) -> None:
    script = str(EXAMPLES / "logistic_regression.py")
    run = launch(*RUN, script, "--data=nowhere")
    assert run.wait() != 0
    assert "nowhere: no such folder" in run.stderr
    assert "Traceback" not in run.stderr
