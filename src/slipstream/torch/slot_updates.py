"""A learner's gradients, written into slots of shared memory as backward makes them.

A parameter's ``.grad`` is a view of the slot that this learner fills: clipping and accumulation
work on it as on any gradient. Backward writes a fully connected layer's straight there; others are
copied while they are in the cache. Of an embedding only the rows that were used are written: the
rest of its view stays zero from step to step, and the slot says which rows there are.

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
from slipstream.torch.shared_weights import settings_of, view_of
from slipstream.transports.shared_memory import SharedMemory

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
        self.gradients = [
            view_of(memory, at + gradient.at, tensor.shape, getattr(torch, tensor.dtype))
            for gradient in plan.gradients
            for tensor in [plan.tensors[gradient.tensor]]
        ]
        self.numbers = [
            view_of(memory, at + gradient.numbers_at, (rows_of(plan, gradient),), torch.int64)
            for gradient in plan.gradients
        ]
        # Of gradients in rows: where they are not zero. None: it may be anywhere, since another
        # learner may have had the slot before.
        self.written: list[Tensor | None] = [None for _ in plan.gradients]

    def place(self, index: int, gradient: Tensor | None) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """The form of a gradient, and what must be copied where for it to be here."""
        if gradient is None:
            return ABSENT, []
        if gradient.is_sparse and len(self.numbers[index]):
            rows = gradient.coalesce()
            ids = rows.indices()[0].cpu()
            self.clean(index).index_copy_(0, ids, rows.values().cpu())
            self.numbers[index][: len(ids)] = ids
            self.written[index] = ids
            return ROWS + len(ids), []
        self.written[index] = None
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        return DENSE, [(self.gradients[index], whole)]

    def clean(self, index: int) -> Tensor:
        """A gradient in rows, all zeros."""
        view, written = self.gradients[index], self.written[index]
        if written is None:
            view.zero_()
        else:
            view.index_fill_(0, written, 0.0)
        return view


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
    ) -> None:
        named = dict(model.named_parameters())
        self._optimizer, self._slots = optimizer, slots
        self._parameters = [named[plan.tensors[g.tensor].name] for g in plan.gradients]
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._reserve, self._deliver, self._version = reserve, deliver, version
        self._slot: Slot | None = None
        self._rows: dict[int, tuple[Tensor, int]] = {}  # touched rows, and the gradient's version
        self._seen = version()
        self.steps = 0
        layers = self._captured(model, plan)
        ports = Ports(lambda *_: None, lambda _: True, lambda _: None, self._settled)
        self._ends: list[Callable[[], None]] = [capture(layers, ports)]
        for i, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(partial(self._arrived, i))
            self._ends.append(hook.remove)

    def _captured(self, model: nn.Module, plan: SegmentPlan) -> list[CompactLayer]:
        """Embeddings, and fully connected layers that are worth it."""
        layers = []
        for name, module, form, obstacle in named_forms(model):
            weight: Any = module.weight
            bias: Any = getattr(module, "bias", None)
            place = self._index.get(id(weight))
            known = place is not None and (bias is None or id(bias) in self._index)
            worth = form == "rows" or weight.numel() >= LEAST_FACTORS
            if known and worth and not obstacle:
                at = None if bias is None else self._index[id(bias)]
                layers.append(CompactLayer(shape_of(name, module, form), module, place or 0, at))
        return layers

    # ---- gradients arrive

    def _open(self) -> Slot:
        if self._slot is None:
            self._slot = self._slots[self._reserve()]
        return self._slot

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        """Torch has added to a gradient."""
        slot, gradient = self._open(), parameter.grad
        if gradient is None or gradient is slot.gradients[index]:
            return
        if gradient.is_sparse and len(slot.numbers[index]):
            gradient = gradient.coalesce()
            self._write_rows(index, gradient.indices()[0], gradient.values())
            return
        self._write_all(index, gradient.to_dense() if gradient.is_sparse else gradient)

    def _write_all(self, index: int, gradient: Tensor) -> None:
        slot = self._open()
        slot.gradients[index].copy_(gradient)
        slot.written[index] = None
        self._rows.pop(index, None)
        self._parameters[index].grad = slot.gradients[index]

    @torch.no_grad()
    def _settled(self, layer: CompactLayer) -> None:
        """All uses of a layer in this backward are known."""
        if not layer.settle():
            return
        captured = layer.take()
        if captured is None:
            return
        if layer.shape.form == "rows":
            self._write_rows(layer.weight, captured.first, captured.second)
            return
        x, dy = captured.first, captured.second
        self._write_product(layer.weight, dy.t(), x)
        if layer.bias is not None:
            self._write_sum(layer.bias, dy)

    def _write_rows(self, index: int, ids: Tensor, values: Tensor) -> None:
        slot, parameter = self._open(), self._parameters[index]
        view = slot.gradients[index]
        if parameter.grad is None or parameter.grad.is_sparse:
            slot.clean(index).index_copy_(0, ids, values.to(view.dtype))
            parameter.grad = view
            slot.written[index] = ids
            self._rows[index] = (ids, view._version)
            return
        before = self._rows.pop(index, None)
        untouched = before is not None and before[1] == view._version  # by anybody else
        parameter.grad.index_add_(0, ids, values.to(parameter.grad.dtype))
        slot.written[index] = None
        if parameter.grad is view and before is not None and untouched:
            both = torch.cat([before[0], ids]).unique()
            slot.written[index] = both
            self._rows[index] = (both, view._version)

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
        slot = self._open()
        for index, parameter in enumerate(self._parameters):
            slot.forms[index] = self._form(slot, index, parameter.grad)
        slot.settings[:] = np.concatenate(settings_of(self._optimizer))
        slot.version[0] = self._seen
        self._slot = None
        self._rows.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self._deliver(slot)
        self._seen = self._version()
        self.steps += 1

    def _form(self, slot: Slot, index: int, gradient: Tensor | None) -> int:
        view = slot.gradients[index]
        if gradient is None:
            return ABSENT
        if gradient is not view:  # somebody has put another one there
            self._write_all(index, gradient.to_dense() if gradient.is_sparse else gradient)
            return DENSE
        rows = self._rows.get(index)
        if rows is None or rows[1] != view._version:
            slot.written[index] = None
            return DENSE
        slot.numbers[index][: len(rows[0])] = rows[0]
        return ROWS + len(rows[0])

    def settle(self) -> None:
        """Nothing is under way but what is in slots."""

    def begin_anew(self) -> None:
        """The weights have been replaced."""
        self._seen = self._version()

    def close(self) -> None:
        for end in self._ends:
            end()


def slots_of(memory: SharedMemory, rings: Rings, plan: SegmentPlan, learner: int) -> list[Slot]:
    return [Slot(memory, rings.slot_at(learner, slot), plan) for slot in range(rings.slots)]
