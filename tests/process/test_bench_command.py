"""``slipstream bench`` as it is run: small nets, two workers, loopback."""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Callable
from typing import Any

import pytest
from launches import SLIPSTREAM, Launch, until

pytestmark = pytest.mark.process

SMALL = ("--workers=2", "--repetitions=1", "--warmup=3", "--batch=4", "--json=figures.json")
# As from a terminal, even where the tests themselves were started to ignore Ctrl-C.
WITH_CTRL_C = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from slipstream.apps.cli import main; main()"
)


def figures(bench: Launch) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((bench.folder / "figures.json").read_text())
    return read


@pytest.fixture(scope="module")
def learned(launch: Callable[..., Launch]) -> Launch:
    """To a target, on emulated devices, with a straggler and a server; all there is in one."""
    bench = launch(
        *(SLIPSTREAM, "bench", "mnist", *SMALL, "--compare=push_pull,ddp,local", "--steps=5"),
        *("--servers=1", "--target=0.01", "--device-ms=30", "--straggle=worker:1:x3"),
        *("--plot=picture.png", "--seed=3"),
    )
    assert bench.wait() == 0, bench.stdout + bench.stderr
    return bench


def test_the_table_names_systems_and_circumstances(learned: Launch) -> None:
    text = learned.stdout
    for said in (
        "2 workers, batch 4 each, unshaped loopback, 1 dedicated servers",
        "EMULATED DEVICE",
        "stragglers: worker:1:x3",
        "s to 0.01",
    ):
        assert said in text
    assert learned.stderr == ""
    assert learned.remains.left() == []


def test_json_says_what_ran_where(learned: Launch) -> None:
    report = figures(learned)
    assert report["command"].startswith("slipstream bench mnist --workers=2")
    assert set(report["machine"]) == {
        *("cpu", "cores", "kernel", "python", "torch", "load_at_start")
    }
    assert report["emulated_device"] == "30"
    trial = report["comparison"]["trial"]
    asked = {key: trial[key] for key in ("workload", "steps", "batch", "seed", "straggle")}
    assert asked == {
        "workload": "mnist",
        "steps": 5,
        "batch": 4,
        "seed": 3,
        "straggle": "worker:1:x3",
    }
    assert [result["system"] for result in report["results"]] == ["push_pull", "ddp", "local"]


def test_json_has_every_workers_times(learned: Launch) -> None:
    report = figures(learned)
    for result in report["results"]:
        (run,) = result["runs"]
        assert result["failures"] == []
        assert result["median_s"] == run["step_s"]
        assert run["step_s"] * 5 == pytest.approx(max(t["elapsed_s"] for t in run["timings"]))
        assert [len(timing["steps_s"]) for timing in run["timings"]] == [5, 5]
        # 30 ms each, and rank 1 is 60 ms late; who exchanges waits for it.
        assert min(timing["compute_s"] for timing in run["timings"]) >= 0.03
        assert min(run["timings"][1]["steps_s"]) >= 0.09
        assert run["step_s"] >= 0.09
    first, _, local = report["results"]
    assert first["ratio_to_first"] == 1.0
    assert first["ratio_to_bound"] == first["median_s"] / report["bounds"]["compute_s"]
    assert report["bounds"]["compute_s"] >= 0.09
    waits = statistics.median(first["runs"][0]["timings"][0]["steps_s"])
    # Alone it waits for nobody, though a busy machine may hold up most of its steps.
    assert waits > min(local["runs"][0]["timings"][0]["steps_s"])


def test_snapshots_tell_when_the_target_was_reached(learned: Launch) -> None:
    results = figures(learned)["results"]
    for result in results:
        (run,) = result["runs"]
        judged = run["judgements"][0]
        snapshots = judged["snapshots"]
        assert [snapshot["step"] for snapshot in snapshots] == [1, 2, 3, 4, 5]
        assert snapshots[-1]["metric"] == judged["metric"]
        seconds = [snapshot["seconds"] for snapshot in snapshots]
        assert seconds == sorted(seconds)
        there = [snapshot["seconds"] for snapshot in snapshots if snapshot["metric"] >= 0.01]
        assert result["seconds_to_target"] == there[0]
        assert run["judgements"][1]["snapshots"] == []
    push_pull, ddp, local = ([j["metric"] for j in r["runs"][0]["judgements"]] for r in results)
    # An exact exchange is an exact exchange; and alone, workers go apart.
    assert push_pull[0] == push_pull[1] == pytest.approx(ddp[0], abs=0.02)
    assert results[0]["runs"][0]["judgements"][0]["stats"]["servers"] == 1
    assert len(local) == 2


