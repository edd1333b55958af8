"""This process's place in a job; ``Job.distribute`` is the line that makes a loop data-parallel."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, RuntimeFault, SlipstreamError
from slipstream.planning.choosing import Verdict
from slipstream.planning.costs import Form
from slipstream.planning.table import as_text
from slipstream.runtime.accounts import staleness_text, together
from slipstream.runtime.departure import depart, settle
from slipstream.runtime.environment import Environment
from slipstream.runtime.exchange import rank_of
from slipstream.runtime.joining import Membership
from slipstream.runtime.presence import Presence
from slipstream.runtime.record_file import write_json
from slipstream.runtime.summary import Traffic, WorkerFigures, combine
from slipstream.runtime.telemetry import (
    Prometheus,
    RunLog,
    TensorBoard,
    Watchers,
    reason_of,
    warn,
)
from slipstream.strategy import Plan, Strategy
from slipstream.systems import parse
from slipstream.torch.averages import Averages, lent
from slipstream.torch.copying import copy_state
from slipstream.torch.fingerprint import fingerprint
from slipstream.torch.finite_gradients import FiniteGradients, before_use
from slipstream.torch.inventory import whole_vector
from slipstream.torch.loading import load_job
from slipstream.torch.mean_weights import MeanWeights, by_name_of
from slipstream.torch.replica import Replica, prepare, replicate
from slipstream.torch.sampler import LeasedBatches, in_turn
from slipstream.torch.saving import save_job, save_servers, take_weights
from slipstream.torch.shard_optimizer import AVERAGE
from slipstream.torch.slices import come_back
from slipstream.types import Cluster

DEFAULT_STRATEGY = "push_pull"


def clip_to(norm: float) -> Callable[..., None]:
    """What a worker does to its gradient before it leaves, for a step that is taken alone."""

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(trained, norm)

    return clip


def catch_up(scheduler: Any, steps: int) -> None:
    """For steps that this worker took no part in; torch would warn if it has taken none at all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps):
            scheduler.step()


