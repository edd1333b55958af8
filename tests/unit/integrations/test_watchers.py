"""The real MLflow, Weights & Biases and OpenTelemetry, without a network."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream

# Theirs, not ours.
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 3
LIMIT_S = 120.0
LOSSES = [0.5, 0.25, 0.125]


def nothing(step: int) -> None:
    """Of a loop that logs nothing itself."""


def train(
    watcher: slipstream.Watcher,
    *,
    after_record: Callable[[int], object] = nothing,
    fails: bool = False,
) -> None:
    model = torch.nn.Linear(2, 1)
    with slipstream.init() as job:
        job.watch(watcher)
        _, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        for step, loss in enumerate(LOSSES):
            optimizer.step()
            job.record(loss=loss, samples=4)
            after_record(step)
        if fails:
            raise KeyError("the data")


# ---- MLflow


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="pip install 'slipstream[mlflow]'")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("test")
    yield mlflow
    mlflow.end_run()


def only_run(mlflow: Any) -> Any:
    (run,) = mlflow.search_runs(output_format="list")
    return run


def mlflow_losses(mlflow: Any, run: Any) -> list[tuple[int, float]]:
    kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "slipstream/loss")
    return [(each.step, each.value) for each in kept]


def test_mlflow_gets_a_run_of_its_own(mlflow: Any) -> None:
    from slipstream.integrations.mlflow import MLflow

    train(MLflow())
    run = only_run(mlflow)
    assert mlflow_losses(mlflow, run) == list(enumerate(LOSSES, start=1))
    assert run.data.params == {"slipstream/strategy": "push_pull", "slipstream/workers": "1"}
    assert run.data.metrics["slipstream/samples"] == 12
    assert run.info.status == "FINISHED"
    assert mlflow.active_run() is None


def test_mlflow_uses_the_loops_run_and_leaves_it_open(mlflow: Any) -> None:
    from slipstream.integrations.mlflow import MLflow

    with mlflow.start_run() as own:
        train(MLflow())
        assert mlflow.active_run().info.run_id == own.info.run_id
    run = only_run(mlflow)
    assert run.info.run_id == own.info.run_id
    assert mlflow_losses(mlflow, run) == list(enumerate(LOSSES, start=1))


def test_the_loop_may_begin_a_run_while_mlflow_has_its_own(mlflow: Any) -> None:
    from slipstream.integrations.mlflow import MLflow

    loops = []

    def begin(step: int) -> None:
        if step == 1:
            loops.append(mlflow.start_run())
        mlflow.log_metric("mine", step) if loops else None

    train(MLflow(), after_record=begin)
    assert mlflow.active_run().info.run_id == loops[0].info.run_id, "the loop ends it"
    runs = {run.info.run_id: run for run in mlflow.search_runs(output_format="list")}
    theirs = runs.pop(loops[0].info.run_id)
    assert theirs.info.status == "RUNNING"
    assert theirs.data.metrics == {"mine": 2.0}
    (own,) = runs.values()
    assert own.info.status == "FINISHED"
    assert mlflow_losses(mlflow, own) == list(enumerate(LOSSES, start=1))


def test_mlflow_says_that_a_job_failed(mlflow: Any) -> None:
    from slipstream.integrations.mlflow import MLflow

    with pytest.raises(KeyError):
        train(MLflow(), fails=True)
    assert only_run(mlflow).info.status == "FAILED"
    assert mlflow.active_run() is None


# ---- Weights & Biases


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, text in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", text)
    wandb = pytest.importorskip("wandb", reason="pip install 'slipstream[wandb]'")
    yield wandb
    wandb.teardown()


def wandb_records(file: Path) -> Iterator[bytes]:
    """What an offline run has kept: records in blocks, as LevelDB's logs have them."""
    content, block, place, whole = file.read_bytes(), 1 << 15, 7, b""
    header = struct.Struct("<IHB")
    while place + header.size <= len(content):
        if block - place % block < header.size:
            place += block - place % block
            continue
        _, length, kind = header.unpack_from(content, place)
        whole += content[place + header.size : place + header.size + length]
        place += header.size + length
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


def wandb_rows(wandb: Any, folder: Path, count: int) -> list[dict[str, Any]]:
    """The history, row by row; a process of its own writes it, and may do so a little later."""
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()
    (file,) = folder.rglob("*.wandb")
    deadline = time.monotonic() + LIMIT_S
    while True:
        histories = [Record.FromString(content).history for content in wandb_records(file)]
        rows = [
            {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in h.item}
            for h in histories
            if h.item
        ]
        if len(rows) >= count or time.monotonic() > deadline:
            return rows
        time.sleep(0.05)


def test_wandb_gets_a_run_of_its_own(wandb: Any, tmp_path: Path) -> None:
    from slipstream.integrations.wandb import WandB

    train(WandB())
    assert wandb.run is None
    rows = wandb_rows(wandb, tmp_path, STEPS)
    assert [row["slipstream/loss"] for row in rows] == LOSSES
    assert [row["slipstream/step"] for row in rows] == [1, 2, 3]


def test_wandb_uses_the_loops_run_and_leaves_it_open(wandb: Any, tmp_path: Path) -> None:
    from slipstream.integrations.wandb import WandB

    with wandb.init() as own:
        own.log({"epoch": 1}, step=100)
        train(WandB(), after_record=lambda _: own.log({"epoch": 2}))
        assert wandb.run is own
        assert own.config["slipstream"] == {"strategy": "push_pull", "workers": 1}
    rows = wandb_rows(wandb, tmp_path, STEPS)
    assert [row["slipstream/loss"] for row in rows if "slipstream/loss" in row] == LOSSES


def test_what_the_loop_logs_for_its_own_steps_is_kept(wandb: Any, tmp_path: Path) -> None:
    from slipstream.integrations.wandb import WandB

    def log(step: int) -> None:
        if step > 0:
            wandb.log({"mine": step}, step=step // 2)  # W&B drops what is of an earlier step

    with wandb.init():
        train(WandB(), after_record=log)
    rows = wandb_rows(wandb, tmp_path, 2)
    assert [row["mine"] for row in rows] == [1, 2]
    assert rows[0]["slipstream/step"] == 3, "the last one of the loop's first step"


# ---- OpenTelemetry


def test_opentelemetry_gets_gauges_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install opentelemetry-sdk")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from slipstream.integrations.opentelemetry import OpenTelemetry

    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    with (
        pytest.raises(KeyError),
        tracing.get_tracer("the loop").start_as_current_span("training"),
    ):
        train(OpenTelemetry(), fails=True)
    found = json.loads(reader.get_metrics_data().to_json())
    gauges = found["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    points = {gauge["name"]: gauge["data"]["data_points"][0] for gauge in gauges}
    assert points["slipstream.loss"]["value"] == LOSSES[-1]
    assert points["slipstream.step"]["value"] == STEPS
    assert points["slipstream.loss"]["attributes"] == {"strategy": "push_pull", "workers": 1}
    (span,) = exporter.get_finished_spans()
    events = {event.name: dict(event.attributes or {}) for event in span.events}
    assert events["slipstream.start"] == {"strategy": "push_pull", "workers": 1}
    assert "the data" in str(events["slipstream.failed"]["error"])
