"""Autograd hooks that report when a gradient is final, and when a backward pass has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from slipstream.torch.tensors.plain_copies import ModuleHook, keep_copies_plain


class BackwardTap:
    """Hooks on a model's parameters and outputs.

    ``on_ready(i)`` is called when parameter i's gradient is complete, ``on_end()`` once when the
    outermost backward pass that gave a parameter its gradient ends.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[tuple[int, torch.Tensor]],
        *,
        on_ready: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:
        self.paused = False
        self.used = False  # whether any parameter has had a gradient
        self._on_paused: Callable[[int], None] = lambda _: None
        self._open = False
        self._touched = False
        self._on_ready = on_ready
        self._on_end = on_end
        # The output's gradient comes first, in the outermost pass: re-entrant checkpointing runs
        # nested passes, whose end is not the end of backward.
        keep_copies_plain(model)
        self._handles = [model.register_forward_hook(ModuleHook(self._mark_outputs))]
        for index, parameter in parameters:
            hook = self._hook(index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def note_paused(self, on_paused: Callable[[int], None]) -> None:
        """Call this instead of ``on_ready`` while the tap is paused."""
        self._on_paused = on_paused

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            self.used = True
            if self.paused:
                self._on_paused(index)
                return
            self.touch()
            self._on_ready(index)

        return accumulated

    def touch(self) -> None:
        """A parameter has a gradient in this pass, whether or not its hook is called."""
        self._begin()
        self._touched = True

    def _mark_outputs(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, _gradient: torch.Tensor) -> None:
        if not self.paused:
            self._begin()

    def _begin(self) -> None:
        if not self._open:
            self._open = True
            Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """The pass is over; also called before a step, in case the pass was aborted."""
        touched = self._touched
        self._open = self._touched = False
        if touched:
            self._on_end()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
