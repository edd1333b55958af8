"""The state of an optimizer that the server of shared weights runs, for ``optimizer.state_dict``.

It travels in files of the format of ``job.save``, because the server writes and reads these.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from slipstream.errors import ConfigError
from slipstream.runtime.files.checkpoint_format import optimizer_in
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.torch.capture.remote_optimizer import State
from slipstream.torch.checkpoints.checkpoint import Checkpoint, piece_of
from slipstream.torch.checkpoints.server_state import as_tensors
from slipstream.torch.checkpoints.training_state import (
    SharedState,
    TrainingState,
    optimizer_state,
    with_models,
)
from slipstream.torch.modes.learner import Learner
from slipstream.torch.optimizers.shard_optimizer import tensor_of
from slipstream.torch.tensors.pairs import Pair


class LearnerState:
    """At the server, or in this learner where it updates by itself; implements ``StateKeeper``."""

    def __init__(self, pair: Pair, learner: Learner, line: LauncherLine) -> None:
        self._pair, self._learner, self._line = pair, learner, line
        self._taken = 0  # how often ``take`` was called

    def fetch(self) -> State:
        self._learner.wait()
        if (own := self._learner.own) is not None:
            return {
                name: {
                    entry: tensor_of(piece.data, getattr(torch, piece.dtype)).reshape(piece.shape)
                    for entry, piece in entries.items()
                }
                for name, entries in own.pieces().items()
            }
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            path = Path(folder) / "state.safetensors"
            self._line.save(str(path))
            found = Checkpoint.read(path)
        return optimizer_in(found.facts, found.tensors).state

    def take(self, state: State) -> None:
        """All learners take the same state, before training begins; the first one's counts. It is
        not taken again by a learner that was started again.

        Raises:
            ConfigError: This learner has begun to train.
        """
        if self._learner.steps:
            raise ConfigError(
                "learners share weights and do not wait for each other: optimizer.load_state_dict "
                "comes before the first step"
            )
        tensors = as_tensors(state)
        if (own := self._learner.own) is not None:
            own.load({n: {k: piece_of(t) for k, t in each.items()} for n, each in tensors.items()})
            if not self._learner.rings.version:  # else this learner was started again
                self._learner.weights.fill()
        else:
            self._load(tensors)
        self._learner.begin_anew()

    def _load(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Have the server load this model's weights and this state."""
        self._taken += 1
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            path = Path(folder) / "state.safetensors"
            entries = {name: dict(each) for name, each in state.items()}
            optimizer = optimizer_state(self._pair.optimizer, entries)
            shared = SharedState(optimizer, step=self._learner.rings.version)
            facts = {"strategy": "gadei", "workers": 1}
            TrainingState(facts, with_models([self._pair], [shared])).write(path)
            # The launcher has all learners load one file, the first one's.
            chosen = str(self._line.share(f"optimizer state/{self._taken}", str(path)))
            self._line.load(chosen, takes_nonfinite=True)
