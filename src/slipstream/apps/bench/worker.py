"""One worker of a trial: trains with one system and reports the step times.

It sends "ready" after the warm-up and waits for an answer; "timed" with its times, and waits again,
so that link counters are read without traffic; "judged" with the evaluation of the model.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.apps.bench.contestants import Session, training
from slipstream.apps.bench.devices import EmulatedNet
from slipstream.apps.bench.pacing import Pace
from slipstream.apps.bench.stragglers import Stragglers, parse_stragglers
from slipstream.apps.bench.trial import Judgement, Snapshot, Timing, Trial
from slipstream.apps.bench.workloads import Workload

Say = Callable[[str, Any], None]


class Loop:
    """The training loop, the same for every system."""

    def __init__(
        self, trial: Trial, workload: Workload, session: Session, rank: int, world: int
    ) -> None:
        self._trial, self._workload, self._session = trial, workload, session
        self._rank = rank
        batch = (trial.batch or workload.batch) * world
        self._batches = workload.batches(rank, world, batch, trial.seed)
        self._stragglers: Stragglers = parse_stragglers(trial.straggle)
        self._stragglers.check(world)
        self._pace = emulate(trial, session)
        self._base_s = device_step_s(trial, session.model) or trial.base_s
        self._step = 0
        self._weights: list[tuple[int, float, dict[str, Tensor]]] = []
        self.compute_s: list[float] = []

    def run(self, steps: int, *, keep_weights: bool = False) -> list[float]:
        """Make steps; return the duration of each."""
        start = time.perf_counter()
        times = []
        last_kept = 0
        for done in self._session.steps(steps):
            at = time.perf_counter()
            self._one()
            times.append(time.perf_counter() - at)
            if keep_weights and self._rank == 0 and self._wants_weights(done, last_kept, steps):
                last_kept = done
                self._session.finish()
                with self._session.weights():
                    state = bare(self._session.model).state_dict()
                    weights = {name: value.clone() for name, value in state.items()}
                self._weights.append((done, time.perf_counter() - start, weights))
        return times

    def _wants_weights(self, done: int, last_kept: int, steps: int) -> bool:
        """Return whether to keep the weights now: once in several rounds that this worker makes."""
        every = self._trial.evaluate_every
        return bool(every) and (done // every > last_kept // every or done == steps)

    def _one(self) -> None:
        session = self._session
        inputs, targets = next(self._batches)
        if self._pace is not None:
            self._pace.begin_step()
        session.optimizer.zero_grad()
        start = time.perf_counter()
        loss = self._workload.loss(session.model(inputs), targets)
        delay_s = self._delay_s()
        time.sleep(delay_s)
        loss.backward()
        self.compute_s.append(time.perf_counter() - start - delay_s)
        session.optimizer.step()
        self._step += 1

    def _delay_s(self) -> float:
        """Return the delay of a slow worker's step, of which all gradients are late."""
        base_s = self._base_s or (statistics.median(self.compute_s) if self.compute_s else 0.0)
        return self._stragglers.delay_s(
            self._rank, self._step, seed=self._trial.seed, base_s=base_s
        )

    def judge(self) -> Judgement:
        """Evaluate the weights kept during training, and the final ones."""
        goal, stats = self._workload.goal, self._session.stats()
        if goal is None:
            return Judgement(None, [], stats)
        with self._session.weights():
            metric = goal.evaluate(bare(self._session.model))
        judged = self._workload.model()  # the session's own belongs to the job
        if self._weights:  # only one worker's; the others wait for it
            torch.set_num_threads(os.cpu_count() or 1)
        snapshots = []
        for step, seconds, weights in self._weights:
            judged.load_state_dict(weights)
            snapshots.append(Snapshot(step, seconds, goal.evaluate(judged)))
        return Judgement(metric, snapshots, stats)


def bare(model: nn.Module) -> nn.Module:
    """Return the user's own module, without DDP's wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def emulate(trial: Trial, session: Session) -> Pace | None:
    """Let the computation take as long as on the device, if there is one."""
    net = bare(session.model)
    if isinstance(net, EmulatedNet):
        net.include_update(session.inner or session.optimizer)
    return None if trial.paced_ms is None else Pace(net, trial.paced_ms / 1000)


def device_step_s(trial: Trial, model: nn.Module) -> float | None:
    """Return the time of a step on the emulated device; None if there is none."""
    if trial.paced_ms is not None:
        return trial.paced_ms / 1000
    net = bare(model)
    if not isinstance(net, EmulatedNet):
        return None
    return net.table.step_ms / 1000 * (trial.batch or net.table.batch) / net.table.batch


def work(
    trial: Trial, workload: Workload, rank: int, world: int, say: Say, wait: Callable[[], None]
) -> None:
    """Run one worker's whole trial."""
    torch.set_num_threads(trial.threads)
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model)
    settings = {"lr": trial.lr, "momentum": trial.momentum}
    for group in optimizer.param_groups:
        group.update({name: value for name, value in settings.items() if value is not None})
    with training(trial.system, model, optimizer) as session:
        loop = Loop(trial, workload, session, rank, world)
        loop.run(trial.warmup)
        session.finish()
        say("ready", None)
        wait()
        loop.compute_s.clear()
        start, used = time.perf_counter(), time.process_time()
        times = loop.run(trial.steps, keep_weights=True)
        session.finish()
        elapsed_s, cpu_s = time.perf_counter() - start, time.process_time() - used
        say("timed", Timing(elapsed_s, cpu_s, times, statistics.median(loop.compute_s)))
        wait()
        say("judged", msgspec.to_builtins(loop.judge()))
        wait()