class Job:
    """This process's place in a training job; use it as a context manager."""

    def __init__(self, env: Environment, membership: Membership | None) -> None:
        self.summary: dict[str, Any] | None = None
        self._env = env
        self._membership = membership
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._label = ""
        self._plan: Plan | None = None
        self._replica: Replica | None = None
        self._watchers = Watchers()
        self._steps_alone = 0
        self._begun = time.monotonic()
        self._samples = 0
        self._latest: dict[str, float] = {}
        self._occasions: Counter[str] = Counter()
        self._resumed_at = 0
        self._back_at = 0
        self._begun_steps = False
        self._sampled = False
        self._own_averages: Averages | None = None
        self._presence = Presence(env.presence_fd)
        if self.world_size > 1 or env.control_fd is not None:
            self._presence.join()

    # ---- who and what

    @property
    def rank(self) -> int:
        return self._env.rank

    @property
    def local_rank(self) -> int:
        return self._env.local_rank

    @property
    def world_size(self) -> int:
        return self._env.world_size

    @property
    def step(self) -> int:
        """Steps completed; rounds committed, where a worker may miss some."""
        if self._replica is None:
            return self._steps_alone
        if self._misses_rounds:
            return self._resumed_at + self._replica.round
        return self._replica.synchronizer.step

    @property
    def _misses_rounds(self) -> bool:
        """Whether rounds are counted by the servers: this worker may not make all of them."""
        if self._replica is None:
            return False
        consistency = self._replica.plan.consistency
        return consistency.agreed or consistency.alone

    def steps(self, total: int, *, scheduler: Any = None) -> Iterator[int]:
        """The steps until ``total`` are completed, by number: ``for step in job.steps(1000):``.

        Where rounds do not need every worker, these are the ones that this worker takes part in,
        and it ends for all of them when ``total`` are committed. A ``scheduler`` that the loop
        steps once a step is stepped for the rounds in between as well.
        """
        expected = 0 if self._just_back else self.step
        while (step := self._next_step()) < total:
            if scheduler is not None:
                catch_up(scheduler, step - expected)
            self._begun_steps = True
            yield step
            expected = step + 1
            if not self._misses_rounds and self.step == step:
                raise RuntimeFault(f"step {step} of job.steps ended without optimizer.step()")

    @property
    def _looping(self) -> bool:
        """Whether the loop has begun; of one that was started again only ``job.steps`` tells."""
        return self._begun_steps or not self._env.life

    @property
    def _just_back(self) -> bool:
        """Whether this worker was started again and has taken no step since: what all workers do
        together before the end of this one, the others have done without it."""
        return bool(self._env.life) and self._own_steps == self._back_at

    def _next_step(self) -> int:
        if self._replica is None or not self._misses_rounds:
            return self.step
        return self._resumed_at + self._replica.open_round()

    def sampler(
        self, dataset: Sized, batch_size: int = 1, *, shuffle: bool = True, seed: int = 0
    ) -> LeasedBatches:
        """Batches of which every one counts once an epoch, for
        ``DataLoader(dataset, batch_sampler=job.sampler(dataset, 32))``.

        Where gradients may be dropped, batches are leased from the whole set and dealt again if
        theirs was. One batch a step; every rank must ask for the same.
        """
        self._distributed("sampler")
        if self._sampled:
            raise ConfigError(
                "job.sampler was called twice: the batches of one data set are dealt to steps; "
                "use a plain DataLoader for others, such as those of an evaluation"
            )
        self._sampled = True
        return LeasedBatches(
            dataset,
            batch_size,
            self._dealer(),
            lambda: self._own_steps,
            workers=self.world_size,
            shuffle=shuffle,
            seed=seed,
        )

    def _dealer(self) -> Callable[[int, int], Batch]:
        """Whoever says which batch is next."""
        if self._replica is not None and not self._replica.plan.together:
            assert self._replica.service is not None
            return self._replica.service.lease
        return in_turn(self.rank, self.world_size, self._back_at)

    @property
    def _own_steps(self) -> int:
        """Steps of this worker, whether they counted or not."""
        if self._replica is None:
            return self._steps_alone
        return self._replica.synchronizer.step - self._resumed_at

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Within, the model has the averaged weights (of a strategy with ``averaged=``)."""
        model, _ = self._distributed("averaged_weights")
        if self.plan.averaged is None:
            raise ConfigError("nothing is averaged: give the strategy averaged=0.9999, or the like")
        self.wait()
        averages = self._averages()
        with self._unchanged(), lent(model, averages):
            yield

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Within, no weights that come unasked are taken."""
        synchronizer = self._replica.synchronizer if self._replica is not None else None
        if synchronizer is None:
            yield
            return
        before, synchronizer.takes_unasked = synchronizer.takes_unasked, False
        try:
            yield
        finally:
            synchronizer.takes_unasked = before

    def _averages(self) -> dict[str, torch.Tensor]:
        """By parameter's name; alone there is no server that keeps them."""
        if self._replica is None or self._replica.server_state is None:
            return self._own_averages.weights if self._own_averages is not None else {}
        fetched = self._replica.server_state.fetch()
        specs = self._replica.plan.specs
        return {specs[i].name: e[AVERAGE] for i, e in fetched.items() if AVERAGE in e}

    @property
    def plan(self) -> Plan:
        """What was decided for every tensor."""
        if self._plan is None:
            raise ConfigError("there is no plan before job.distribute(model, optimizer)")
        return self._plan

    def plan_table(self) -> str:
        """The plan for people: what travels how, layer by layer, and why.

        Layers that choose by their batch are shown as they travel since the last step; before the
        first one they have not chosen.
        """
        verdicts: dict[str, Verdict] = {}
        forms: dict[str, Form] = {}
        compact = self._replica.compact if self._replica is not None else None
        if compact is not None:
            forms = {layer.shape.name: layer.shape.form for layer in compact.layers}
            verdicts = dict(zip(forms, compact.verdicts, strict=False))
        speeds = compact.speeds if compact is not None else None
        return as_text(self.plan.rows(verdicts, speeds, forms))

    # ---- the second line

    def distribute(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model data-parallel: rank 0's weights everywhere, gradients averaged.

        Returns the same module, and an optimizer that loops and schedulers use as before. Without
        a strategy, the one of the command line (or ``SLIPSTREAM_STRATEGY``) is taken.
        """
        if self._model is not None:
            raise ConfigError(
                "job.distribute was called twice: put several models into one nn.ModuleDict"
            )
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"job.distribute takes a model and an optimizer, in this order; it was given a "
                f"{type(model).__name__} and a {type(optimizer).__name__}"
            )
        said = strategy or self._env.strategy or DEFAULT_STRATEGY
        chosen = parse(said) if isinstance(said, str) else said
        self._label = said if isinstance(said, str) else chosen.name
        optimizer = self._take_part(model, optimizer, chosen)
        self._model, self._optimizer = model, optimizer
        self._watch()
        self._begun = time.monotonic()
        return model, optimizer

    def _take_part(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Strategy
    ) -> torch.optim.Optimizer:
        """Set up what the strategy asks for; returns the optimizer that the loop uses."""
        if self._membership is None:
            inventory = prepare(model, optimizer, chosen)
            self._plan = chosen.plan(inventory.specs, Cluster(1, servers=1))
            if self._plan.averaged is not None:
                self._own_averages = Averages(model, self._plan.averaged)
            self._watch_gradients(model, optimizer)
            if self._plan.clip_norm is not None:
                optimizer.register_step_pre_hook(clip_to(self._plan.clip_norm))
            optimizer.register_step_post_hook(self._count_step)
            return optimizer
        self._replica = replicate(model, optimizer, chosen, self._membership)
        self._plan, optimizer = self._replica.plan, self._replica.optimizer
        if self._replica.doorkeeper is not None:
            self._replica.doorkeeper.standing = self._standing
        if self._env.life:
            self._come_back(model, self._replica)
        self._warn_of_momentum(chosen, optimizer)
        return optimizer

    def _watch_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Alone, gradients are looked at when the optimizer is about to use them.

        With "pass" they are not: alone, training runs at the speed of the plain loop.
        """
        if self._env.nonfinite == "pass":
            return
        finite = FiniteGradients(self._env.nonfinite, self.rank)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

        def look() -> None:
            finite.step = self._steps_alone
            finite.clear_refused(named)

        optimizer.register_step_pre_hook(before_use(look))

    def _come_back(self, model: nn.Module, replica: Replica) -> None:
        """Into a job that has gone on without this worker."""
        assert self._membership is not None
        assert replica.partial is not None
        welcome = come_back(model, replica.plan, replica.partial, replica.chain, self._membership)
        self._resumed_at = welcome.standing[0]
        replica.synchronizer.resume(self._resumed_at + welcome.steps)
        self._back_at = self._own_steps
        if self._env.back_fd is not None:
            with os.fdopen(self._env.back_fd, "wb") as launcher:
                launcher.write(b".")

    def _standing(self) -> list[int]:
        """What one that comes back must know."""
        assert self._replica is not None
        return [self._resumed_at, self._replica.chain.sync]

    def _warn_of_momentum(self, chosen: Strategy, optimizer: torch.optim.Optimizer) -> None:
        momentum = max((group.get("momentum") or 0.0) for group in optimizer.param_groups)
        if self.rank == 0 and chosen.consistency.alone and momentum > 0.5:
            warnings.warn(
                f"{chosen.name} with momentum {momentum}: every one of {self.world_size} workers' "
                "gradients is applied by itself, on top of each other's momentum. Divide the "
                "learning rate by the number of workers and take momentum near 0",
                stacklevel=3,
            )

    def _count_step(self, *_: Any) -> None:
        self._steps_alone += 1
        if self._own_averages is not None:
            self._own_averages.follow()

    def accumulate(self) -> AbstractContextManager[None]:
        """Backward passes within only add up locally; the next one outside exchanges the sum."""
        return self._replica.synchronizer.accumulate() if self._replica else nullcontext()

    def wait(self) -> None:
        """Until all weights are up to date; only needed to read one outside of any forward."""
        if self._replica is not None:
            self._replica.synchronizer.wait()

    def flush(self) -> None:
        """Until every worker has every update that any of them has made; every rank must call it.

        Where workers exchange slices (``ako``) they have the same weights then, to the last bit.
        Elsewhere it is ``wait``.
        """
        if self._replica is None or self._replica.partial is None:
            self.wait()
            return
        if self._just_back:
            return
        self._replica.partial.drain()
        self._take_the_first_ones(self._replica, "flushed")

    def _take_the_first_ones(self, replica: Replica, said: str) -> None:
        """All take rank 0's weights. They have all updates alike then, but added in another order;
        and some may have got more than others of one that has died."""
        assert self._membership is not None
        assert self._model is not None
        with replica.chain.opened():
            while True:
                lost = [rank_of(name) for name in self._membership.member.lost]
                replica.chain.among(self._say_all(said, lost, "job.flush")[0])
                self._say_all(said, None, "job.flush")  # everybody knows now whose pieces to take
                copied = copy_state(replica.chain, self._model)
                # Who trains on sends slices, which a copy still under way would overwrite.
                if all(self._say_all(said, copied, "job.flush")):
                    return

    def consensus(self) -> MeanWeights:
        """The mean of all workers' weights and how far apart they are; every rank must call it."""
        model, _ = self._distributed("consensus")
        mean, spread = whole_vector(model), 0.0
        if self._replica is not None and self._replica.consensus and not self._just_back:
            if self._replica.partial is not None:
                self._replica.consensus.meanwhile = self._replica.partial.tend
            found, spread = self._replica.consensus.reach(mean.numpy())
            mean = torch.from_numpy(found)
        return MeanWeights(by_name_of(model, mean), spread)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; every rank must call it.

        For what one rank finds out and all must act on: ``if job.share(accuracy > 0.99): break``.
        The value is plain data: numbers, text, lists, dicts, None.
        """
        if self._membership is None:
            return value
        # All of them: who goes on at once could be seen training by one still on its way.
        return self._say_all("share", value if self.rank == 0 else None, "job.share")[0]

    def _say_all(self, what: str, value: Any, doing: str) -> list[Any]:
        """What every rank says, in order; every rank must call it, as often as the others."""
        assert self._membership is not None
        key = self._occasion(what)
        with self._together(doing):
            return self._membership.gathering.gather(key, value, Any)

    def _occasion(self, what: str) -> str:
        """A name for what all ranks do together now: how often it is done.

        Where a worker may come back, it is counted by steps, since that one has not done all. What
        it does before its loop, the others have done before theirs; and they may end at different
        steps.
        """
        if self._replica is not None and self._replica.partial is not None and what != "ended":
            what = f"{what}/{self.step if self._looping else self._resumed_at}"
        self._occasions[what] += 1
        return f"{what}/{self._occasions[what]}"

    def _together(self, what: str) -> AbstractContextManager[None]:
        """Within, a wait for all ranks ends with an error when some went elsewhere."""
        if self._membership is None:
            return nullcontext()
        watch = self._membership.member.watch_together(what)
        partial = self._replica.partial if self._replica is not None else None

        def look(missing: Sequence[str]) -> None:
            watch(missing)
            if partial is not None:
                partial.tend()

        return self._membership.gathering.watched(look)

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint; every rank must call it, rank 0 writes the file.

        Where workers may miss rounds, what rank 0 writes is all at the servers, and the others'
        calls do nothing.
        """
        model, optimizer = self._distributed("save")
        if self._just_back:
            return
        if self._replica is not None and not self._replica.plan.together:
            if self.rank == 0:
                self.wait()
                step = self._resumed_at if self._replica.plan.consistency.agreed else self.step
                save_servers(Path(path), model, optimizer, self._replica, self._facts(step))
            return
        self.flush()
        with self._together("job.save"):
            self._save(Path(path), model, optimizer)

    def _save(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        save_job(
            path,
            self._occasion("save"),
            model,
            optimizer,
            self._replica,
            self._membership,
            facts=self._facts(self.step),
            averages=self._averages() if self.plan.averaged is not None else {},
        )

    def _facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "strategy": self._named(), "workers": self.world_size}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; every rank must call it, rank 0 reads the file.

        Any number of workers and servers may have written it. Random generators are restored on
        ranks that the writing job had too. A worker that was started again has the others' weights
        already, which are newer: it reads nothing.
        """
        model, optimizer = self._distributed("load")
        if self._just_back:
            return
        if self._own_steps and (not self.plan.together or self.plan.slices is not None):
            raise ConfigError(f"with {self._named()} job.load comes before the first step")
        self.flush()
        occasion = self._occasion("load")
        with self._together("job.load"):
            step = load_job(
                Path(path),
                occasion,
                model,
                optimizer,
                self._replica,
                self._membership,
                self._own_averages,
            )
        if self._replica is None:
            self._steps_alone = step
        else:
            self._resumed_at = step
            self._replica.synchronizer.resume(step)

    def _distributed(self, doing: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self._model is None or self._optimizer is None:
            raise ConfigError(f"job.{doing} comes after job.distribute(model, optimizer)")
        return self._model, self._optimizer

    # ---- figures

    def record(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        accuracy: float | torch.Tensor | None = None,
        samples: int = 0,
        **figures: float,
    ) -> None:
        """Note figures of this step for the summary, the run log and whoever watches."""
        self._samples += samples
        given = {"loss": loss, "accuracy": accuracy, **figures}
        now = {key: number(key, value) for key, value in given.items() if value is not None}
        self._latest.update(now)
        if self._watchers:
            traffic = self._traffic()
            now |= {
                "samples": self._samples,
                "sent_bytes": traffic.sent,
                "received_bytes": traffic.received,
                "wait_s": self._wait_s(),
            }
            self._watchers.note(self.step, now)

    def stats(self) -> dict[str, Any]:
        """This worker's figures so far; the summary at the end holds all workers'."""
        return combine([self._figures()]) | self._accounts()

    def staleness_table(self) -> str:
        """How many updates old gradients were when they were applied, layer by layer."""
        return staleness_text(self._accounts().get("staleness", {}))

    def _accounts(self) -> dict[str, Any]:
        """What servers can tell of rounds and of gradients' age."""
        if self._replica is not None and self._replica.partial is not None:
            return {"slices": self._replica.partial.account()}
        if self._replica is None or self._replica.service is None:
            return {}
        return together(self._replica.service.accounts())

    def _figures(self) -> WorkerFigures:
        self.wait()  # the fingerprint is of weights that are up to date
        return WorkerFigures(
            strategy=self._named(),
            workers=self.world_size,
            servers=self._plan.cluster.servers if self._plan and self._replica else 0,
            steps=self.step,
            wall_s=time.monotonic() - self._begun,
            samples=self._samples,
            loss=self._latest.get("loss"),
            accuracy=self._latest.get("accuracy"),
            weights_sha256=fingerprint(self._model) if self._model is not None else None,
            traffic=self._traffic(),
            wait_s=self._wait_s(),
            faults={"refused_frames": self._refused()},
        )

    def _named(self) -> str:
        return self._label

    def _wait_s(self) -> float:
        return self._replica.synchronizer.wait_s if self._replica else 0.0

    def _refused(self) -> int:
        if self._membership is None:
            return 0
        return self._membership.member.refused + sum(self._membership.transport.refused.values())

    def _traffic(self) -> Traffic:
        if self._replica is None or self._membership is None:
            return Traffic()
        sent, received = self._replica.bytes()
        transport = self._membership.transport
        beside = self._replica.shards.beside
        moved = transport.sent + transport.received
        local = sum(moved[peer] for peer in beside)
        by_links = sum(
            exchange.sent.total() + exchange.received.total()
            for exchange in (*self._replica.link_exchanges, self._replica.partial)
            if exchange is not None
        )
        return Traffic(
            sent=sent.total(),
            received=received.total(),
            local=local,
            control=moved.total() - local - by_links,
            by_scheme=dict(sent + received),
        )

    def _watch(self) -> None:
        if self.rank != 0:
            return
        log, board, port = self._env.log, self._env.tensorboard, self._env.prometheus
        again = self._env.started_again
        if log is not None:
            header = {"strategy": self._named(), "workers": self.world_size}
            self._watchers.add(lambda: RunLog(log, header, self._env.life), training=again)
        if board is not None:
            self._watchers.add(lambda: TensorBoard(board), training=again)
        if port is not None:
            self._watchers.add(lambda: Prometheus(port), training=again)

    # ---- the end

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit) and not error.code:
            error = None
        try:
            if error is None:
                self.wait()
                self.summary = self._finish()
                self._presence.leave()
        except BaseException as late:
            error = late
            raise
        finally:
            self._close(error)

    def _finish(self) -> dict[str, Any] | None:
        if self._model is None and self.world_size > 1 and self.rank == 0:
            warnings.warn(
                "job.distribute was never called: every worker trained on its own", stacklevel=3
            )
        self._end_together()
        own = self._figures()
        if self._membership is None:
            summary = combine([own])
        else:
            accounts = self._accounts() if self.rank == 0 else {}
            self._warn_of_dropped(accounts)
            others = depart(self._membership, own.encode())
            if self.rank != 0:
                return None
            summary = combine([own, *(WorkerFigures.decode(content) for content in others)])
            summary |= accounts
            for event in ("rounds", "staleness"):
                if event in accounts:
                    self._watchers.tell(event, accounts[event])
        return self._publish_summary(summary)

    def _publish_summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        if self._env.json is not None:
            try:
                write_json(self._env.json, summary)
            except OSError as error:
                # The model is trained: what is left to do is not to lose the figures.
                warn(
                    f"the figures cannot be written to {self._env.json} ({reason_of(error)}); "
                    f"here they are:\n{json.dumps(summary)}"
                )
        return summary

    def _warn_of_dropped(self, accounts: Mapping[str, Any]) -> None:
        rounds = accounts.get("rounds")
        if rounds is None or self._sampled:
            return
        made, dropped = rounds["made"], rounds["dropped"]
        for rank, number in sorted(dropped.items()):
            if number > made.get(rank, 0):
                warnings.warn(
                    f"{number} of rank {rank}'s {number + made.get(rank, 0)} gradients came too "
                    "late to count: if data are dealt by rank (DistributedSampler), most of its "
                    "samples were never learnt from; job.sampler(dataset) deals them to whoever "
                    "is in time",
                    stacklevel=4,
                )

    def _end_together(self) -> None:
        """Where workers end at different times, all take the last weights."""
        if self._replica is None or self._membership is None or self._model is None:
            return
        replica, membership, model = self._replica, self._membership, self._model
        if replica.partial is not None:
            replica.partial.drain(final=True)
            self._take_the_first_ones(replica, "ended")
        if replica.plan.together:
            return
        for exchange in replica.link_exchanges:
            exchange.drain()
        replica.shards.retire(self.rank, membership.member)
        with replica.chain.opened():
            complete = settle(membership)
            if self.rank == 0 or not complete:
                take_weights(model, replica)
            if complete:
                copy_state(replica.chain, model)

    def _close(self, error: BaseException | None) -> None:
        self._watchers.close()
        if self._membership is not None:
            if error is not None:
                # Rank 0 says what slipstream has to say, see ``last_words``.
                told = isinstance(error, SlipstreamError)
                self._membership.member.abandon(describe_error(error), told=told)
            self._membership.member.stop()
            self._membership.close_store()
            if self._replica is not None:
                self._replica.close()


def number(name: str, value: float | torch.Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"job.record({name}={value!r}): give one number") from error


def describe_error(error: BaseException) -> str:
    """One line that the other ranks will show."""
    if isinstance(error, SlipstreamError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"{type(error).__name__}: {error}".strip()[:2000]
