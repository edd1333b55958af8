"""Accelerate and a Trainer of transformers train by a job: DDP's weights, resumes, refusals."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slipstream
from slipstream.errors import ConfigError, UnknownStrategy

pytest.importorskip("accelerate", reason="needs accelerate; run make frameworks")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what transformers itself imports
    pytest.importorskip("transformers", reason="needs transformers; run make frameworks")

sys.path.append(str(Path(__file__).parents[1] / "process"))

from accelerate import Accelerator, DistributedType
from launches import Launch, until
from ports import free_port

from slipstream.integrations import accelerate as integration
from slipstream.integrations.accelerate import use

pytestmark = [
    pytest.mark.process,
    # Of the frameworks themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

WORKER = str(Path(__file__).with_name("accelerate_worker.py"))
RUN = (sys.executable, "-m", "slipstream", "run", "--workers=2", WORKER)
CASES = (
    "equal",
    "bytes_sent",
    "mixed_precision",
    "inspected",
    "resumed_state",
    "resumed_trainer",
    "trained_twice",
    "two_pairs",
    "refused",
    "other_systems",
)
LIMIT_S = 280.0
ROUNDING = 1e-11  # of float64, over all steps


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    with ExitStack() as stack:

        def start(*command: str, env: dict[str, str] | None = None) -> Launch:
            started = Launch(command, tmp_path_factory.mktemp("launch"), env)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture(scope="module")
def launches(launch: Callable[..., Launch]) -> dict[str, Launch]:
    """All at once: most of each is spent importing."""
    port = f"--master-port={free_port()}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", port, WORKER)
    secret = {"SLIPSTREAM_SECRET": "only for this test"}
    return {
        "run": launch(*RUN, *CASES),
        "torchrun": launch(*torchrun, "few_equal", "learners", env=secret),
        "fails": launch(*RUN, "fails"),
        "endless": launch(*RUN, "endless"),
        "learners": launch(*RUN, "learners"),
    }


def results(job: Launch) -> list[dict[str, Any]]:
    """Of both ranks."""
    assert job.wait(LIMIT_S) == 0, job.stderr
    return [json.loads((job.folder / f"results.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def both(launches: dict[str, Launch]) -> list[dict[str, Any]]:
    return results(launches["run"])


def test_ctrl_c_ends_a_trainer_on_all_ranks(launches: dict[str, Launch]) -> None:
    job = launches["endless"]
    marks = [job.folder / f"trains.{rank}" for rank in range(2)]
    until(lambda: all(map(Path.exists, marks)) or job.ended, "training to begin")
    job.send(signal.SIGINT)
    assert job.wait() == 130, job.stderr
    assert job.own_lines == ["slipstream: stopped by Ctrl-C"]
    assert "Traceback" not in job.stderr
    assert job.remains.left() == []


def test_a_worker_that_raises_is_the_only_one_with_a_traceback(launches: dict[str, Launch]) -> None:
    """The other waits in a collective of torch's, which fails without saying why."""
    job = launches["fails"]
    assert job.wait() == 1
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.stderr
    assert "ZeroDivisionError: rank 1 has enough" in job.stderr
    assert job.own_lines == [
        "slipstream: rank 1 failed: ZeroDivisionError: rank 1 has enough",
        "slipstream: rank 1 exited with code 1; the other ranks ended with it",
    ]
    assert job.remains.left() == []


def test_weights_are_those_of_ddp(both: list[dict[str, Any]]) -> None:
    for result in both:
        assert len(result["equal"]) == 16
        assert {case: off for case, off in result["equal"].items() if off > ROUNDING} == {}


def test_micro_batches_of_a_step_are_exchanged_once(both: list[dict[str, Any]]) -> None:
    for single, double in both[0]["bytes_sent"].values():
        assert 0 < 2 * double == single


def test_mixed_precision_is_accelerates(both: list[dict[str, Any]]) -> None:
    assert [result["mixed_precision"] for result in both] == [0.0, 0.0]


def test_layers_of_gpt2_are_sent_as_factors(both: list[dict[str, Any]]) -> None:
    table = both[0]["inspected"][0]
    sent = {line.split()[0]: line for line in table.splitlines() if line}
    for block in range(2):
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            assert "factors/mesh" in sent[f"transformer.h.{block}.{layer}"]
    assert "144 x 48" in sent["transformer.h.0.attn.c_attn"]  # outputs x inputs
    assert "tied" in sent["transformer.wte.weight"]


def test_only_the_prepared_model_has_no_sync(both: list[dict[str, Any]]) -> None:
    assert both[0]["inspected"][1] == [True, False, False]


@pytest.mark.parametrize("case", ["resumed_state", "resumed_trainer"])
def test_a_resumed_training_ends_with_the_same_weights(
    both: list[dict[str, Any]], case: str
) -> None:
    for result in both:
        assert len(result[case]) == 2
        assert max(result[case].values()) <= ROUNDING


def test_a_trainer_trains_twice(both: list[dict[str, Any]]) -> None:
    for steps, different, moved in (result["trained_twice"] for result in both):
        assert (steps, different) == (12, 1)
        assert moved > 0


def test_two_models_with_an_optimizer_each(both: list[dict[str, Any]]) -> None:
    assert max(result["two_pairs"] for result in both) <= ROUNDING


