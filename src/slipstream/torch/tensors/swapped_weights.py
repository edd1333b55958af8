"""Puts other weights into a model for a while; afterwards it has its own, the very same memory.

What arrives meanwhile goes to the model's own, or waits, and nobody sees the others: whoever holds
the own memory need not know of the block. Versions are kept, too: for autograd, and for those who
look whether the loop has changed weights, it was never there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from slipstream.errors import RuntimeFault
from slipstream.torch.tensors.inventory import place_of, whole_state


@contextmanager
def swapped_in(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, the model has these weights.

    Args:
        weights: By the name of a parameter or buffer; others stay as they are.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    swapped = [(name, tensor) for name, tensor in named if name in weights]
    own = [tensor.data for _, tensor in swapped]
    buffers = [(place_of(model, n), b) for n, b in model.named_buffers() if n in weights]
    try:
        with ExitStack() as versions:
            for _, tensor in swapped:
                versions.enter_context(_unsafe_preserve_version_counter(tensor))
            for name, tensor in swapped:
                tensor.data = weights[name].to(tensor)
            yield
    finally:
        for (_, tensor), data in zip(swapped, own, strict=True):
            tensor.data = data
        for (module, name), buffer in buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


def copies(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name, in memory of their own."""
    return {name: tensor.clone() for name, tensor in whole_state(model)}


@contextmanager
def without_steps(optimizer: torch.optim.Optimizer, block: str) -> Iterator[None]:
    """Refuse the optimizer's steps within a block, in which the model has other weights.

    Hooks that the optimizer had before run before this: where these exchange gradients, they refuse
    the step themselves.
    """

    def refuse(*_: Any) -> None:
        raise outside_of("optimizer.step()", block)

    handle = optimizer.register_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def outside_of(call: str, block: str) -> RuntimeFault:
    """The error for a call within a block in which the models have other weights."""
    return RuntimeFault(
        f"{call} within {block}, where the models have other weights than those in training: call "
        "it after the block"
    )
