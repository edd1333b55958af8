"""A learner's gradients, written into slots of shared memory as backward makes them.

Backward writes the gradient of a large fully connected layer straight into the slot, and of an
embedding only the rows that were used: the rest stays zero from step to step, and the slot says
which rows there are. ``.grad`` is a view of the slot then, whole and dense: clipping and
accumulation work on it as on any gradient. Others are copied, all at once, when the step ends.

When the step ends, the slot is given away, and with it the gradients: ``.grad`` is None then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream._native import Rings
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SETTINGS, Gradient, SegmentPlan
from slipstream.torch.compact_layers import (
    CompactLayer,
    Ports,
    capture,
    named_forms,
    shape_of,
)
from slipstream.torch.inventory import unexpected_gradient
from slipstream.torch.shared_weights import settings_of, view_of
from slipstream.transports.shared_memory import SharedMemory

NOWHERE = torch.empty(0, dtype=torch.int64)
# Below, a copy costs less than a layer's own way through autograd.
LEAST_FACTORS = 1 << 16


class Slot:
    """One slot as tensors: a view for each gradient, and what is said of them."""

    def __init__(self, memory: SharedMemory, at: int, plan: SegmentPlan) -> None:
        raw = memory.view(at, plan.slot_nbytes)
        self.forms = np.frombuffer(raw, np.uint64, len(plan.gradients))
        self.settings = np.frombuffer(raw, np.float64, plan.groups * SETTINGS, plan.settings_at)
        self.version = np.frombuffer(raw, np.uint64, 1, plan.version_at)
        self.whole = raw
        trained = [plan.tensors[gradient.tensor] for gradient in plan.gradients]
        widths = [gradient.width for gradient in plan.gradients]
        self._whole_nbytes = np.array([tensor.nbytes for tensor in trained], np.uint64)
        self._row_nbytes = np.array(
            [width * t.item_bytes for width, t in zip(widths, trained, strict=True)], np.uint64
        )
        self.gradients = [
            view_of(memory, at + gradient.at, tensor.shape, getattr(torch, tensor.dtype))
            for gradient in plan.gradients
            for tensor in [plan.tensors[gradient.tensor]]
        ]
        self.numbers = [
            view_of(memory, at + gradient.numbers_at, (rows_of(plan, gradient),), torch.int64)
            for gradient in plan.gradients
        ]
        # Of gradients in rows: where they are not zero, and when that was so; whoever applies rows
        # leaves zeros there. None: it may be anywhere, as another learner may have had the slot.
        self.written: list[tuple[Tensor, int] | None] = [None for _ in plan.gradients]

    def place(self, index: int, gradient: Tensor | None) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """The form of a gradient, and what must be copied where for it to be here."""
        if gradient is None:
            return ABSENT, []
        if gradient.is_sparse and len(self.numbers[index]):
            rows = gradient.coalesce()
            ids = rows.indices()[0].cpu()
            self.clean(index).index_copy_(0, ids, rows.values().cpu())
            self.numbers[index][: len(ids)] = ids
            self.note(index, NOWHERE)
            return ROWS + len(ids), []
        self.written[index] = None
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        return DENSE, [(self.gradients[index], whole)]

    def clean(self, index: int) -> Tensor:
        """A gradient in rows, all zeros."""
        view, written = self.gradients[index], self.written[index]
        if written is None or written[1] != view._version:
            view.zero_()
        elif len(written[0]):
            view.index_fill_(0, written[0], 0.0)
        return view

    @property
    def filled_nbytes(self) -> int:
        """What there is of gradients, whole or in rows."""
        whole = np.where(self.forms == DENSE, self._whole_nbytes, 0)
        rows = np.where(self.forms >= ROWS, (self.forms - ROWS) * self._row_nbytes, 0)
        return int(whole.sum() + rows.sum())

    def note(self, index: int, rows: Tensor) -> int:
        """A gradient is zero but for these rows, as long as nobody changes it; its version."""
        version = self.gradients[index]._version
        self.written[index] = (rows, version)
        return version


def rows_of(plan: SegmentPlan, gradient: Gradient) -> int:
    tensor = plan.tensors[gradient.tensor]
    return tensor.numel // gradient.width if gradient.width else 0


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
    ) -> None:
        named = dict(model.named_parameters())
        self._optimizer, self._slots, self._share_buffers = optimizer, slots, share_buffers
        self._parameters = [named[plan.tensors[g.tensor].name] for g in plan.gradients]
        self._strangers = strangers(optimizer, self._parameters)
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._reserve, self._deliver, self._version = reserve, deliver, version
        self._slot: Slot | None = None
        self._rows: dict[int, tuple[Tensor, int]] = {}  # touched rows, and the gradient's version
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
        ids, values = gradient._indices()[0], gradient._values().detach()
        parameter.grad = slot.clean(index).index_add_(0, ids, values)
        self._rows[index] = (ids, slot.note(index, ids))

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

    @torch.no_grad()
    def end_step(self) -> None:
        check_strangers(self._strangers)
        slot = self._open()
        copied: list[int] = []
        for index, parameter in enumerate(self._parameters):
            slot.forms[index] = self._form(slot, index, parameter, copied)
        if copied:
            gradients: list[Any] = [self._parameters[index].grad for index in copied]
            torch._foreach_copy_([slot.gradients[index] for index in copied], gradients)
        slot.settings[:] = np.concatenate(settings_of(self._optimizer))
        slot.version[0] = self._seen
        self._slot = None
        self._rows.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._share_buffers()
        self._deliver(slot)
        self._seen = self._version()
        self.steps += 1

    def _form(self, slot: Slot, index: int, parameter: Tensor, copied: list[int]) -> int:
        """In which a gradient is in the slot, or will be once those to be copied are."""
        gradient, view = parameter.grad, slot.gradients[index]
        if gradient is None:
            return ABSENT
        rows = self._rows.get(index)
        if gradient is view and rows is not None and rows[1] == view._version:
            numbers = slot.numbers[index]
            ids = rows[0] if len(rows[0]) <= len(numbers) else rows[0].unique()
            numbers[: len(ids)] = ids
            slot.note(index, NOWHERE)
            return ROWS + len(ids)
        slot.written[index] = None
        if gradient is not view:
            if gradient.is_sparse:
                parameter.grad = gradient.to_dense()
            copied.append(index)
        return DENSE

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
