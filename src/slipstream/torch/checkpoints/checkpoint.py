"""Checkpoints: one safetensors file with tensors by name and everything else as JSON.

Written completely or not at all, and independent of the number of workers and servers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime.files import checkpoint_format
from slipstream.runtime.files.checkpoint_format import MOST_HEADER_NBYTES, Piece
from slipstream.runtime.files.whole_files import write_whole
from slipstream.runtime.shared_memory.checkpoints import pieces_at, refuse_to_lose
from slipstream.torch.tensors.inventory import dtype_text, whole_state


@dataclass(slots=True)
class Checkpoint:
    """What a file holds: named tensors, and JSON that may refer to them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    buffers: Collection[str] = ()  # names of tensors that may become infinite on purpose

    def write(self, path: Path) -> None:
        """Write the file completely or not at all.

        Raises:
            CheckpointError: It could not be read back, or would replace finite values by non-finite
                ones.
        """
        pairs = [name for name, t in self.tensors.items() if t.dtype == torch.complex128]
        plain = {**self.tensors, **{n: torch.view_as_real(self.tensors[n]) for n in pairs}}
        judged = {name: tensor for name, tensor in plain.items() if name not in self.buffers}
        refuse_to_lose(path, pieces_of(judged), lambda: pieces_at(path))
        facts = json.dumps(self.facts)
        about = {"slipstream": facts, "pairs": json.dumps(pairs), "crc": str(crc(facts, plain))}
        content = save(plain, about)
        try:
            check_readable(facts, content)
        except ValueError as error:
            raise CheckpointError(f"cannot write {path}: {error}") from error
        write_whole(path, [content])

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a complete file.

        Raises:
            CheckpointError: There is none, or it is damaged.
        """
        content = checkpoint_format.read(path)
        tensors = {name: tensor_of(piece) for name, piece in content.pieces.items()}
        for name in content.pairs:
            tensors[name] = torch.view_as_complex(tensors[name])
        return cls(tensors, content.facts)


def check_readable(facts: str, content: bytes) -> None:
    """Refuse to write a file that could not be read.

    Raises:
        ValueError: Its header is too long, or its facts are nested too deeply.
    """
    checkpoint_format.check_nesting(facts.encode())
    header = int.from_bytes(content[:8], "little")
    if header > MOST_HEADER_NBYTES:
        raise ValueError(f"its header has {header} bytes, more than {MOST_HEADER_NBYTES}")


def crc(facts: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """The same checksum that servers compute without torch."""
    return checkpoint_format.crc(facts, pieces_of(tensors))


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    return {name: piece_of(tensor) for name, tensor in tensors.items()}


def piece_of(tensor: torch.Tensor) -> Piece:
    """A tensor in the format without torch."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Piece(dtype_text(tensor.dtype), tuple(tensor.shape), memoryview(flat))


def tensor_of(piece: Piece) -> torch.Tensor:
    """A tensor that shares the piece's memory."""
    flat = torch.from_numpy(np.asarray(piece.data))
    return flat.view(getattr(torch, piece.dtype)).reshape(piece.shape)


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain data as JSON; tensors are stored under a name and replaced by a reference.

    Args:
        tensors: Where tensors are stored.

    Raises:
        CheckpointError: The value holds something other than tensors and plain data.
    """
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a/b": …} and {"a": {"b": …}} would get the same name
            name += "'"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return {"$dict": [[key, pack(v, f"{name}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = "$tuple" if isinstance(value, tuple) else "$list"
        return {kind: [pack(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"optimizer state {name} holds a {type(value).__name__}, which a checkpoint cannot keep"
    )


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model, by their names in a checkpoint."""
    return {
        f"model/{name}": tensor.cpu().contiguous().clone() for name, tensor in whole_state(model)
    }


def check_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint must hold exactly this model's tensors.

    Raises:
        ValueError: One is missing or unknown, or has another shape or dtype.
    """
    here = {f"model/{name}": tensor for name, tensor in whole_state(model)}
    there = {name: t for name, t in tensors.items() if name.startswith("model/")}
    for name in sorted(here.keys() ^ there.keys()):
        side = "the checkpoint" if name in there else "the model"
        raise ValueError(f"only {side} has {name.removeprefix('model/')!r}")
    for name, tensor in here.items():
        check_layout(repr(name.removeprefix("model/")), there[name], tensor.shape, tensor.dtype)


def check_layout(what: str, saved: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Compare a saved tensor's layout with that of this job.

    Args:
        what: Names the tensor in the error.

    Raises:
        ValueError: The saved one has another shape or dtype.
    """
    if saved.shape != shape or saved.dtype != dtype:
        raise ValueError(
            f"{what} is {tuple(saved.shape)} {saved.dtype} there, "
            f"{tuple(shape)} {dtype} in this job"
        )


def load_model(model: nn.Module, checkpoint: Checkpoint, section: str = "") -> None:
    """Load from the section with this prefix."""
    with torch.no_grad():
        for name, tensor in whole_state(model):
            tensor.copy_(checkpoint.tensors[f"{section}model/{name}"])
