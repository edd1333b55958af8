"""Writes a learner's gradients into slots of shared memory as backward computes them.

Backward writes the gradient of a large fully connected layer directly into the slot, and of an
embedding only the used rows: the rest stays zero from step to step, and the slot lists
the rows. ``.grad`` is then a view of the slot, whole and dense: clipping and
accumulation work on it as on any gradient. Other gradients are copied, all at once, when the step
ends.

When the step ends, the slot is passed on with its gradients: ``.grad`` is None then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.planning.segment import ABSENT, DENSE, ROWS, SegmentPlan
from slipstream.torch.capture.replaced_weights import FirstWeights, Memory, refuse_replaced
from slipstream.torch.modes.learner_slots import Slot, SlotWriter
from slipstream.torch.modes.shared_weights import SharedWeights
from slipstream.torch.tensors.compact_layers import CompactLayer, Ports, capture, named_forms
from slipstream.torch.tensors.plain_copies import ReplacedForward, keep_copies_plain

# For smaller layers, a copy costs less than the layer's own node in autograd.
LEAST_FACTORS = 1 << 16


class SlotUpdates:
    """Fills slots, one per step.

    Args:
        weights: The shared weights; the model's tensors are views of them.
        first: Decides about weights that the loop has put in place before its first step.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SegmentPlan,
        slots: SlotWriter,
        weights: SharedWeights,
        first: FirstWeights,
    ) -> None:
        self._slots, self._weights, self._first = slots, weights, first
        self._names, self._bound, shared = weights.bound()
        self._memory = Memory(shared)
        self._parameters = slots.parameters
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._slot: Slot | None = None
        self._rows: dict[int, tuple[int, int]] = {}  # how many rows, and the gradient's version
        self._seen = slots.version()
        self.steps = 0
        ports = Ports(
            may_take=lambda _: True,
            entered=lambda *_: None,
            takes=lambda _: True,
            captured=lambda _: None,
            finished=self._layer_finished,
            way_out="use gadei(consistent=True), which takes torch's own gradients, or async_sgd()",
        )
        self._ends: list[Callable[[], None]] = [capture(self._factored(model), ports)]
        for module in self._in_rows(model, plan):
            self._ends += [self._watch(module.weight), make_sparse(module)]

    def _factored(self, model: nn.Module) -> list[CompactLayer]:
        """Fully connected layers that are large enough."""
        layers = []
        for name, module, form, obstacle in named_forms(model):
            own = (module.weight, getattr(module, "bias", None))
            known = all(parameter is None or id(parameter) in self._index for parameter in own)
            if form == "factors" and known and not obstacle:
                layer = CompactLayer.of(name, module, form, self._index)
                if layer.module.weight.numel() >= LEAST_FACTORS:
                    layers.append(layer)
        return layers

    def _in_rows(self, model: nn.Module, plan: SegmentPlan) -> list[nn.Embedding | nn.EmbeddingBag]:
        rows = {id(p) for p, g in zip(self._parameters, plan.gradients, strict=True) if g.width}
        return [
            module
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in rows
        ]

    def _watch(self, parameter: Tensor) -> Callable[[], None]:
        arrived = partial(self._arrived, self._index[id(parameter)])
        handle: Any = parameter.register_post_accumulate_grad_hook(arrived)
        return lambda: handle.remove()

    # ---- gradients arrive

    def _open(self) -> Slot:
        if self._slot is None:
            self._slot = self._slots.next()
        return self._slot

    def _arrived(self, index: int, parameter: Tensor) -> None:
        """Torch has an embedding's gradient; that of a second backward is already in the view."""
        gradient = parameter.grad
        if gradient is None or not gradient.is_sparse:
            return
        slot = self._open()
        parameter.grad = slot.clean(index)
        rows = slot.add_rows(index, gradient)
        self._rows[index] = (rows, slot.note(index, rows))

    def _layer_finished(self, layer: CompactLayer) -> None:
        """The backward of all uses of a layer in this pass has run."""
        if not layer.finish():
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

    # This is what a step costs in addition to torch's own work, when nothing is in the caches:
    # every line that runs for every tensor counts.
    def end_step(self) -> None:
        """Pass the gradients on.

        Raises:
            RuntimeFault: The loop has replaced a parameter, which is shared.
        """
        self._slots.refuse_untracked()
        if replaced := self._memory.replaced(self._bound):
            self._take_replaced(replaced)
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
        self._slots.examine(slot, forms, self.steps)
        self._slot = None
        self._rows.clear()
        self._weights.copy_out_buffers()
        self._slots.deliver(slot, forms, self._slots.settings(), self._seen)
        self._seen = self._slots.version()
        self.steps += 1

    def _take_replaced(self, replaced: list[int]) -> None:
        """Share parameters that were replaced before the first step: all learners do so."""
        names = [self._names[i] for i in replaced]
        if self.steps:
            raise refuse_replaced(names[0])
        if self._first.count(names, [self._bound[i] for i in replaced]):
            self._memory.take(self._names, self._bound, replaced)
        self._memory.restore(self._bound, replaced)

    def replaced(self) -> list[str]:
        """The names of parameters that the loop has replaced since the last step."""
        return [self._names[i] for i in self._memory.replaced(self._bound)]

    def _form_of_view(self, slot: Slot, index: int, view: Tensor) -> int:
        """The form of a gradient that was written into the slot."""
        rows = self._rows.get(index)
        if rows is None or rows[1] != view._version:
            slot.written[index] = None
            return DENSE
        slot.note(index, 0)  # applying them sets them to zero
        return ROWS + rows[0]

    def finish(self) -> None:
        """Nothing to do: everything in flight is in slots."""

    def begin_anew(self) -> None:
        """The shared weights have been replaced."""
        self._memory.restore(self._bound, self._memory.replaced(self._bound))
        self._weights.copy_in_unbound()
        self._seen = self._slots.version()

    def close(self) -> None:
        for end in self._ends:
            end()


class SparseForward(ReplacedForward):
    """A table's forward with a gradient in rows; copies of the table do not have it."""

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        before, self.module.sparse = self.module.sparse, True
        try:
            return self.plain()(*arguments, **named)
        finally:
            self.module.sparse = before


def make_sparse(module: nn.Embedding | nn.EmbeddingBag) -> Callable[[], None]:
    """Let torch compute its gradient in rows; returns a function that undoes this."""
    keep_copies_plain(module)
    vars(module)["forward"] = SparseForward(module)

    def undo() -> None:
        vars(module).pop("forward", None)

    return undo
