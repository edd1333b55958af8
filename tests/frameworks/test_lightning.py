"""Lightning's Trainer over slipstream: the real Trainer, and all launchers."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("lightning", reason="needs Lightning; run make frameworks")
sys.path.append(str(Path(__file__).parents[1] / "process"))

from launches import Launch, until
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from ports import free_port

import slipstream
from slipstream.errors import ConfigError, LaunchError, PeerLost, SecretError
from slipstream.integrations.lightning import SlipstreamStrategy, environment

pytestmark = [
    pytest.mark.process,
    # Lightning's, where Slurm is installed.
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]

WORKER = str(Path(__file__).with_name("lightning_worker.py"))
RUN = (sys.executable, "-m", "slipstream", "run", "--workers=2")
SECRET = {"SLIPSTREAM_SECRET": "a secret of sixteen or more"}
Case = dict[str, Any]


def torchrun() -> tuple[str, ...]:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    return (*command, "--master-addr=127.0.0.1", f"--master-port={free_port()}")


VARIANTS: dict[str, Case] = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "clipped": {"clip": 0.1},
    "both": {"accumulate": 3, "clip": 0.1},
    "gan": {"gan": True},
    "resumed": {"resumes": True},
}
OF_WORKERS = ("plain", "accumulated", "clipped", "both", "gan")
SYNCHRONOUS = {
    "slipstream_push_pull": (*OF_WORKERS, "resumed"),
    "slipstream_allreduce": ("plain", "both", "gan"),
    "poseidon(choose='bytes')": ("plain", "accumulated", "both", "resumed"),
    # Servers update: there a worker's own gradient is clipped.
    "backup_workers(first=2)": ("accumulated",),
    "push_pull(update='server')": ("resumed",),
}
OTHERS = [
    *("slipstream_adam_factors", "slipstream_one_bit", "slipstream_low_rank"),
    *("slipstream_parameter_flow", "slipstream_ako", "diloco(every=3)", "slipstream_local_sgd"),
    *("slipstream_async_sgd", "slipstream_bounded_staleness", "slipstream_all_to_all"),
]
DDP = "ddp_find_unused_parameters_true"  # each pass of the GAN is of one network


def case(strategy: str, variant: str = "plain", **more: Any) -> Case:
    name = re.sub(r"\W+", "-", f"{strategy}-{variant}").strip("-")
    return {"name": name, "strategy": strategy, **VARIANTS.get(variant, {}), **more}


EQUALS = [case(system, each) for system, variants in SYNCHRONOUS.items() for each in variants]
EVALUATED = case("slipstream_push_pull", "evaluated", validates=True, tests=True)
SLOW = [case(system, rate=0.02) for system in OTHERS]  # diloco and async_sgd step further
REFERENCES = [case(DDP, variant) for variant in VARIANTS if variant != "resumed"]
BRIEF = [case("slipstream_push_pull"), case("slipstream_poseidon", "both")]


class Outcome:
    """What the ranks of a launch have written of a case."""

    def __init__(self, launch: Launch, case: Case) -> None:
        files = [launch.folder / f"{case['name']}.{rank}" for rank in range(2)]
        self.told = [json.loads(file.with_name(f"{file.name}.json").read_text()) for file in files]
        self.states = [torch.load(file.with_name(f"{file.name}.pt")) for file in files]


def furthest(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launch]]:
    with ExitStack() as stack:

        def start(*command: str, plan: list[Case], env: dict[str, str] | None = None) -> Launch:
            folder = tmp_path_factory.mktemp("lightning")
            started = Launch((*command, WORKER, json.dumps(plan)), folder, env)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture(scope="module")
def trained(launch: Callable[..., Launch]) -> Launch:
    """By Lightning's own launcher. DDP comes last: its process group stays."""
    plan = [*EQUALS, EVALUATED, *SLOW, *REFERENCES]
    job = launch(sys.executable, plan=plan)
    assert job.wait(limit_s=280) == 0, job.stderr
    assert job.remains.left() == []
    return job


def reference_of(trained: Launch, of: Case) -> dict[str, torch.Tensor]:
    variant = "plain" if of.get("resumes") else of["name"].rpartition("-")[2]
    return Outcome(trained, case(DDP, variant)).states[0]


@pytest.mark.parametrize("of", EQUALS, ids=lambda of: of["name"])
def test_weights_are_those_of_ddp(trained: Launch, of: Case) -> None:
    outcome, reference = Outcome(trained, of), reference_of(trained, of)
    assert [(told["rank"], told["size"]) for told in outcome.told] == [(0, 2), (1, 2)]
    assert furthest(*outcome.states) == 0
    # Servers and factors sum in another order.
    exact = "push-pull" in of["name"] or "allreduce" in of["name"]
    assert furthest(outcome.states[0], reference) <= (0 if exact else 2e-6)


