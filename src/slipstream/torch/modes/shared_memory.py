"""Learners on one machine, with weights in shared memory (GaDei)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError, RuntimeFault
from slipstream.plan import Plan
from slipstream.planning.table import as_text
from slipstream.runtime.figures.summary import Traffic, TrainingFigures
from slipstream.runtime.servers.accounts import ServerFigures, merge_figures
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.runtime.shared_memory.messages import Account
from slipstream.torch.capture.step_watch import never_stepped
from slipstream.torch.modes.carried_updates import CarriedUpdates
from slipstream.torch.modes.learner import Learner
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.tensors.pairs import Pair


class SharedMemoryMode(TrainingMode):
    """Steps are updates of the shared weights by any learner.

    Args:
        pair: The model, and the optimizer that the loop uses.
        name: The strategy's, in messages.
        call: The call that makes it, in messages.
        plan: The decisions for its tensors.
        learner: Shares the weights, and hands over gradients.
        line: The connection to the launcher.
    """

    def __init__(
        self, pair: Pair, name: str, call: str, plan: Plan, learner: Learner, line: LauncherLine
    ) -> None:
        self.pairs, self.plans = (pair,), (plan,)
        self._name, self._call = name, call
        self._learner, self._line = learner, line

    @property
    def committed(self) -> int:
        return self._learner.rings.version

    @property
    def own_steps(self) -> int:
        return self._learner.steps

    @property
    def rejoined(self) -> bool:
        """The weights may have many updates without this learner, also from before the job."""
        return self.own_steps == 0

    def end_step(self, step: int) -> None:
        """A pass of the loop need not make a step: other learners make steps too."""

    def wait(self) -> None:
        """Wait until this learner's gradients are applied."""
        self._learner.wait()

    @contextmanager
    def frozen(self, block: str) -> Iterator[None]:
        """Keep the model as it is; without copies nobody else changes it."""
        updates = self._learner.updates
        apart = updates.keeping_apart() if isinstance(updates, CarriedUpdates) else nullcontext()
        with apart, super().frozen(block):
            yield

    def lease(self, batches: int, returned: int) -> Batch:
        return Batch(*self._line.lease(batches, returned))

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """The server writes its state; only rank 0's call counts."""
        if self._learner.rank == 0:
            self.wait()
            self._line.save(str(path.absolute()))

    def load(self, path: Path, *, takes_nonfinite: bool) -> None:
        """Load before the first step; the call of one learner counts."""
        if self.own_steps:
            raise ConfigError(f"with {self._name} job.load comes before the first step")
        self._line.load(str(path.absolute()), takes_nonfinite=takes_nonfinite)
        self._learner.begin_anew()

    def plan_table(self) -> str:
        """Of embeddings only used rows are written, where backward can write them."""
        in_rows = self._learner.in_rows
        rows = [
            replace(row, scheme="rows/memory", why="used rows only")
            if row.name in in_rows
            else replace(row, scheme="dense/memory")
            for row in self.plans[0].rows({})
        ]
        return as_text(rows)

    def figures(self) -> TrainingFigures:
        """Gradients went through memory; nothing was sent."""
        moved = self._learner.moved
        traffic = Traffic(sent=moved, local=moved, by_scheme={"dense/memory": moved})
        return TrainingFigures(traffic=traffic, wait_s=self._learner.wait_s)

    def finish(self) -> None:
        if self.own_steps == 0 and self._learner.had_gradients:
            raise RuntimeFault(never_stepped(self._call, over=True))
        self.wait()
        self._line.end_training(self._learner.progress)
        self._learner.take_last()

    def accounts(self) -> dict[str, Any]:
        return as_accounts(self._line.account(), self._learner.ages)


def as_accounts(account: Account, own: Counter[int]) -> dict[str, Any]:
    """An account in the format of the other systems' servers."""
    ages = Counter(account.staleness) + own
    figures = ServerFigures({"all tensors": dict(ages)} if ages else {}, [])
    found = merge_figures([figures]) | {"checkpoints": account.checkpoints}
    if account.refused:
        found["refused_by_servers"] = {"messages": account.refused}
    return found
