"""An optimizer's state for shared weights, and their update from a slot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from slipstream._native import Update
from slipstream.errors import CheckpointError
from slipstream.planning.segment import RULES, SegmentPlan, SharedTensor
from slipstream.runtime.files.checkpoint_format import MOST_STEPS, Piece

# torch's names of an optimizer's state tensors; the number is the native update's.
MEMORIES = {
    "sgd": (("momentum_buffer", 0),),
    "adam": (("exp_avg", 0), ("exp_avg_sq", 1)),
    "rmsprop": (("square_avg", 0), ("momentum_buffer", 1), ("grad_avg", 2)),
    "adagrad": (("sum", 0),),
}
MOMENTUM = {"sgd": 1, "rmsprop": 4}  # its index in a group's settings
OPTIONAL = ("momentum_buffer", "grad_avg")  # kept only with some settings
CENTERED = 5
INITIAL_SUM = 4  # Adagrad's, in a group's settings
STATE = "optimizer/state"


class SharedOptimizer:
    """Its state has the same layout as the weights."""

    def __init__(
        self, plan: SegmentPlan, optimizer: str, settings: Sequence[Sequence[float]]
    ) -> None:
        self._plan, self._settings = plan, settings
        self._rule = RULES[optimizer]
        self._update = Update(self._rule, plan.places(), plan.groups)
        # Zeros that are never written need no memory.
        self._moments = [np.zeros(plan.weights_nbytes, np.uint8) for _ in range(3)]
        self._steps = np.zeros(max(1, len(plan.gradients)), np.uint64)
        self._begin()

    def _begin(self) -> None:
        """Set what does not begin at zero."""
        for gradient in self._plan.gradients if self._rule == "adagrad" else ():
            tensor = self._plan.tensors[gradient.tensor]
            if initial := self._settings[tensor.group][INITIAL_SUM]:
                at = self._plan.weights_at[gradient.tensor]
                self._moments[0][at : at + tensor.nbytes].view(tensor.dtype)[:] = initial

    def apply(self, weights: memoryview, slot: memoryview) -> None:
        """Apply a slot; raises ValueError if the slot is invalid, before anything changes."""
        self._update.apply(weights, slot, self._moments, self._steps)

    def pieces(self) -> dict[str, dict[str, Piece]]:
        """The state, by parameter and by torch's name for it."""
        found: dict[str, dict[str, Piece]] = {}
        for number, gradient in enumerate(self._plan.gradients):
            tensor = self._plan.tensors[gradient.tensor]
            if not self._steps[number] and self._rule != "adagrad":
                continue  # torch's Adagrad has state from the start
            at = self._plan.weights_at[gradient.tensor]
            entries = found.setdefault(tensor.name, {})
            for name, k in self._used():
                data = self._moments[k][at : at + tensor.nbytes].tobytes()
                entries[name] = Piece(tensor.dtype, tensor.shape, data)
            if self._rule != "sgd":
                entries["step"] = Piece("float32", (), np.float32(self._steps[number]).tobytes())
        return {name: entries for name, entries in found.items() if entries}

    def check(self, state: Mapping[str, Mapping[str, Piece]]) -> None:
        """Refuse state that ``load`` could not use."""
        here = {tensor.name: tensor for tensor in self._plan.tensors}
        for name, entries in state.items():
            if name not in here:
                raise CheckpointError(f"it has optimizer state of {name!r}, not in the model")
            for memory, _ in MEMORIES[self._rule]:
                if memory in entries:
                    fits(entries[memory], here[name], f"{memory} of {name!r}")
                elif entries and memory not in OPTIONAL:
                    raise CheckpointError(f"{name!r} has optimizer state, but no {memory}")
            if "step" in entries:
                steps_in(entries["step"], name)
            elif entries and self._rule != "sgd":
                raise CheckpointError(f"{name!r} has optimizer state, but no step")

    def load(self, state: Mapping[str, Mapping[str, Piece]]) -> None:
        """Load state that has passed ``check``."""
        for moment in self._moments:
            if moment.any():
                moment[:] = 0
        self._steps[:] = 0
        self._begin()
        for number, gradient in enumerate(self._plan.gradients):
            tensor = self._plan.tensors[gradient.tensor]
            entries = state.get(tensor.name, {})
            at = self._plan.weights_at[gradient.tensor]
            for name, k in self._used():
                if name in entries:
                    data = np.frombuffer(entries[name].data, np.uint8)
                    self._moments[k][at : at + tensor.nbytes] = data
                    self._steps[number] = 1
            if "step" in entries:
                self._steps[number] = steps_in(entries["step"], tensor.name)

    def _used(self) -> list[tuple[str, int]]:
        return [(name, k) for name, k in MEMORIES[self._rule] if self._remembers(name)]

    def _remembers(self, name: str) -> bool:
        if name == "momentum_buffer":
            return any(group[MOMENTUM[self._rule]] for group in self._settings)
        return name != "grad_avg" or any(group[CENTERED] for group in self._settings)


def fits(piece: Piece, tensor: SharedTensor, name: str) -> None:
    """Raise CheckpointError unless a tensor has the shape and dtype that it should."""
    if piece.shape != tensor.shape or piece.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name} is {piece.shape} {piece.dtype} in the checkpoint, {tensor.shape} "
            f"{tensor.dtype} in the model"
        )


def steps_in(piece: Piece, name: str) -> int:
    """A parameter's number of steps, which torch keeps as a tensor."""
    if piece.dtype in ("float32", "float64", "int64") and math.prod(piece.shape) == 1:
        steps = np.frombuffer(piece.data, piece.dtype)[0]
        if 0 <= steps <= MOST_STEPS:  # false for NaN
            return int(steps)
    raise CheckpointError(f"'step' of {name!r} is no number of steps")
