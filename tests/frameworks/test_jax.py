"""JAX, flax and optax over slipstream: one process's params, no copies, clear errors."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs JAX; run make frameworks")
optax = pytest.importorskip("optax", reason="needs optax; run make frameworks")
pytest.importorskip("flax", reason="needs flax; run make frameworks")
sys.path.append(str(Path(__file__).parents[1] / "process"))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from launches import Launch, until  # noqa: E402
from ports import free_port  # noqa: E402

import slipstream  # noqa: E402
from slipstream.systems import SYSTEMS  # noqa: E402

pytestmark = pytest.mark.process

WORKER = str(Path(__file__).with_name("jax_worker.py"))
RUN = (sys.executable, "-m", "slipstream", "run")
TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "1"}
LIMIT_S = 280.0
# What is sent, where that is not the gradient itself and its steps are not those of one process.
CARRIED = {
    "allreduce": "",
    "all_to_all": "",
    "poseidon(rate='1gbit')": "",
    "adam_factors": "",
    "one_bit": "one-bit",
    "low_rank(rank=2)": "rank-2",
    "parameter_flow": "filter",
    "push_pull(wire='int8', overlap=False)": "int8",
}
REFUSED = {
    "ako": "changes of weights are sent",
    "gadei": "servers update the weights",
    "diloco": "changes of weights are sent",
    "local_sgd": "changes of weights are sent",
    "backup_workers": "servers update the weights",
    "bounded_staleness": "servers update the weights",
    "async_sgd": "servers update the weights",
    "k_async": "servers update the weights",
    "push_pull(update='server')": "servers update the weights",
    "parameter_flow(staleness=1)": "workers run ahead",
    "parameter_flow(payload='update')": "changes of weights are sent",
    "push_pull(clip_norm=1.0)": "clip them before",
    "push_pull(averaged=0.99)": "average them in your loop",
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    with ExitStack() as stack:

        def start(*command: str, env: dict[str, str] | None = None) -> Launch:
            folder = tmp_path_factory.mktemp("launch")
            launched = Launch(command, folder, {**TWO_DEVICES, **(env or {})})
            stack.callback(launched.close)
            return launched

        yield start


@pytest.fixture(scope="module")
def checked(launch: Callable[..., Launch]) -> list[dict[str, Any]]:
    """What three workers found, by rank."""
    job = launch(*RUN, "--workers=3", "--strategy=push_pull", WORKER, "checks")
    assert job.wait(LIMIT_S) == 0, job.stderr
    assert job.stderr == ""
    assert job.remains.left() == []
    return [json.loads((job.folder / f"found.{rank}.json").read_text()) for rank in range(3)]


@pytest.fixture(scope="module")
def systems(launch: Callable[..., Launch]) -> list[dict[str, Any]]:
    """What two workers made by each system, by rank; a scheduler's variables start them."""
    plan = json.dumps([(system, free_port()) for system in CARRIED])
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    given["SLIPSTREAM_SECRET"] = "a secret of sixteen or more"
    jobs = [
        launch(sys.executable, WORKER, "systems", plan, env={**given, "RANK": str(rank)})
        for rank in range(2)
    ]
    for job in jobs:
        assert job.wait(LIMIT_S) == 0, job.stderr
    files = [job.folder / f"systems.{rank}.json" for rank, job in enumerate(jobs)]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("way", ["start", "mean", "transform", "accumulated", "clipped", "resumed"])
def test_params_are_those_of_one_process(checked: list[dict[str, Any]], way: str) -> None:
    assert checked[0]["distances"][way] < 1e-12
    assert checked[0]["moved"] > 1e-2
    assert all(found["equal"] for found in checked)


def test_memory_is_shared_and_never_written_again(checked: list[dict[str, Any]]) -> None:
    for found in checked:
        assert found["memory"] == {"kept": True, "unchanged": True, "donated": True, "places": 1}


def test_arrays_on_another_device_come_back_there(checked: list[dict[str, Any]]) -> None:
    assert all(found["away"] for found in checked)


def test_a_second_engine_has_other_formats(checked: list[dict[str, Any]]) -> None:
    means = {"half": ["bfloat16", 1.0], "complex": ["complex64", 1.0], "empty": ["float16", 0.0]}
    assert all(found["second"] == means for found in checked)


def test_kernels_are_matrices(checked: list[dict[str, Any]]) -> None:
    assert "params/Conv_0/kernel   18 x 8" in checked[0]["plan"]


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("lacks", "RuntimeFault: engine.mean was given another pytree .* it has no 'params/scale'"),
        ("adds", "RuntimeFault: .*it also has 'params/more'"),
        ("container", "RuntimeFault: .*it has no 'params/Conv_0/bias'"),
        ("shape", r"RuntimeFault: .*'params/scale' is float64 of shape \(2,\), but .* shape \(\)"),
        ("dtype", "RuntimeFault: .*'params/scale' is float32 of shape .* was float64"),
        ("no array", "ConfigError: 'params/scale' is a str, and no array"),
        ("jit", "RuntimeFault: engine.mean.* within jax.jit.* second jitted function"),
        ("jit, transform", "RuntimeFault: .*engine.transform.* within jax.jit"),
        ("save", "ConfigError: job.save does not know the weights"),
        ("load", "ConfigError: job.load does not know the weights"),
        ("consensus", "ConfigError: job.consensus does not know the weights"),
        ("second", "ConfigError: .* before the first step"),
    ],
)
def test_mistakes_are_told_and_the_job_goes_on(
    checked: list[dict[str, Any]], mistake: str, told: str
) -> None:
    for found in checked:
        assert found["steps of mistakes"] == 0
        assert re.match(told, found["mistakes"][mistake]), found["mistakes"][mistake]


