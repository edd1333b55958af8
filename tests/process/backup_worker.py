"""Trains parts, one job each, in which workers may miss rounds; writes down what each rank saw."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from cases import digest
from forked_servers import start_servers_by_fork
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slipstream

INPUTS, HIDDEN, OUTPUTS, BATCH = 12, 48, 4, 8
SAMPLES = 240  # of the data set that is leased
LEASED = 4  # samples a batch
TICK = 2.0**-10  # how far a counter moves in an update; exact in binary
ELEMENTS = (300, 700, 1100)
MARK_S = 60.0
LATE_S = 2.5
NEAR = 5  # rounds
NEVER = 1 << 60  # a round that nobody reaches


class Count(nn.Module):
    """Its gradient is one, whatever the weights are: weights tell how many updates there were."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(elements))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.value.sum()


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, OUTPUTS),
    )


def counter() -> nn.Sequential:
    return nn.Sequential(*(Count(elements) for elements in ELEMENTS))


def large_counter() -> nn.Sequential:
    """Takes a while to travel."""
    return nn.Sequential(*(Count(1000 * elements) for elements in ELEMENTS[:2]))


MODELS = {"network": network, "counter": counter, "large counter": large_counter}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.001),
    "plain": lambda p: torch.optim.SGD(p, lr=0.02),
    "count": lambda p: torch.optim.SGD(p, lr=TICK),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, momentum=0.9),
}


class Board:
    """Numbers that all ranks and the test can read while the job runs."""

    def __init__(self, rank: int, name: str = "board") -> None:
        self._file = os.open(name, os.O_RDWR | os.O_CREAT)
        self._rank = rank

    def post(self, number: int) -> None:
        os.pwrite(self._file, struct.pack("q", number), 8 * self._rank)

    def read(self, world: int) -> list[int]:
        content = os.pread(self._file, 8 * world, 0).ljust(8 * world, b"\0")
        return list(struct.unpack(f"{world}q", content))

    def of_others(self, world: int) -> list[int]:
        return [number for rank, number in enumerate(self.read(world)) if rank != self._rank]


class Rank:
    """One rank's part of one job."""

    def __init__(self, job: Any, asked: dict[str, Any], told: dict[str, Any]) -> None:
        self.job, self.asked, self.told = job, asked, told
        torch.manual_seed(1)
        self.teacher = network()
        torch.manual_seed(2 + job.rank)  # rank 0's weights are what counts
        self.model: nn.Module = MODELS[asked["model"]]()
        optimizer = OPTIMIZERS[asked["optimizer"]](list(self.model.parameters()))
        self.model, self.optimizer = job.distribute(self.model, optimizer, asked["strategy"])
        self.board = Board(job.rank)  # rounds begun
        self.there = Board(job.rank, "there")  # rounds come to, whether begun or not
        self.sent = Board(job.rank, "sent")  # steps whose gradients have been given away
        self.random = random.Random(f"{asked['name']} {job.rank}")
        self.note_accounts()

    def note_accounts(self) -> None:
        """When all have ended, and nothing changes any more."""
        mode = self.job._training.mode
        service, accounts = mode.parts[0].service, mode.accounts

        def noted() -> dict[str, Any]:
            self.told["accounts"] = [msgspec.to_builtins(a) for a in service.accounts()]
            return dict(accounts())

        mode.accounts = noted

    def batch(self, round_: int) -> torch.Tensor:
        seed = 1000 * round_ + self.job.rank
        return torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(seed))

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        if "counter" in self.asked["model"]:
            total: torch.Tensor = self.model(torch.zeros(()))
            return total
        with torch.no_grad():
            targets = self.teacher(inputs)
        return F.mse_loss(self.model(inputs), targets)

    def pause(self, round_: int) -> None:
        self.there.post(round_ + 1)
        pauses, behind = self.asked["pause_s"], self.asked["behind"]
        fixed = pauses[self.job.rank] if pauses else 0.0
        time.sleep(fixed + self.random.random() * self.asked["jitter_s"])
        world = self.job.world_size
        if behind and behind[self.job.rank]:
            begun = min(round_ + behind[self.job.rank] + 1, self.asked["total"])
            wait_until(lambda: max(self.board.read(world)) >= begun)
        # However long somebody stands still on a busy machine, it takes part in what follows. It
        # never waits for those who wait for it here: it has come to a round that they may begin,
        # or is late and answered without them.
        if within := self.asked["within"]:
            wait_until(lambda: min(self.there.of_others(world)) > round_ - within)
        if abreast := self.asked["abreast"]:
            taken = len(self.told["rounds"])
            wait_until(lambda: min(self.sent.of_others(world)) >= taken - abreast)

    def leave(self) -> None:
        """Nobody waits for this rank any more."""
        for board in (self.board, self.there, self.sent):
            board.post(NEVER)

    def let_go_first(self, round_: int) -> None:
        """A rank that the test names goes on first: into the round after the one it stood in. The
        others do not leave it behind then, however busy the machine is."""
        with suppress(FileNotFoundError):
            whom, stood = map(int, Path("first_goes").read_text().split())
            if whom != self.job.rank:
                world = self.job.world_size
                wait_until(lambda: self.board.read(world)[whom] > stood)
                wait_until(lambda: self.there.read(world)[whom] > round_ - NEAR)

    def step(self, round_: int, inputs: torch.Tensor | None = None) -> None:
        self.pause(round_)
        self.optimizer.zero_grad()
        loss = self.loss(self.batch(round_) if inputs is None else inputs)
        self.board.post(round_ + 1)
        loss.backward()
        self.sent.post(len(self.told["rounds"]) + 1)
        self.optimizer.step()
        self.told["rounds"].append(round_)
        self.told["losses"].append(float(loss.detach()))

    def tick(self) -> None:
        if self.asked["look"]:
            self.job.wait()
            self.told["digests"][self.job.step] = digest(self.model)

    def save(self) -> None:
        every, path = self.asked["save_every"], self.asked["save"]
        if every and len(self.told["rounds"]) % every == 0:
            self.job.save(f"{path}.{len(self.told['rounds'])}")

    def averaged(self) -> dict[str, torch.Tensor]:
        with self.job.averaged_weights():
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}


