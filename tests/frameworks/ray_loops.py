"""Training loops that Ray's workers run, and the same training in one process."""

from __future__ import annotations

import atexit
import os
import signal
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from torch import nn

import slipstream
from slipstream.errors import ConfigError, PeerFailed

STEPS = 8
SAVED, KILLED = 3, 5
LIMIT_S = 60.0
# Strategies, and whether the loop accumulates gradients and clips their norm.
VARIANTS = (("push_pull", False), ("allreduce", True), ("poseidon", False))


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int, half: int = 0) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * step + 10 * rank + half)
    inputs = torch.randn(6, 12, generator=drawn)
    return F.mse_loss(model(inputs), 3 * inputs[:, :4].sin())


def one_step(model: Any, optimizer: Any, step: int, ranks: range, accumulate: Any) -> None:
    """A step on the samples of these ranks; with ``accumulate``, in two halves, and clipped."""
    optimizer.zero_grad()
    for half in range(2 if accumulate else 1):
        within = accumulate() if accumulate and half == 0 else nullcontext()
        with within:
            losses = [loss_of(model, step, rank, half) for rank in ranks]
            torch.stack(losses).mean().backward()
    if accumulate:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def reference(workers: int, *, accumulates: bool = False) -> dict[str, torch.Tensor]:
    """The weights of one process that trains on the samples of all workers."""
    model, optimizer = parts()
    for step in range(STEPS):
        one_step(model, optimizer, step, range(workers), nullcontext if accumulates else None)
    return weights(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(strategy: str | None, accumulates: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    with slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S) as job:
        model, optimizer = parts(seed=job.rank)  # rank 0's weights count
        if accumulates:
            job.init_process_group()
        model, optimizer = job.distribute(model, optimizer, strategy)
        own = range(job.rank, job.rank + 1)
        for step in job.steps(STEPS):
            one_step(model, optimizer, step, own, job.accumulate if accumulates else None)
    return job, weights(model)


def facts() -> dict[str, Any]:
    """What one worker has: its place, the weights of every variant, and how gadei is refused."""
    found: dict[str, Any] = {"weights": [trained(*variant)[1] for variant in VARIANTS]}
    job, found["default"] = trained(None)
    found |= {"rank": job.rank, "local_rank": job.local_rank, "summary": job.summary is not None}
    found["local_size"] = int(os.environ["LOCAL_WORLD_SIZE"])
    found["node"] = ray.get_runtime_context().get_node_id()
    found["main"] = threading.current_thread() is threading.main_thread()
    found["strategy"] = os.environ["SLIPSTREAM_STRATEGY"]
    found["secret"] = os.environ["SLIPSTREAM_SECRET"]
    try:
        trained("gadei")
    except (ConfigError, PeerFailed) as error:  # its own, or that of a worker that was faster
        found["gadei"] = str(error)
    return found


def looping(before_step: Any) -> None:
    """Trains until a worker does something else; the file of a rank shows that it trains."""
    with slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S) as job:
        model, optimizer = job.distribute(*parts())
        for step in job.steps(10**6):
            before_step(job, step)
            one_step(model, optimizer, step, range(job.rank, job.rank + 1), None)


class OfUser(Exception):
    """An error of a script, which only its own constructor can make."""

    def __init__(self, sample: int, *, source: str) -> None:
        super().__init__(f"sample {sample} of {source} is damaged")


def raising() -> None:
    def before_step(job: slipstream.Job, step: int) -> None:
        if job.rank == 1 and step == 2:
            raise OfUser(17, source="digits")

    looping(before_step)


def raising_under_ray_train() -> None:
    from slipstream.integrations.ray import train  # seconds, which workers of run need not spend

    train.CAUSE_FIRST_S = LIMIT_S  # however slow the machine is, Ray Train looks before
    raising()


def without_block(steps: dict[int, int]) -> int:
    """Has no ``with`` block.

    Args:
        steps: by rank; a rank without any computes a gradient and does not use it.
    """
    job = slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S)
    model, optimizer = job.distribute(*parts())
    for step in range(steps[job.rank]):
        one_step(model, optimizer, step, range(job.rank, job.rank + 1), None)
    if not steps[job.rank]:
        loss_of(model, 0, job.rank).backward()
    return job.rank


