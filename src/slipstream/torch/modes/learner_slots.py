"""One learner's slots of shared memory, as tensors."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream._native import Rings, add_rows, largest
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SETTINGS, WORD, Gradient, SegmentPlan
from slipstream.torch.modes.shared_weights import Settings, view_of
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import (
    groups_of,
    is_constant,
    unexpected_gradient,
    unheld_gradient,
)
from slipstream.transports.shared_memory import SharedMemory


class Slot:
    """One slot as tensors: a view for each gradient, and their description."""

    def __init__(self, memory: SharedMemory, at: int, plan: SegmentPlan) -> None:
        raw = memory.view(at, plan.slot_nbytes)
        self.whole = raw
        words = f"{len(plan.gradients)}Q{plan.groups * SETTINGS}dQ"
        self._front = struct.Struct(f"={words}")
        assert self._front.size == plan.version_at + WORD
        self.version = 0
        self.filled_nbytes = 0  # bytes of gradients, whole or in rows
        trained = [plan.tensors[gradient.tensor] for gradient in plan.gradients]
        self._whole_nbytes = [tensor.nbytes for tensor in trained]
        self._row_nbytes = [
            gradient.width * tensor.item_bytes
            for gradient, tensor in zip(plan.gradients, trained, strict=True)
        ]
        self.gradients = [
            view_of(memory, at + gradient.at, tensor.shape, getattr(torch, tensor.dtype))
            for gradient in plan.gradients
            for tensor in [plan.tensors[gradient.tensor]]
        ]
        self.numbers = [
            view_of(memory, at + gradient.numbers_at, (rows_of(plan, gradient),), torch.int64)
            for gradient in plan.gradients
        ]
        self._arrays = [view.numpy() for view in self.gradients]
        self._number_arrays = [numbers.numpy() for numbers in self.numbers]
        # Of gradients in rows: how many of ``numbers`` name nonzero rows, and at which version.
        # Applying rows sets them to zero again. None: any row may be nonzero, as another learner
        # may have used the slot.
        self.written: list[tuple[int, int] | None] = [None for _ in plan.gradients]

    def magnitude(self, index: int, form: int) -> float:
        """The largest magnitude of a gradient in this slot; infinite or NaN if any value is."""
        values = self._arrays[index]
        if form >= ROWS:
            values = values[self._number_arrays[index][: form - ROWS]]
        return largest(values, values.dtype.name)

    @property
    def front(self) -> tuple[list[int], list[float], int]:
        """What ``describe`` has stored."""
        told = self._front.unpack_from(self.whole)
        count = len(self.gradients)
        return list(told[:count]), list(told[count:-1]), told[-1]

    def add_rows(self, index: int, sparse: Tensor) -> int:
        """Add rows to a zero gradient; returns how many of ``numbers`` name its rows."""
        array, numbers = self._arrays[index], self._number_arrays[index]
        rows = sparse.coalesce() if sparse._nnz() > numbers.size else sparse
        ids = rows._indices().contiguous().numpy()
        values = rows._values().detach().contiguous().numpy()
        add_rows(array, numbers, ids, values, array.shape[1], array.itemsize == WORD)
        return int(ids.size)

    def place(self, index: int, gradient: Tensor | None) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """The form of a gradient, and the copies that bring it into this slot."""
        if gradient is None:
            return ABSENT, []
        if gradient.is_sparse and len(self.numbers[index]):
            self.clean(index)
            rows = self.add_rows(index, gradient.cpu())
            self.note(index, 0)
            return ROWS + rows, []
        self.written[index] = None
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        return DENSE, [(self.gradients[index], whole)]

    def clean(self, index: int) -> Tensor:
        """A view for a gradient in rows, all zeros."""
        view, written = self.gradients[index], self.written[index]
        if written is None or written[1] != view._version:
            view.zero_()
        elif written[0]:
            view.index_fill_(0, self.numbers[index][: written[0]], 0.0)
        return view

    def describe(self, forms: Sequence[int], settings: Sequence[float], version: int) -> None:
        """Store the form of each gradient, the optimizer's settings, and the version of the weights
        from which the gradients were computed."""
        self._front.pack_into(self.whole, 0, *forms, *settings, version)
        self.version = version
        nbytes = 0
        for form, whole, row in zip(forms, self._whole_nbytes, self._row_nbytes, strict=True):
            if form == DENSE:
                nbytes += whole
            elif form >= ROWS:
                nbytes += (form - ROWS) * row
        self.filled_nbytes = nbytes

    def note(self, index: int, rows: int) -> int:
        """Record that a gradient is zero except for the first ``rows`` of ``numbers``, as long as
        its version does not change; returns the version."""
        version = self.gradients[index]._version
        self.written[index] = (rows, version)
        return version


class SlotWriter:
    """Fills this learner's slots: reserves one, checks its content, and passes it on.

    Args:
        slots: All slots of this learner.
        reserve: Waits for a free slot; returns its number.
        deliver: Called with each full slot.
        version: The version of the shared weights.

    Attributes:
        names: Of the trained parameters.
        parameters: The trained ones, in the order of the slots' gradients.
        settings: Returns the optimizer's settings in the slots' format.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: SegmentPlan,
        slots: Sequence[Slot],
        *,
        reserve: Callable[[], int],
        deliver: Callable[[Slot], None],
        version: Callable[[], int],
        finite: FiniteGradients | None = None,
    ) -> None:
        self.names = [plan.tensors[gradient.tensor].name for gradient in plan.gradients]
        named = dict(model.named_parameters())
        self.parameters: list[Tensor] = [named[name] for name in self.names]
        self.settings, self.version = Settings(optimizer), version
        known = {id(parameter) for parameter in self.parameters}
        self._untracked = [
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in known
        ]
        self.constant = list(filter(is_constant(model), self.parameters))
        held = groups_of(optimizer)
        self._unheld = [(name, p) for name, p in named.items() if id(p) not in held]
        self._slots, self._reserve, self._deliver = slots, reserve, deliver
        self._finite = finite or FiniteGradients()

    def refuse_untracked(self) -> None:
        """Refuse gradients for which slots have no space.

        Raises:
            RuntimeFault: A parameter trains that was frozen when the memory was laid out, or that
                the optimizer does not hold.
        """
        for parameter in self._untracked:
            if parameter.grad is not None:
                raise unexpected_gradient(parameter)
        for name, parameter in self._unheld:
            if parameter.requires_grad and parameter.grad is not None:
                raise unheld_gradient(name)

    def next(self) -> Slot:
        return self._slots[self._reserve()]

    def examine(self, slot: Slot, forms: list[int], step: int) -> None:
        """Remove non-finite gradients that do not count from a slot.

        Raises:
            NonFiniteGradient: There is one, and the job is set to stop then.
        """
        self._finite.step = step
        for index, (form, name) in enumerate(zip(forms, self.names, strict=True)):
            if form != ABSENT and not self._finite.admits(name, slot.magnitude(index, form)):
                forms[index] = ABSENT
                slot.written[index] = None  # it is not applied, so its rows are not set to zero

    def deliver(
        self, slot: Slot, forms: Sequence[int], settings: Sequence[float], version: int
    ) -> None:
        """Pass on a full slot.

        Args:
            version: Of the weights from which the gradients were computed.
        """
        slot.describe(forms, settings, version)
        self._deliver(slot)


class FirstGradient:
    """Notices the first gradient of any of these parameters, and costs nothing afterwards.

    Attributes:
        seen: Whether there was one.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.seen = False
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note) for parameter in parameters
        ]

    def _note(self, _: Tensor) -> None:
        self.seen = True
        while self._handles:
            self._handles.pop().remove()


def slots_of(memory: SharedMemory, rings: Rings, plan: SegmentPlan, learner: int) -> list[Slot]:
    return [Slot(memory, rings.slot_at(learner, slot), plan) for slot in range(rings.slots)]


def rows_of(plan: SegmentPlan, gradient: Gradient) -> int:
    tensor = plan.tensors[gradient.tensor]
    return tensor.numel // gradient.width if gradient.width else 0
