"""The layout of the memory that the processes of one machine share. Pure.

All tensors of a model are stored together as its weights. A slot holds a gradient of each trained
tensor. Before the gradients it has a word with the form of each, the optimizer's settings, and the
version of the weights from which they were computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ABSENT, DENSE, ROWS = 0, 1, 2  # ROWS + n: n rows are not zero
SETTINGS = 8  # numbers per parameter group
WORD = 8
LINE = 64  # data of different writers begins on separate cache lines
FROZEN = -1


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor of the model, as it must be on every learner."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    group: int = FROZEN  # of the optimizer; FROZEN: no gradient
    in_rows: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.item_bytes

    @property
    def trained(self) -> bool:
        return self.group != FROZEN


@dataclass(frozen=True, slots=True)
class Gradient:
    """The place of a trained tensor's gradient in a slot, in bytes from its start."""

    tensor: int
    at: int
    numbers_at: int
    width: int  # values in a row; 0 if it is never sent as rows


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Offsets in bytes: of tensors within the weights, and of gradients within a slot."""

    tensors: tuple[SharedTensor, ...]
    weights_at: tuple[int, ...]
    weights_nbytes: int
    gradients: tuple[Gradient, ...]
    groups: int
    settings_at: int
    version_at: int
    slot_nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[SharedTensor], groups: int) -> SegmentPlan:
        weights = Ledger()
        weights_at = tuple(weights.place(tensor.nbytes) for tensor in tensors)
        trained = [i for i, tensor in enumerate(tensors) if tensor.trained]
        front = Ledger()
        front.place(len(trained) * WORD, unit=WORD)
        settings_at = front.place(groups * SETTINGS * WORD, unit=WORD)
        version_at = front.place(WORD, unit=WORD)
        gradients = []
        for i in trained:
            tensor = tensors[i]
            width = tensor.shape[-1] if tensor.in_rows else 0
            numbers = tensor.numel // width * WORD if width else 0
            numbers_at = front.place(numbers) if width else 0
            gradients.append(Gradient(i, front.place(tensor.nbytes), numbers_at, width))
        return cls(
            tuple(tensors),
            weights_at,
            weights.nbytes,
            tuple(gradients),
            groups,
            settings_at,
            version_at,
            front.nbytes,
        )

    def places(self) -> list[tuple[int, int, int, int, int, int, bool]]:
        """Return the description of each gradient that ``_native.Update`` takes."""
        return [
            (
                self.weights_at[gradient.tensor],
                gradient.at,
                gradient.numbers_at,
                self.tensors[gradient.tensor].numel,
                gradient.width,
                self.tensors[gradient.tensor].group,
                self.tensors[gradient.tensor].dtype == "float64",
            )
            for gradient in self.gradients
        ]


class Ledger:
    """Offsets assigned one after the other, each a multiple of its unit."""

    def __init__(self) -> None:
        self._end = 0

    def place(self, nbytes: int, unit: int = LINE) -> int:
        at = -(-self._end // unit) * unit
        self._end = at + nbytes
        return at

    @property
    def nbytes(self) -> int:
        return max(LINE, -(-self._end // LINE) * LINE)


# ---- an optimizer's settings, as the numbers that its rule reads

RULES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "RMSprop": "rmsprop", "Adagrad": "adagrad"}

_READ = {
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "adam": ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize"),
    "rmsprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "adagrad": ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"),
}

# Their names in a group.
SET = (
    "lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "betas", "eps", "alpha",
    "centered", "decoupled_weight_decay", "lr_decay", "initial_accumulator_value",
)  # fmt: skip


def settings_vector(optimizer: str, settings: dict[str, object]) -> list[float]:
    """Return one group's settings in the order of its rule."""
    values = dict(settings)
    betas = values.pop("betas", None)
    if isinstance(betas, Iterable):
        values["beta1"], values["beta2"] = betas
    values["decoupled"] = optimizer == "AdamW" or bool(values.get("decoupled_weight_decay"))
    numbers = [float(values.get(name) or 0.0) for name in _READ[RULES[optimizer]]]  # type: ignore[arg-type]
    return numbers + [0.0] * (SETTINGS - len(numbers))
