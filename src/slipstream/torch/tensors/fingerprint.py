"""Short hashes of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from slipstream.torch.tensors.inventory import whole_state
from slipstream.torch.tensors.staging import Staging


class Fingerprints(NamedTuple):
    """Of every parameter, and of every parameter and buffer."""

    parameters: str
    whole: str


def fingerprints(model: nn.Module) -> Fingerprints:
    """SHA-256 over every parameter, and over every parameter and buffer, by name.

    Without integers: batch norm's count of batches is local to each worker.
    """
    digest = hashlib.sha256()
    staging = Staging()
    state = whole_state(model)
    first_buffer = len(list(model.parameters()))
    parameters = digest
    for key, (name, tensor) in enumerate(state):
        if key == first_buffer:
            parameters = digest.copy()
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        staging.fetch(key, tensor)
        digest.update(staging.readable(key, tensor).data)
    return Fingerprints(parameters.hexdigest(), digest.hexdigest())


def digest_of(tensors: Sequence[Tensor]) -> str:
    """SHA-256 over the values of tensors."""
    digest = hashlib.sha256()
    staging = Staging()
    for key, tensor in enumerate(tensors):
        staging.fetch(key, tensor.detach())
        digest.update(staging.readable(key, tensor.detach()).data)
    return digest.hexdigest()


def fingerprints_of(models: Sequence[nn.Module]) -> Fingerprints:
    """The hashes of one model, or of several in this order."""
    found = [fingerprints(model) for model in models]
    return found[0] if len(found) == 1 else Fingerprints(*map(joined, zip(*found, strict=True)))


def joined(hashes: Sequence[str]) -> str:
    """One hash of several."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
