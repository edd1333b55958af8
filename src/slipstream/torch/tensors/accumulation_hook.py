"""A hook on the node with which autograd writes a parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AccumulationHook:
    """Calls back when torch is done with a parameter's ``.grad`` in a pass, written or not."""

    def __init__(self, parameter: Tensor, call: Callable[[], None]) -> None:
        # Torch keeps the node only while a graph does, and hooks are deleted with it.
        self._node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(lambda *_: call())

    def remove(self) -> None:
        self._handle.remove()