@pytest.mark.parametrize("system", CARRIED)
def test_systems_in_which_workers_update(systems: list[dict[str, Any]], system: str) -> None:
    first, second = (found[system] for found in systems)
    assert first["params"] == second["params"]
    exact = CARRIED[system] == ""
    assert first["distance"] < (1e-6 if exact else systems[0]["moved"])
    assert any(CARRIED[system] in scheme for scheme in first["schemes"]), first["schemes"]


def test_one_worker_raises(launch: Callable[..., Launch]) -> None:
    job = launch(*RUN, "--workers=2", WORKER, "raises")
    assert job.wait(LIMIT_S) == 1
    assert job.stderr.count("[rank 1] ValueError: the loss of rank 1 is gone") == 1, job.stderr
    assert job.stderr.count("Traceback") == 1, job.stderr
    told, ended = job.own_lines
    assert told == "slipstream: rank 1 failed: ValueError: the loss of rank 1 is gone"
    assert ended == "slipstream: rank 1 exited with code 1; the other ranks ended with it"
    assert job.remains.left() == []


def test_ctrl_c(launch: Callable[..., Launch]) -> None:
    job = launch(*RUN, "--workers=2", "--strategy=allreduce", WORKER, "forever")
    started = [job.folder / f"trains.{rank}" for rank in range(2)]
    until(lambda: all(map(Path.exists, started)), "training to begin", LIMIT_S)
    job.send(signal.SIGINT)
    assert job.wait(LIMIT_S) == 130
    assert job.own_lines == ["slipstream: stopped by Ctrl-C"], job.stderr
    assert "Traceback" not in job.stderr
    assert job.remains.left() == []


# ---- one process


@pytest.fixture
def params() -> dict[str, Any]:
    return {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}


def test_alone_gradients_are_returned_as_they_are(params: dict[str, Any]) -> None:
    grads = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, params, "allreduce")
        assert engine.params is params
        means = engine.mean(grads)
        assert all(means[name] is grads[name] for name in grads)
        assert job.step == 1


def test_alone_the_memory_of_the_first_params_is_not_kept(params: dict[str, Any]) -> None:
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, params)
        held = engine._exchange._held.tensors
        assert [tensor.untyped_storage().nbytes() for tensor in held] == [4, 4]


def test_alone_refused_gradients_count_as_zero(params: dict[str, Any]) -> None:
    with slipstream.init(nonfinite="refuse") as job:
        engine = slipstream.jax.engine(job, params)
        grads = {"kernel": params["kernel"], "bias": np.array([1.0, np.nan, 0.0], np.float32)}
        with pytest.warns(UserWarning, match="'bias' is not finite"):
            means = engine.mean(grads)
        assert not means["bias"].any()
        assert means["kernel"].all()


@pytest.mark.parametrize("strategy", REFUSED)
def test_other_strategies_are_refused_with_the_reason(
    params: dict[str, Any], strategy: str
) -> None:
    with slipstream.init() as job:
        with pytest.raises(slipstream.ConfigError, match=REFUSED[strategy]) as told:
            slipstream.jax.engine(job, params, strategy)
        assert "use push_pull()" in str(told.value) or "leave" in str(told.value)


def test_every_system_is_tried_or_refused() -> None:
    tried = {name.partition("(")[0] for name in (*CARRIED, *REFUSED)}
    assert tried == set(SYSTEMS)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, "without an array"),
        ({"w": jnp.ones(2), "step": jnp.zeros((), jnp.int32)}, "'step' is int32, but slipstream"),
        ({"w": jnp.ones(2), "f": print}, "'f' is a builtin_function_or_method, and no array"),
        ({"w": jnp.ones(2, jnp.float8_e5m2)}, "'w' is float8_e5m2"),
    ],
)
def test_params_that_have_no_gradient(wrong: Any, told: str) -> None:
    with slipstream.init() as job, pytest.raises(slipstream.ConfigError, match=told):
        slipstream.jax.engine(job, wrong)


def test_names_that_are_alike() -> None:
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, {"a": {"b": 1.0}, "a/b": 2.0})
        assert engine.mean({"a": {"b": 3.0}, "a/b": 4.0}) == {"a": {"b": 3.0}, "a/b": 4.0}
        assert [spec.name for spec in job.plan.specs] == ["['a']['b']", "['a/b']"]


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_taken_over_as_by_from_dlpack(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """By a function that is JAX's own; other versions of JAX may not have it."""
    if not known:
        monkeypatch.setattr(slipstream.jax, "import_module", lambda name: object())
    take_over = slipstream.jax.adopter(jax.devices("cpu")[0])
    assert (take_over is not slipstream.jax.adopt) is known
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.arange(6, dtype=dtype).view(2, 3)
        found, wanted = take_over(tensor), slipstream.jax.adopt(tensor)
        assert found.unsafe_buffer_pointer() == wanted.unsafe_buffer_pointer() == tensor.data_ptr()
        assert (found.aval, found.sharding) == (wanted.aval, wanted.sharding)
        assert found.committed == wanted.committed
        tensor += 1
        assert (jax.jit(lambda array: 2 * array)(found) == 2 * np.array(tensor.tolist())).all()


def test_a_single_array() -> None:
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, jnp.ones(2))
        assert engine.mean(jnp.ones(2)).tolist() == [1.0, 1.0]
        assert [spec.name for spec in job.plan.specs] == ["params"]
