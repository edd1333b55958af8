"""A short hash of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor, nn

from slipstream.torch.inventory import whole_state
from slipstream.torch.staging import Staging


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over every parameter and buffer, by name.

    Without integers: batch norm's count of batches is local to each worker.
    """
    digest = hashlib.sha256()
    staging = Staging()
    for key, (name, tensor) in enumerate(whole_state(model)):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        staging.fetch(key, tensor)
        digest.update(staging.readable(key, tensor).data)
    return digest.hexdigest()


def digest_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the values of tensors."""
    digest = hashlib.sha256()
    staging = Staging()
    for key, tensor in enumerate(tensors):
        staging.fetch(key, tensor.detach())
        digest.update(staging.readable(key, tensor.detach()).data)
    return digest.hexdigest()


def fingerprint_of(models: Sequence[nn.Module]) -> str:
    """The hash of one model, or of several in this order."""
    names = [fingerprint(model) for model in models]
    return names[0] if len(names) == 1 else hashlib.sha256("".join(names).encode()).hexdigest()
