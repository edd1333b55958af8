"""An optimizer's memories beside shared weights, and their update from a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream._native import Update
from slipstream.errors import CheckpointError
from slipstream.planning.segment import RULES, SegmentPlan, SharedTensor
from slipstream.runtime.shared_checkpoint import Piece

# What torch calls an optimizer's memories; the number is the native update's.
MEMORIES = {
    "sgd": (("momentum_buffer", 0),),
    "adam": (("exp_avg", 0), ("exp_avg_sq", 1)),
    "rmsprop": (("square_avg", 0), ("momentum_buffer", 1), ("grad_avg", 2)),
}
MOMENTUM = {"sgd": 1, "rmsprop": 4}  # where it is in a group's settings
CENTERED = 5
STATE = "optimizer/state"


class SharedOptimizer:
    """Its memories are laid out as the weights are."""

    def __init__(
        self, plan: SegmentPlan, optimizer: str, settings: Sequence[Sequence[float]]
    ) -> None:
        self._plan, self._settings = plan, settings
        self._rule = RULES[optimizer]
        self._update = Update(self._rule, plan.places(), plan.groups)
        # Zeros that are never written take no memory.
        self._moments = [np.zeros(plan.weights_nbytes, np.uint8) for _ in range(3)]
        self._steps = np.zeros(max(1, len(plan.gradients)), np.uint64)

    def apply(self, weights: memoryview, slot: memoryview) -> None:
        """ValueError if the slot does not fit; then nothing has changed."""
        self._update.apply(weights, slot, self._moments, self._steps)

    def pieces(self) -> dict[str, dict[str, Piece]]:
        """What there is to remember, by parameter and by torch's name for it."""
        found: dict[str, dict[str, Piece]] = {}
        for number, gradient in enumerate(self._plan.gradients):
            tensor = self._plan.tensors[gradient.tensor]
            if not self._steps[number]:
                continue
            at = self._plan.weights_at[gradient.tensor]
            entries = found.setdefault(tensor.name, {})
            for name, k in self._used():
                data = self._moments[k][at : at + tensor.nbytes].tobytes()
                entries[name] = Piece(tensor.dtype, tensor.shape, data)
            if self._rule != "sgd":
                entries["step"] = Piece("float32", (), np.float32(self._steps[number]).tobytes())
        return {name: entries for name, entries in found.items() if entries}

    def load(self, state: Mapping[str, Mapping[str, Piece]]) -> None:
        for moment in self._moments:
            if moment.any():
                moment[:] = 0
        self._steps[:] = 0
        for number, gradient in enumerate(self._plan.gradients):
            tensor = self._plan.tensors[gradient.tensor]
            entries = state.get(tensor.name, {})
            at = self._plan.weights_at[gradient.tensor]
            for name, k in self._used():
                if name in entries:
                    fits(entries[name], tensor, f"{name} of {tensor.name!r}")
                    data = np.frombuffer(entries[name].data, np.uint8)
                    self._moments[k][at : at + tensor.nbytes] = data
                    self._steps[number] = 1
            if "step" in entries:
                self._steps[number] = int(np.frombuffer(entries["step"].data, np.float32)[0])

    def _used(self) -> list[tuple[str, int]]:
        return [(name, k) for name, k in MEMORIES[self._rule] if self._remembers(name)]

    def _remembers(self, name: str) -> bool:
        if name == "momentum_buffer":
            return any(group[MOMENTUM[self._rule]] for group in self._settings)
        return name != "grad_avg" or any(group[CENTERED] for group in self._settings)


def fits(piece: Piece, tensor: SharedTensor, name: str) -> None:
    if piece.shape != tensor.shape or piece.dtype != tensor.dtype:
        raise CheckpointError(
            f"{name} is {piece.shape} {piece.dtype} in the checkpoint, {tensor.shape} "
            f"{tensor.dtype} in the model"
        )
