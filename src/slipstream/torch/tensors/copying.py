"""Copies rank 0's tensors to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from slipstream.runtime.exchange.state_chain import StateChain
from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.staging import Staging
from slipstream.types import Values


def copy_state(chain: StateChain, model: nn.Module) -> bool:
    """Copy all parameters and buffers of rank 0's model to all ranks; returns whether all
    arrived."""
    return chain.run(*staged([tensor for _, tensor in whole_state(model)]))


def staged(tensors: Sequence[torch.Tensor]) -> tuple[list[Values], Callable[[], None]]:
    """Host memory with these tensors' values, and a function that copies it back into them."""
    staging = Staging()
    views = []
    for key, tensor in enumerate(tensors):
        staging.fetch(key, tensor)
        staging.readable(key, tensor)
        views.append(staging.writable(key, tensor))

    def finish() -> None:
        for key, tensor in enumerate(tensors):
            staging.commit(key, tensor)

    return views, finish
