"""slipstream under Ray Train, on a real Ray cluster: two nodes of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.errors import ConfigError

ray = pytest.importorskip("ray", reason="needs Ray; run make frameworks")

import ray_loops  # noqa: E402
import torch  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: E402
from ray_nodes import IGNORED, LIMIT_S, Nodes, close, same, until  # noqa: E402

from slipstream.integrations.ray import SlipstreamConfig  # noqa: E402

pytestmark = [pytest.mark.process, *IGNORED]


@contextmanager
def own_sigint() -> Iterator[None]:
    """Ray Train leaves its own handler."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def spread(folder: Path, max_failures: int = 0) -> dict[str, Any]:
    """Two workers, on two nodes if there are two."""
    return {
        "scaling_config": ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        "run_config": RunConfig(
            storage_path=str(folder / "ray"),
            name="run",
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    }


def require_resumed(folder: Path) -> list[dict[str, Any]]:
    found = [torch.load(folder / str(rank)) for rank in range(2)]
    assert [each["first"] for each in found] == [ray_loops.SAVED + 1] * 2
    assert same(found[0]["weights"], found[1]["weights"])
    assert close(found[0]["weights"], ray_loops.reference(2))
    return found


def test_a_killed_worker_resumes_with_the_weights_of_one_process(
    nodes: Nodes, tmp_path: Path
) -> None:
    trainer = TorchTrainer(
        ray_loops.resuming,
        train_loop_config={"folder": str(tmp_path)},
        torch_config=SlipstreamConfig("poseidon"),
        **spread(tmp_path, max_failures=1),
    )
    with own_sigint():
        result = trainer.fit()
    assert result.metrics["step"] == ray_loops.SAVED + 1
    assert [each["local_rank"] for each in require_resumed(tmp_path)] == [0, 0]


def test_a_killed_node_resumes_with_the_weights_of_one_process(
    nodes: Nodes, tmp_path: Path
) -> None:
    (second,) = nodes.others
    trainer = DataParallelTrainer(
        ray_loops.resuming,
        train_loop_config={"folder": str(tmp_path), "node": second.node_id},
        backend_config=SlipstreamConfig("push_pull"),
        **spread(tmp_path, max_failures=1),
    )
    killed = tmp_path / "killed"
    with own_sigint(), nodes.losing(lambda: second if killed.exists() else None):
        trainer.fit()
    assert killed.exists()
    assert second.node_id not in [each["node"] for each in require_resumed(tmp_path)]


def test_an_error_of_a_worker_is_the_only_one(nodes: Nodes, tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        ray_loops.raising_under_ray_train, backend_config=SlipstreamConfig(), **spread(tmp_path)
    )
    with own_sigint(), pytest.raises(WorkerGroupError) as caught:
        trainer.fit()
    (rank,) = caught.value.worker_failures
    assert rank == 1
    first, *_, last = str(caught.value).strip().partition("\n")[2].splitlines()
    assert first == "[Rank 1 Error Snippet]:"
    assert last.endswith("OfUser: sample 17 of digits is damaged")
    assert 'raise OfUser(17, source="digits")' in str(caught.value)


def test_a_job_without_a_block_ends_with_its_loop(nodes: Nodes, tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        ray_loops.without_block,
        train_loop_config={0: 3, 1: 5},
        backend_config=SlipstreamConfig(),
        **spread(tmp_path),
    )
    message = "rank 1 still trains, but rank 0 has finished"
    with own_sigint(), pytest.raises(WorkerGroupError, match=message):
        trainer.fit()


def test_ctrl_c_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    trained, stored = tmp_path / "trained", tmp_path / "stored"
    trained.mkdir()
    script = (
        "import ray, ray_loops\n"
        "from pathlib import Path\n"
        "from test_ray_train import DataParallelTrainer, SlipstreamConfig, spread\n"
        f"ray.init(address={nodes.address!r}, log_to_driver=False)\n"
        f"loop = ray_loops.Training(Path({str(trained)!r}))\n"
        f"options = spread(Path({str(stored)!r}))\n"
        "DataParallelTrainer(loop, backend_config=SlipstreamConfig(), **options).fit()\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        until(lambda: len(list(trained.iterdir())) == 2)
        assert nodes.servers()
        driver.send_signal(signal.SIGINT)
        driver.wait(LIMIT_S)
    finally:
        driver.kill()
        driver.wait()
    pids = [int(file.name.split(".")[1]) for file in trained.iterdir()]
    until(lambda: not any(map(psutil.pid_exists, pids)))


def test_bad_strategies_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="needs `slipstream run`"):
        SlipstreamConfig("gadei")
    with pytest.raises(ConfigError, match="no strategy"):
        SlipstreamConfig("nonsense")
