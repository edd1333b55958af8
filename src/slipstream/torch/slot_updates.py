"""A learner's gradients, written into slots of shared memory as backward makes them.

Backward writes the gradient of a large fully connected layer straight into the slot, and of an
embedding only the rows that were used: the rest stays zero from step to step, and the slot says
which rows there are. ``.grad`` is a view of the slot then, whole and dense: clipping and
accumulation work on it as on any gradient. Others are copied, all at once, when the step ends.

When the step ends, the slot is given away, and with it the gradients: ``.grad`` is None then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream._native import Rings, add_rows, largest
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SETTINGS, WORD, Gradient, SegmentPlan
from slipstream.torch.compact_layers import (
    CompactLayer,
    Ports,
    capture,
    named_forms,
    shape_of,
)
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.inventory import unexpected_gradient
from slipstream.torch.shared_weights import Settings, view_of
from slipstream.transports.shared_memory import SharedMemory

# Below, a copy costs less than a layer's own way through autograd.
LEAST_FACTORS = 1 << 16


class Slot:
    """One slot as tensors: a view for each gradient, and what is said of them."""

    def __init__(self, memory: SharedMemory, at: int, plan: SegmentPlan) -> None:
        raw = memory.view(at, plan.slot_nbytes)
        self.whole = raw
        words = f"{len(plan.gradients)}Q{plan.groups * SETTINGS}dQ"
        self._front = struct.Struct(f"={words}")
        assert self._front.size == plan.version_at + WORD
        self.version = 0
        self.filled_nbytes = 0  # what there is of gradients, whole or in rows
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
        # Of gradients in rows: how many of ``numbers`` name rows that are not zero, and when that
        # was so; whoever applies rows leaves zeros there. None: it may be anywhere, as another
        # learner may have had the slot.
        self.written: list[tuple[int, int] | None] = [None for _ in plan.gradients]

    def magnitude(self, index: int, form: int) -> float:
        """The largest of a gradient that is here; infinite or NaN if there is such a value."""
        values = self._arrays[index]
        if form >= ROWS:
            values = values[self._number_arrays[index][: form - ROWS]]
        return largest(values, values.dtype.name)

    @property
    def front(self) -> tuple[list[int], list[float], int]:
        """What ``describe`` was told."""
        told = self._front.unpack_from(self.whole)
        count = len(self.gradients)
        return list(told[:count]), list(told[count:-1]), told[-1]

    def add_rows(self, index: int, sparse: Tensor) -> int:
        """Of a gradient that is zero so far; how many of ``numbers`` name its rows."""
        array, numbers = self._arrays[index], self._number_arrays[index]
        rows = sparse.coalesce() if sparse._nnz() > numbers.size else sparse
        ids = rows._indices().contiguous().numpy()
        values = rows._values().detach().contiguous().numpy()
        add_rows(array, numbers, ids, values, array.shape[1], array.itemsize == WORD)
        return int(ids.size)

    def place(self, index: int, gradient: Tensor | None) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """The form of a gradient, and what must be copied where for it to be here."""
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
        """A gradient in rows, all zeros."""
        view, written = self.gradients[index], self.written[index]
        if written is None or written[1] != view._version:
            view.zero_()
        elif written[0]:
            view.index_fill_(0, self.numbers[index][: written[0]], 0.0)
        return view

    def describe(self, forms: Sequence[int], settings: Sequence[float], version: int) -> None:
        """In which form each gradient is here, what the optimizer is set to, and the version of the
        weights that the gradients are of."""
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
        """A gradient is zero but for the first so many of ``numbers``, as long as nobody changes
        it; its version."""
        version = self.gradients[index]._version
        self.written[index] = (rows, version)
        return version


def rows_of(plan: SegmentPlan, gradient: Gradient) -> int:
    tensor = plan.tensors[gradient.tensor]
    return tensor.numel // gradient.width if gradient.width else 0


class FiniteSlots:
    """Sees to it that gradients which do not count are absent from slots."""

    def __init__(self, plan: SegmentPlan, finite: FiniteGradients) -> None:
        self._finite = finite
        self._names = [plan.tensors[gradient.tensor].name for gradient in plan.gradients]

    def leave_out(self, slot: Slot, forms: list[int], step: int) -> None:
        """Changes the forms of a slot that is full."""
        self._finite.step = step
        for index, (form, name) in enumerate(zip(forms, self._names, strict=True)):
            if form != ABSENT and not self._finite.admits(name, slot.magnitude(index, form)):
                forms[index] = ABSENT
                slot.written[index] = None  # nobody applies it, so nobody leaves zeros


class SlotUpdates:
    """Fills slots, one a step; ``deliver`` is told when one is full."""

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
        share_buffers: Callable[[], None],
        finite: FiniteGradients | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        self._optimizer, self._slots, self._share_buffers = optimizer, slots, share_buffers
        self._parameters = [named[plan.tensors[g.tensor].name] for g in plan.gradients]
        self._strangers = strangers(optimizer, self._parameters)
        self._settings = Settings(optimizer)
        self._finite = FiniteSlots(plan, finite or FiniteGradients())
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._reserve, self._deliver, self._version = reserve, deliver, version
        self._slot: Slot | None = None
        self._rows: dict[int, tuple[int, int]] = {}  # how many rows, and the gradient's version
        self._seen = version()
        self.steps = 0
        ports = Ports(lambda *_: None, lambda _: True, lambda _: None, self._settled)
        self._ends: list[Callable[[], None]] = [capture(self._factored(model), ports)]
        for module in self._in_rows(model, plan):
            self._ends += [self._watch(module.weight), make_sparse(module)]

    def _factored(self, model: nn.Module) -> list[CompactLayer]:
        """Fully connected layers that are worth it."""
        layers = []
        for name, module, form, obstacle in named_forms(model):
            weight: Any = module.weight
            bias: Any = getattr(module, "bias", None)
            place = self._index.get(id(weight))
            known = place is not None and (bias is None or id(bias) in self._index)
            worth = form == "factors" and weight.numel() >= LEAST_FACTORS
            if known and worth and not obstacle:
                at = None if bias is None else self._index[id(bias)]
                layers.append(CompactLayer(shape_of(name, module, form), module, place or 0, at))
        return layers

    def _in_rows(self, model: nn.Module, plan: SegmentPlan) -> list[nn.Embedding]:
        rows = {id(p) for p, g in zip(self._parameters, plan.gradients, strict=True) if g.width}
        return [
            module
            for module in model.modules()
            if isinstance(module, nn.Embedding) and id(module.weight) in rows
        ]

    def _watch(self, parameter: Tensor) -> Callable[[], None]:
        arrived = partial(self._arrived, self._index[id(parameter)])
        handle: Any = parameter.register_post_accumulate_grad_hook(arrived)
        return lambda: handle.remove()

    # ---- gradients arrive

    def _open(self) -> Slot:
        if self._slot is None:
            self._slot = self._slots[self._reserve()]
        return self._slot

    def _arrived(self, index: int, parameter: Tensor) -> None:
        """Torch has a gradient of an embedding; of a second backward it is in the view already."""
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return
        slot = self._open()
        parameter.grad = slot.clean(index)
        rows = slot.add_rows(index, gradient)
        self._rows[index] = (rows, slot.note(index, rows))

    def _settled(self, layer: CompactLayer) -> None:
        """All uses of a layer in this backward are known."""
        if not layer.settle():
            return
        captured = layer.take()
        if captured is None:
            return
        x, dy = captured.first, captured.second
        self._write_product(layer.weight, dy.t(), x)
        if layer.bias is not None:
            self._write_sum(layer.bias, dy)

    def _write_product(self, index: int, left: Tensor, right: Tensor) -> None:
        view, parameter = self._open().gradients[index], self._parameters[index]
        if not parameter.requires_grad:  # any more
            return
        left, right = left.to(view.dtype), right.to(view.dtype)
        if parameter.grad is None:
            torch.mm(left, right, out=view)
            parameter.grad = view
        else:
            parameter.grad.addmm_(left, right)

    def _write_sum(self, index: int, rows: Tensor) -> None:
        view, parameter = self._open().gradients[index], self._parameters[index]
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            torch.sum(rows.to(view.dtype), 0, out=view)
            parameter.grad = view
        else:
            parameter.grad.add_(rows.sum(0))

    # ---- the step ends

    # This is what a step costs beside torch's own work, when nothing is in the caches: every line
    # that is gone through for every tensor counts.
    def end_step(self) -> None:
        check_strangers(self._strangers)
        slot = self._open()
        forms: list[int] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, (parameter, view) in enumerate(
            zip(self._parameters, slot.gradients, strict=True)
        ):
            gradient = parameter.grad
            if gradient is None:
                forms.append(ABSENT)
                continue
            parameter.grad = None
            if gradient is view:
                forms.append(self._form_of_view(slot, index, view))
                continue
            forms.append(DENSE)
            slot.written[index] = None
            targets.append(view)
            sources.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        self._finite.leave_out(slot, forms, self.steps)
        slot.describe(forms, self._settings(), self._seen)
        self._slot = None
        self._rows.clear()
        self._share_buffers()
        self._deliver(slot)
        self._seen = self._version()
        self.steps += 1

    def _form_of_view(self, slot: Slot, index: int, view: Tensor) -> int:
        """Of a gradient that was written into the slot."""
        rows = self._rows.get(index)
        if rows is None or rows[1] != view._version:
            slot.written[index] = None
            return DENSE
        slot.note(index, 0)  # whoever applies them leaves zeros
        return ROWS + rows[0]

    def settle(self) -> None:
        """Nothing is under way but what is in slots."""

    def begin_anew(self) -> None:
        """The weights have been replaced."""
        self._seen = self._version()

    def close(self) -> None:
        for end in self._ends:
            end()


def strangers(optimizer: torch.optim.Optimizer, known: Sequence[Tensor]) -> list[Tensor]:
    """Parameters of the optimizer that were frozen when the memory was laid out."""
    ids = {id(parameter) for parameter in known}
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if id(p) not in ids]


def check_strangers(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            raise unexpected_gradient(parameter)


def make_sparse(module: nn.Embedding) -> Callable[[], None]:
    """Torch gives its gradient in rows; returns what undoes it."""
    before, module.sparse = module.sparse, True

    def undo() -> None:
        module.sparse = before

    return undo


def slots_of(memory: SharedMemory, rings: Rings, plan: SegmentPlan, learner: int) -> list[Slot]:
    return [Slot(memory, rings.slot_at(learner, slot), plan) for slot in range(rings.slots)]