class Exiting:
    """Has exit handlers; those of rank 1 do not end, and its function fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        with slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S) as job:
            rank = job.rank
        hangs = [threading.Event().wait] if rank else []
        for handler in (*hangs, lambda: Path(self.folder, f"{rank}.{os.getpid()}").touch()):
            atexit.register(handler)
        if rank:
            raise ValueError("this function has failed")


def idle(folder: str) -> None:
    """Does not end by itself."""
    Path(folder, str(os.getpid())).touch()
    threading.Event().wait()


def await_end_with(node: str) -> None:
    """Until this process is killed with its node."""
    threading.Event().wait(LIMIT_S)
    raise AssertionError(f"node {node} was not killed within {LIMIT_S:.0f} s")


class Training:
    """Trains until its process is killed from outside.

    Args:
        folder: where each rank writes its process's number and its node's id once it trains.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        looping(self.note)

    def note(self, job: slipstream.Job, step: int) -> None:
        if step == 2:
            node = ray.get_runtime_context().get_node_id()
            Path(self.folder, f"{job.rank}.{os.getpid()}.{node}").touch()


class ComingBack:
    """Partial exchange; rank 1 is killed once, and all train on until it has come back.

    Args:
        with_node: it is killed from outside, with its node, whose id is then a file's name.
    """

    def __init__(self, folder: Path, *, with_node: bool = False) -> None:
        self.folder, self.with_node = folder, with_node

    def die(self) -> None:
        if self.with_node:
            node = ray.get_runtime_context().get_node_id()
            Path(self.folder, node).touch()
            await_end_with(node)
        os.kill(os.getpid(), signal.SIGKILL)

    def __call__(self) -> dict[str, Any]:
        life = int(os.environ.get("SLIPSTREAM_INCARNATION", "0"))
        back = self.folder / "back"
        with slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S) as job:
            model, _ = parts(seed=job.rank + 10 * life)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model, optimizer = job.distribute(model, optimizer)
            first = None
            for step in job.steps(10**6):
                first = step if first is None else first
                if job.rank == 1 and life == 0 and step == KILLED:
                    self.die()
                one_step(model, optimizer, step, range(job.rank, job.rank + 1), None)
                if life:
                    back.touch()
                if step % 50 == 49 and job.broadcast(back.exists()):
                    break
        node = ray.get_runtime_context().get_node_id()
        return {"weights": weights(model), "life": life, "first": first, "node": node}


def resuming(config: dict[str, Any]) -> None:
    """A loop of Ray Train that saves once, and in which a worker is killed once.

    Args:
        config: with ``node``, the worker there is killed from outside, else rank 1 kills itself.
    """
    first, killed = 0, Path(config["folder"], "killed")
    here = ray.get_runtime_context().get_node_id()
    with slipstream.init(start_limit_s=LIMIT_S, wait_limit_s=LIMIT_S) as job:
        model, optimizer = job.distribute(*parts(seed=job.rank))
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                job.load(Path(folder, "job"))
            first = job.step
        for step in job.steps(STEPS):
            doomed = here == config["node"] if "node" in config else job.rank == 1
            if doomed and step == KILLED and not killed.exists():
                ray.train.get_all_reported_checkpoints()  # waits until Ray has the one above
                killed.touch()
                if "node" in config:
                    await_end_with(here)
                os.kill(os.getpid(), signal.SIGKILL)
            one_step(model, optimizer, step, range(job.rank, job.rank + 1), None)
            if step == SAVED:
                save(job)
    found = {"weights": weights(model), "first": first, "local_rank": job.local_rank}
    found["node"] = here
    torch.save(found, Path(config["folder"], str(job.rank)))


def save(job: slipstream.Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job.save(Path(folder, "job"))
        written = ray.train.Checkpoint.from_directory(folder) if job.rank == 0 else None
        ray.train.report({"step": job.step}, checkpoint=written)