def test_layers_are_sent_as_factors(trained: Launch) -> None:
    assert "factors/mesh" in sent_in(trained, case("poseidon(choose='bytes')", "both"))


def test_accumulated_gradients_are_sent_once(trained: Launch) -> None:
    """A step every three batches, and one at the end of each epoch, of 7."""
    plain, accumulated = (
        sum(sent_in(trained, case("slipstream_push_pull", each)).values())
        for each in ("plain", "accumulated")
    )
    assert accumulated == plain * 3 // 7


def sent_in(trained: Launch, of: Case) -> dict[str, int]:
    found: dict[str, int] = Outcome(trained, of).told[0]["bytes"]
    return found


@pytest.mark.parametrize("system", OTHERS)
def test_other_systems_train_as_well(trained: Launch, system: str) -> None:
    outcome = Outcome(trained, case(system))
    assert furthest(*outcome.states) == 0
    for told in outcome.told:
        assert len(told["losses"]) == 14  # steps: two epochs of half of 14 batches
        assert sum(told["losses"][-7:]) < sum(told["losses"][:7])


def test_evaluation_after_the_training(trained: Launch) -> None:
    told = Outcome(trained, EVALUATED).told
    assert told[0]["tested"] == told[1]["tested"] < told[0]["losses"][0]
    assert "job.distribute was never called" not in trained.stderr


# ---- other launchers; their last case fails


RAISED = case("slipstream_push_pull", "raised", raises=1)
BROKEN = "slipstream: rank 1 failed: ValueError: this batch is broken"


def assert_failed(job: Launch) -> None:
    assert job.wait() != 0, job.stdout
    assert job.stderr.count("ValueError: this batch is broken\n") == 2, job.stderr  # and of rank 1
    assert [line for line in job.own_lines if "rank 1 failed" in line] == [BROKEN], job.stderr
    assert f"at {WORKER}" in job.stderr
    assert job.remains.left() == []


@pytest.mark.parametrize("launcher", ["slipstream run", "torchrun"])
def test_other_launchers(trained: Launch, launch: Callable[..., Launch], launcher: str) -> None:
    """Under torchrun by Lightning's other name."""
    if launcher == "torchrun":
        env = {**SECRET, "FRAMEWORK": "pytorch_lightning"}
        job = launch(*torchrun(), plan=[*BRIEF, RAISED], env=env)
    else:
        job = launch(*RUN, plan=[*BRIEF, RAISED])
    assert_failed(job)
    for each in BRIEF:
        outcome = Outcome(job, each)
        assert furthest(*outcome.states) == 0
        assert furthest(outcome.states[0], reference_of(trained, each)) <= 2e-6
    assert not (job.folder / f"{RAISED['name']}.0.pt").exists()


# ---- failures under Lightning's launcher


def test_a_rank_raises_while_others_wait_in_a_collective(launch: Callable[..., Launch]) -> None:
    raised = case("slipstream_allreduce", "raised", validates=True, raises_in_validation=1)
    job = launch(sys.executable, plan=[raised])
    assert job.wait() != 0
    broken = "slipstream: rank 1 failed: ValueError: this validation is broken"
    assert job.own_lines == [broken], job.stderr
    assert job.stderr.count("Traceback") == 1, job.stderr  # rank 1's own
    assert job.remains.left() == []
    # Callbacks get the reason, and the Trainer has ended in order.
    told = json.loads((job.folder / f"{raised['name']}.0.failed").read_text())
    assert told == {"callback": "PeerFailed", "stage": "None"}


def test_a_rank_that_raises_when_others_have_trained_ends_by_itself(
    launch: Callable[..., Launch],
) -> None:
    raised = case("slipstream_push_pull", "raised", raises_at_end=1, ending_s=1.0)
    job = launch(sys.executable, plan=[raised])
    assert job.wait() != 0
    assert job.own_lines == ["slipstream: rank 1 failed: ValueError: this end is broken"]
    assert job.stderr.count("Traceback") == 1, job.stderr  # rank 1's own
    told = [job.folder / f"{raised['name']}.{rank}.failed" for rank in range(2)]
    assert [json.loads(each.read_text())["callback"] for each in told] == [
        "PeerFailed",
        "ValueError",
    ]
    assert job.remains.left() == []


def test_a_rank_that_never_begins_ends_the_others(launch: Callable[..., Launch]) -> None:
    job = launch(sys.executable, plan=BRIEF, env={"DIES_EARLY": "1"})
    assert job.wait() == 1
    assert job.own_lines == ["slipstream: rank 1 exited with code 1"], job.stderr
    assert job.remains.left() == []