def test_the_picture_is_one(learned: Launch) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs slipstream[bench]")
    height, width, _ = image.imread(learned.folder / "picture.png").shape
    assert width > 1000
    assert height > 500


@pytest.mark.parametrize(
    ("workload", "sizes", "target", "approximate"),
    [
        ("gpt", "layers=1,width=16,heads=2,context=8", 3.29, ["ddp+powersgd(rank=2)"]),
        ("recommender", "width=4,hidden=8", 1.5, []),
    ],
)
def test_time_and_samples_to_a_held_out_loss(
    launch: Callable[..., Launch],
    workload: str,
    sizes: str,
    target: float,
    approximate: list[str],
) -> None:
    systems = ",".join(["ddp", "push_pull", *approximate])
    bench = launch(
        *(SLIPSTREAM, "bench", workload, *SMALL, "--steps=12", "--evaluate-every=4", "--lr=0.01"),
        *(f"--compare={systems}", f"--sizes={sizes}", f"--target={target}"),
    )
    assert bench.wait() == 0, bench.stdout + bench.stderr
    report = figures(bench)
    assert report["metric"] == {"name": "loss", "higher_is_better": False}
    ddp, push_pull, *others = report["results"]
    for result in report["results"]:
        curve = result["runs"][0]["judgements"][0]["snapshots"]
        assert [snapshot["step"] for snapshot in curve] == [4, 8, 12]
        losses = [snapshot["metric"] for snapshot in curve]
        assert losses[-1] < losses[0]
        there = [s for s in curve if s["metric"] <= target]
        assert result["seconds_to_target"] == there[0]["seconds"]
        assert result["steps_to_target"] == there[0]["step"]
        assert result["samples_to_target"] == (3 + there[0]["step"]) * 2 * 4
    # The same data, optimizer and held-out rows: an exact exchange has DDP's curve.
    assert push_pull["metric"] == pytest.approx(ddp["metric"], rel=1e-4)
    assert all(other["metric"] != ddp["metric"] for other in others)


def test_a_system_that_fails_is_reported_and_the_others_go_on(
    launch: Callable[..., Launch],
) -> None:
    bench = launch(
        *(SLIPSTREAM, "bench", "text", *SMALL, "--compare=push_pull,ddp", "--steps=2"),
        env={"SLIPSTREAM_NONFINITE": "no-such-policy"},  # which only slipstream looks at
    )
    assert bench.wait() == 1
    assert "push_pull (1 of 1 failed)" in bench.stdout
    failed, ddp = figures(bench)["results"]
    assert (failed["runs"], failed["median_s"]) == ([], None)
    (failure,) = failed["failures"]
    assert "no-such-policy" in failure
    assert ddp["failures"] == []
    assert ddp["median_s"] > 0
    assert ddp["ratio_to_first"] is None
    assert bench.remains.left() == []


def test_ctrl_c_and_a_kill_leave_nothing(
    launch: Callable[..., Launch], tmp_path_factory: pytest.TempPathFactory
) -> None:
    endless = ("bench", "text", *SMALL, "--compare=push_pull", "--steps=1000000")
    temporary = [tmp_path_factory.mktemp("temporary") for _ in range(2)]
    benches = [
        launch(
            *(sys.executable, "-c", WITH_CTRL_C, *endless),
            env={"PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)},
        )
        for folder in temporary
    ]
    for bench in benches:
        until(lambda bench=bench: "local " in bench.stdout, "the first trial to end")
        until(lambda bench=bench: len(bench.remains.processes()) >= 4, "workers of the second")
    asked, killed = benches
    asked.send(signal.SIGINT)
    killed.send(signal.SIGKILL)
    assert asked.wait() == 130
    killed.wait()
    assert "Traceback" not in asked.stderr
    assert list(temporary[0].glob("slipstream-*")) == []
    for bench in benches:
        assert bench.remains.left() == []