def test_other_systems_train(both: list[dict[str, Any]]) -> None:
    assert all(all(result["other_systems"].values()) for result in both)


def test_ranks_that_accelerate_does_not_know_are_refused(both: list[dict[str, Any]]) -> None:
    (told,) = both[1]["refused"]
    assert "process 0 of 1, the job is rank 1 of 2" in told
    assert "Accelerator(cpu=True)" in told


def test_under_torchrun(launches: dict[str, Launch]) -> None:
    for result in results(launches["torchrun"]):
        assert max(result["few_equal"].values()) <= ROUNDING
        assert "slipstream run" in result["learners"]  # gadei: the way out


def test_learners_train_by_a_trainer(launches: dict[str, Launch]) -> None:
    assert [result["learners"] for result in results(launches["learners"])] == ["trained"] * 2


def test_nothing_is_left(launches: dict[str, Launch]) -> None:
    for name in ("run", "torchrun", "learners"):
        launches[name].wait()
        assert launches[name].remains.left() == []


# ---- refused before anything starts


@pytest.fixture
def job() -> Iterator[slipstream.Job]:
    with slipstream.init() as job:
        yield job


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_use_comes_once_and_before_prepare(job: slipstream.Job, accelerator: Accelerator) -> None:
    other = Accelerator(cpu=True)
    other.prepare(*pair())
    with pytest.raises(ConfigError, match=r"prepare was called before use.*call use first"):
        use(other, job)
    use(accelerator, job)
    with pytest.raises(ConfigError, match="use was called twice"):
        use(accelerator, job)


def test_what_use_takes(job: slipstream.Job, accelerator: Accelerator) -> None:
    with pytest.raises(ConfigError, match=r"an accelerate.Accelerator or a .*given a Linear"):
        use(nn.Linear(3, 3), job)
    with pytest.raises(UnknownStrategy, match="posidon"):
        use(accelerator, job, "posidon()")
    with pytest.raises(ConfigError, match=r"a strategy, such as slipstream.push_pull\(\)"):
        use(accelerator, job, slipstream.push_pull)  # not called
    with pytest.raises(ConfigError, match=r"the job of slipstream.init\(\); it was given None"):
        use(accelerator, None)
    use(accelerator, job)  # a refusal has changed nothing


def test_a_model_goes_with_its_optimizer(job: slipstream.Job, accelerator: Accelerator) -> None:
    use(accelerator, job)
    (one, first), (two, _) = pair(), pair()
    with pytest.raises(ConfigError, match=r"a Linear was given .* without its optimizer: give bo"):
        accelerator.prepare(one)
    with pytest.raises(ConfigError, match="without its optimizer"):
        accelerator.prepare_model(one)
    with pytest.raises(ConfigError, match="without its optimizer"):
        accelerator.prepare(one, first, two)  # and one is not distributed
    with pytest.raises(ConfigError, match="0 models of 1 have them all: give each optimizer with"):
        accelerator.prepare(two, first)
    over_two = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"0 models of 2 .* belong into one nn.ModuleDict"):
        accelerator.prepare(one, two, over_two)
    assert accelerator.prepare_model(one, evaluation_mode=True) is one
    prepared, optimizer = accelerator.prepare(two, torch.optim.SGD(two.parameters(), lr=0.1))
    assert prepared is two
    assert optimizer.param_groups[0]["params"][0] is two.weight


def test_accelerators_that_divide_the_model(
    job: slipstream.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate takes these on GPUs only, so the state of one is put into another accelerator."""
    accelerator = Accelerator(cpu=True)
    for name in ("deepspeed", "fsdp", "megatron_lm"):
        plugin = {f"{name}_plugin": object(), "distributed_type": accelerator.distributed_type}
        with monkeypatch.context() as patch:
            patch.setattr(accelerator, "state", SimpleNamespace(**plugin))
            with pytest.raises(ConfigError, match=rf"with {name}, .*configure it without"):
                use(accelerator, job)
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.XLA)
    with pytest.raises(ConfigError, match=r"with XLA, .*configure it without"):
        use(accelerator, job)


def test_fp8_is_refused(job: slipstream.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp8")
    with pytest.raises(ConfigError, match="use 'bf16' or 'no'"):
        use(accelerator, job)


def test_an_old_accelerate(
    job: slipstream.Job, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "version", "1.0.9")
    with pytest.raises(ConfigError, match=r"needs Accelerate 1.1 or later, and this is 1.0.9: pip"):
        use(accelerator, job)
    monkeypatch.setattr(integration, "version", "2.0.0.dev0")
    use(accelerator, job)


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "slipstream.integrations.accelerate")
    with pytest.raises(ImportError, match=r"needs accelerate: pip install 'slipstream\[accel"):
        __import__("slipstream.integrations.accelerate")


def test_what_a_trainer_cannot_do(job: slipstream.Job, tmp_path: Path) -> None:
    import transformers

    def trainer(**options: Any) -> Any:
        base: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
        arguments = transformers.TrainingArguments(**base, **options)
        return transformers.Trainer(nn.Linear(3, 3), arguments, model_init=None)

    with pytest.raises(ConfigError, match="set per_device_train_batch_size instead"):
        use(trainer(auto_find_batch_size=True), job)
    usual = trainer()
    use(usual, job, "push_pull()")
    with pytest.raises(ConfigError, match="start a job for each trial"):
        usual.create_accelerator_and_postprocess()