def test_ranks_of_a_second_node_are_those_of_the_job(launch: Callable[..., Launch]) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "1"}
    plan = [case("slipstream_push_pull", nodes=2)]
    job = launch(sys.executable, plan=plan, env={**address, **SECRET, "DIES_EARLY": "1"})
    assert job.wait() == 1
    assert job.own_lines == ["slipstream: rank 3 exited with code 1"], job.stderr


def test_rank_0_exits_while_others_train_on(launch: Callable[..., Launch]) -> None:
    exits = case("slipstream_push_pull", "exits", exits_after=0)
    job = launch(sys.executable, plan=[exits, BRIEF[0]])
    assert job.wait() == 1
    (line,) = job.own_lines
    assert "the script of rank 0 has ended, and rank 1 had more to train" in line, job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    assert job.remains.left() == []


def test_workers_of_a_launch_that_failed_midway_end() -> None:
    """The second of two cannot be started."""
    code = """
import subprocess, sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import slipstream.integrations.lightning

workers, real = [], subprocess.Popen

def start(*command, **more):
    if workers:
        raise BlockingIOError("no more processes")
    workers.append(real([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    return workers[0]

subprocess.Popen = start
trainer = Trainer(strategy="slipstream_push_pull", devices=3, accelerator="cpu", logger=False)
try:
    trainer.fit(BoringModel())
except BlockingIOError:
    print(workers[0].poll())
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, timeout=100, text=True)
    assert ended.stdout == "-9\n", ended.stderr


def waiting(launch: Callable[..., Launch], *launcher: str) -> Launch:
    """A job in the middle of its training."""
    job = launch(*launcher, plan=[case("slipstream_push_pull", "waits", wait=True)])
    started = [job.folder / f"trains.{rank}" for rank in range(2)]
    until(lambda: job.ended or all(map(Path.exists, started)), "training to begin")
    assert not job.ended, job.stderr
    return job


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not kill with the parent")
def test_nothing_outlives_rank_0(launch: Callable[..., Launch]) -> None:
    job = waiting(launch, sys.executable)
    job.send(signal.SIGKILL)
    job.wait()
    assert job.remains.left() == []


@pytest.mark.parametrize("launcher", ["Lightning's", "slipstream run"])
def test_ctrl_c(launch: Callable[..., Launch], launcher: str) -> None:
    job = waiting(launch, *((sys.executable,) if launcher == "Lightning's" else RUN))
    assert_on_loopback(job)
    job.remains.note_ports()
    if launcher == "Lightning's":
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        assert job.wait() == 1
        assert job.stderr.count("Detected KeyboardInterrupt") == 1, job.stderr
        assert job.own_lines == [], job.stderr
    else:
        job.send(signal.SIGINT)
        assert job.wait() == 130
        assert job.own_lines == ["slipstream: stopped by Ctrl-C"], job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    assert job.remains.left() == []


def assert_on_loopback(job: Launch) -> None:
    links = [link for each in job.remains.processes() for link in each.net_connections("tcp")]
    listening = {link.laddr.ip for link in links if link.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


# ---- refused before anything starts


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLIPSTREAM_STRATEGY", "SLIPSTREAM_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    return monkeypatch


def started(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """By a launcher."""
    common = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20000"}
    for name, value in {**common, **variables}.items():
        monkeypatch.setenv(name, value)


def trainer(strategy: Any, devices: int = 2, **more: Any) -> Any:
    return Trainer(strategy=strategy, devices=devices, accelerator="cpu", logger=False, **more)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("gadei", "learners share memory.*use slipstream_push_pull"),
        ("backup_workers", r"backup_workers: .*SlipstreamStrategy\('backup_workers\(first=2\)'\)"),
        ("backup_workers(first=1)", "would wait for others that have finished: use first=2"),
        ("backup_workers(first=3)", "3"),
        ("local_sgd(first=1)", "first=2"),
        ("push_pul", "did you mean 'push_pull'"),
        ("poseidon(wire='float16')", "float16"),
        (3, "takes a strategy, such as slipstream.push_pull"),
    ],
)
def test_strategies_that_a_loop_cannot_carry(
    alone: pytest.MonkeyPatch, strategy: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(SlipstreamStrategy(strategy))


@pytest.mark.parametrize("system", ["gadei", "backup_workers"])
def test_names_of_such_systems_give_the_reason(alone: pytest.MonkeyPatch, system: str) -> None:
    with pytest.raises(ConfigError, match="loop of your own"):
        trainer(f"slipstream_{system}")


def test_the_strategy_of_the_command_line(alone: pytest.MonkeyPatch) -> None:
    alone.setenv("SLIPSTREAM_STRATEGY", "gadei")
    with pytest.raises(ConfigError, match="learners share memory"):
        trainer("slipstream")
    assert SlipstreamStrategy(slipstream.push_pull()) is not None


def test_numbers_that_do_not_fit_what_was_started(alone: pytest.MonkeyPatch) -> None:
    started(alone, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    with pytest.raises(LaunchError, match=r"for 2 workers, but 3 were started: .* product is 3"):
        trainer("slipstream_push_pull")
    started(alone, WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    with pytest.raises(LaunchError, match="set devices=4 and num_nodes=1"):
        trainer("slipstream_push_pull", num_nodes=2)


def test_several_nodes_need_an_address_and_a_secret(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="set MASTER_ADDR and MASTER_PORT"):
        trainer("slipstream_push_pull", num_nodes=2)
    for name, value in {"ADDR": "192.0.2.7", "PORT": "20000"}.items():
        alone.setenv(f"MASTER_{name}", value)
    alone.setenv("NODE_RANK", "1")
    alone.setenv("XDG_CONFIG_HOME", "/dev/null/config")  # where no secret can be made
    with pytest.raises(SecretError, match="set SLIPSTREAM_SECRET to the same random text"):
        trainer("slipstream_push_pull", num_nodes=2)
    known = SlipstreamStrategy("push_pull", secret=SECRET["SLIPSTREAM_SECRET"])
    assert trainer(known, num_nodes=2).world_size == 4


def test_torchruns_store_needs_a_secret(alone: pytest.MonkeyPatch) -> None:
    started(alone, WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    alone.setenv("XDG_CONFIG_HOME", "/dev/null/config")
    with pytest.raises(SecretError, match="openssl rand"):
        trainer("slipstream_push_pull")


def test_accelerators(alone: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(MisconfigurationException, match="accelerator is not available"):
            Trainer(strategy="slipstream_push_pull", accelerator="cuda", devices=2)
    other = SlipstreamStrategy()
    other.parallel_devices = [torch.device("xpu", 0)]
    with pytest.raises(ConfigError, match=r"Trainer\(accelerator='cpu'\)"):
        other._configure_launcher()


class Seeing(Callback):
    """Sees how long workers may take to end; its optimizer may have lost its servers."""

    def __init__(self, *, servers_lost: bool = False) -> None:
        self.servers_lost, self.graces = servers_lost, list[float]()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.graces.append(environment.CHILDREN.grace_s)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.servers_lost:
            (optimizer,) = trainer.optimizers
            optimizer.local, optimizer.state_dict = optimizer, self.fetch

    def fetch(self) -> dict[str, Any]:
        raise PeerLost("server 0", silent_s=5.0)


def fit_alone(
    callback: Callback, system: str = "push_pull", model: Any = None, **options: Any
) -> None:
    strategy = SlipstreamStrategy(system, **options)
    more = {"enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on loaders and logging
        alone = trainer(strategy, devices=1, max_steps=1, callbacks=[callback], **more)
        alone.fit(model or BoringModel())


def test_workers_have_as_long_to_end_as_a_lost_one_may_be_silent(alone: pytest.MonkeyPatch) -> None:
    seeing = Seeing()
    fit_alone(seeing, silence_limit_s=40)
    assert seeing.graces == [43]
    assert environment.CHILDREN.grace_s == 0


def test_a_job_whose_servers_are_lost_at_the_end_is_left(
    alone: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "slipstream.job"), pytest.raises(PeerLost):
        fit_alone(Seeing(servers_lost=True))
    assert "left" in caplog.text
    assert "server 0 is lost" in caplog.text


class Two(BoringModel):  # type: ignore[misc]
    """Has two optimizers, or none."""

    def __init__(self, *, has_optimizers: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.has_optimizers = False, has_optimizers

    def configure_optimizers(self) -> Any:
        if not self.has_optimizers:
            return None
        return torch.optim.SGD([self.layer.weight], 0.1), torch.optim.SGD([self.layer.bias], 0.1)


def test_a_strategy_of_one_optimizer_refuses_two(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ako trains one model with one optimizer.*push_pull"):
        fit_alone(Seeing(), "ako", Two())


def test_a_module_without_optimizer_is_refused(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(SlipstreamStrategy, "world_size", 2)
    with pytest.raises(ConfigError, match=r"Two.configure_optimizers has returned None"):
        fit_alone(Seeing(), model=Two(has_optimizers=False))


def test_options_are_those_of_init(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"does not take bucket_cap_mb: it takes .* servers"):
        SlipstreamStrategy("push_pull", bucket_cap_mb=25)


def test_an_old_lightning(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(environment.pl, "__version__", "2.5.4")
    with pytest.raises(ConfigError, match=r"needs Lightning 2.6 or later, and this is 2.5.4: pip"):
        importlib.reload(environment)


def test_there_is_a_job_only_during_fit(alone: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trainer.fit\(\)"):
        print(SlipstreamStrategy().job)
