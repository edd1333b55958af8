import json

import pytest

from slipstream.runtime.figures.summary import Traffic, WorkerFigures, combine


def figures(**changes: object) -> WorkerFigures:
    plain = {
        "strategy": "push_pull",
        "workers": 2,
        "servers": 1,
        "steps": 10,
        "wall_s": 4.0,
        "samples": 100,
        "loss": 0.5,
        "accuracy": 0.9,
        "weights_sha256": "aa",
        "traffic": Traffic(sent=10, received=20, local=3, control=1, by_scheme={"dense/mesh": 30}),
        "wait_s": 1.0,
        "faults": {"refused_frames": 1},
    }
    return WorkerFigures(**{**plain, **changes})  # type: ignore[arg-type]


def test_bytes_and_samples_add_up_and_waits_are_averaged() -> None:
    other = figures(
        wall_s=5.0,
        samples=60,
        loss=9.0,
        weights_sha256="bb",
        traffic=Traffic(sent=1, received=2, local=4, control=5, by_scheme={"dense/sharded": 3}),
        wait_s=2.0,
        faults={"refused_frames": 2},
    )
    summary = combine([figures(), other])
    assert summary["samples"] == 160
    assert summary["wall_s"] == 5.0
    assert summary["samples_per_s"] == 32.0
    assert summary["wait_s"] == 1.5
    assert summary["faults"] == {"refused_frames": 3}
    assert summary["bytes"] == {
        "sent": 11,
        "received": 22,
        "local": 7,
        "control": 6,
        "by_scheme": {"dense/mesh": 30, "dense/sharded": 3},
    }
    assert summary["weights_sha256"] == ["aa", "bb"]
    assert (summary["loss"], summary["accuracy"], summary["steps"]) == (0.5, 0.9, 10)
    assert [worker["samples"] for worker in summary["per_worker"]] == [100, 60]
    assert summary["per_worker"][1]["bytes"]["received"] == 2


def test_everything_asked_for_is_there_and_is_json() -> None:
    summary = combine([figures()])
    asked = "strategy workers servers steps wall_s samples_per_s loss accuracy weights_sha256"
    assert set(asked.split()) | {"bytes", "wait_s", "faults"} <= set(summary)
    assert {"sent", "received", "by_scheme"} <= set(summary["bytes"])
    assert json.loads(json.dumps(summary)) == summary
    assert summary["per_worker"] == []


def test_a_run_of_no_time_has_no_rate() -> None:
    assert combine([figures(wall_s=0.0)])["samples_per_s"] == 0.0


@pytest.mark.parametrize("missing", ["loss", "accuracy", "weights_sha256"])
def test_figures_survive_the_way_to_rank_0(missing: str) -> None:
    sent = figures(**{missing: None})
    assert WorkerFigures.decode(sent.encode()) == sent