# ---- loops, by name


def by_steps(rank: Rank) -> None:
    for round_ in rank.job.steps(rank.asked["total"]):
        rank.step(round_)
        rank.tick()
        rank.save()


def by_own_count(rank: Rank) -> None:
    """As a loop that knows nothing of rounds."""
    for number in range(rank.asked["own"][rank.job.rank]):
        rank.step(number)
        rank.tick()
        rank.save()


def ramped_up(rank: Rank) -> None:
    """Rank 0, whose turn it is at once, goes on when the others have come before theirs."""
    if rank.job.rank == 0:
        wait_until(lambda: min(rank.sent.of_others(rank.job.world_size)) > 0)
    by_own_count(rank)


def until_told(rank: Rank) -> None:
    """Until the test says so, and some more: ranks leave one after the other."""
    more = 5 * rank.job.rank
    for round_ in rank.job.steps(100_000):
        if Path("enough").exists():
            more -= 1
        if more < 0:
            break
        rank.let_go_first(round_)
        if rank.asked["stops_within"] == [rank.job.rank, len(rank.told["rounds"])]:
            stop_within_backward(rank.model)
        rank.step(round_)


def stop_within_backward(model: nn.Module) -> None:
    """The gradients of the later layers have left by then, those of the first have not."""
    first = next(model.parameters())

    def stop(gradient: torch.Tensor) -> None:
        handle.remove()
        time.sleep(0.5)  # for what is on its way
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    handle = first.register_hook(stop)


def by_leases(rank: Rank) -> None:
    """Epochs of a data set; notes which samples each step used."""
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = rank.job.sampler(data, LEASED)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=rank.asked["loaders"])
    while sampler.epoch < rank.asked["total"]:
        for (indices,) in loader:
            rank.job.wait()
            rank.step(rank.job.step, rank.batch(int(indices[0])))
            rank.told["batches"].append(indices.tolist())


def by_averages(rank: Rank) -> None:
    """Follows the weights of every update, and compares with what servers averaged."""
    trained = dict(rank.model.named_parameters())
    if rank.asked["load"]:
        rank.told["loaded_averages"] = digest_of(rank.averaged())
    mine = {n: v.clone() for n, v in rank.averaged().items()}
    while rank.job.step < rank.asked["own"][rank.job.rank]:
        rank.step(rank.job.step)
        rank.tick()
        rank.job.wait()
        for name, average in mine.items():
            average.lerp_(trained[name].detach(), 1.0 - rank.asked["decay"])
        rank.save()
        if rank.job.step % 5 == 0:
            rank.told["averages"][rank.job.step] = compare(rank, mine)
        if rank.asked["look"]:
            rank.told["averaged_digests"][rank.job.step] = digest_of(mine)


def compare(rank: Rank, mine: dict[str, torch.Tensor]) -> dict[str, Any]:
    before = digest(rank.model)
    lent = rank.averaged()
    return {
        "away": max(float((lent[n] - mine[n]).abs().max()) for n in mine),
        "moved": max(
            float((lent[n] - p.detach()).abs().max()) for n, p in rank.model.named_parameters()
        ),
        "own_again": digest(rank.model) == before,
        "digest": digest_of(lent),
    }


def tried_within(rank: Rank) -> None:
    """New weights arrive while the averaged ones are lent."""
    first = rank.job.rank == 0
    if first:
        rank.step(0)
        with rank.job.averaged_weights():
            lent = digest(rank.model)
            Path("lent").touch()
            wait_until(lambda: rank.job._training.mode.parts[0].channels.rounds.told_round > 0)
            with torch.no_grad():
                rank.model.eval()(rank.batch(0))
            rank.model.train()
            rank.told["lent_unchanged"] = digest(rank.model) == lent
    else:
        wait_until(Path("lent").exists)
    while len(rank.told["rounds"]) < 6:
        rank.step(len(rank.told["rounds"]))


def within_bound(rank: Rank) -> None:
    """Notes how far ahead of the slowest this rank began every clock."""
    others = [r for r in range(rank.job.world_size) if r != rank.job.rank]
    for clock in rank.job.steps(rank.asked["total"]):
        rank.job.wait()
        begun = rank.board.read(rank.job.world_size)
        rank.told["ahead"].append(clock - min(begun[r] for r in others))
        rank.step(clock)


def shared_at_the_end(rank: Rank) -> None:
    """Two come with their first step when the last round is over; one of them later still."""
    if rank.job.rank >= 2:
        wait_until(lambda: min(rank.board.read(2)) >= rank.asked["total"])
        time.sleep(LATE_S * (rank.job.rank - 2))
    by_steps(rank)
    rank.told["shared"] = rank.job.broadcast(7 if rank.job.rank == 0 else None)


def refuses(rank: Rank) -> None:
    """What comes too late, or was not asked for; then training goes on."""
    rank.step(0)
    rank.job.wait()
    for action in (lambda: rank.job.load("nowhere"), rank.averaged):
        rank.told["refused"].append(attempt(action))
    while len(rank.told["rounds"]) < 5:
        rank.step(len(rank.told["rounds"]))


def attempt(action: Any) -> str:
    try:
        action()
    except slipstream.ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loads_late(rank: Rank) -> None:
    """When one is ahead; the checkpoint is of before the first step."""
    rank.job.save("beginning")
    for clock in range(3 if rank.job.rank == 0 else 1):
        rank.step(clock)
    rank.told["refused"].append(attempt(lambda: rank.job.load("beginning")))


LOOPS = {
    loop.__name__: loop
    for loop in (
        by_steps,
        by_own_count,
        ramped_up,
        until_told,
        by_leases,
        by_averages,
        tried_within,
        within_bound,
        shared_at_the_end,
        refuses,
        loads_late,
    )
}


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + MARK_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def digest_of(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def train(asked: dict[str, Any], told: dict[str, Any]) -> None:
    with slipstream.init(
        servers=asked["servers"],
        start_limit_s=60,
        wait_limit_s=asked["wait_s"],
        silence_limit_s=asked["silence_s"],
    ) as job:
        rank = Rank(job, asked, told)
        if asked["load"]:
            job.load(asked["load"])
            told["loaded"] = {"step": job.step, "digest": digest(rank.model)}
        begun = time.monotonic()
        LOOPS[asked["loop"]](rank)
        rank.leave()
        told["lasted_s"] = time.monotonic() - begun
        told["stats"] = job.stats() if asked["stats"] else None
    told["digest"] = digest(rank.model)
    told["summary"] = job.summary
    told["step"] = job.step
    if "counter" in asked["model"]:
        values = torch.cat([p.detach() for p in rank.model.parameters()])
        told["counts"] = [float(-values.max()) / TICK, float(-values.min()) / TICK]


def fresh() -> Iterator[tuple[str, Any]]:
    for name in ("rounds", "losses", "batches", "ahead", "warnings", "refused"):
        yield name, []
    for name in ("digests", "averages", "averaged_digests"):
        yield name, {}


def main() -> None:
    torch.set_num_threads(1)
    start_servers_by_fork()
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        told = dict(fresh())
        for name in ("board", "there", "sent"):
            with suppress(FileNotFoundError):
                os.remove(name)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(asked, told)
            told["warnings"] = [str(warning.message) for warning in caught]
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
            told["trace"] = traceback.format_exc()
        file = Path(f"{asked['name']}.{os.environ['RANK']}.json")
        file.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
